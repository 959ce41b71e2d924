"""Batching over paged KV memory: what each step computes, and for whom.

Pure: no clock, no I/O, no tensors, no threads, no logging. Calls in, batches and deltas out. There is no prefill and no
decode mode: a request has tokens and a count of computed ones, and a step hands out one budget of tokens.

    submit -> WAITING --joins--> RUNNING --end id, length, error, cancel, deadline--> FINISHED
                 ^                  +----- its batch goes on -----> GHOST ----------------------^
                 +---- preempted ---+       (blocks dropped, tokens kept: recomputed when it joins again)

**Who gets the budget.** `max_num_batched_tokens` is never exceeded.
1. Requests with one pending token (decoding) go first. While prompt tokens are pending they leave half of the
   budget (at least 1 token, at most what is pending) to prompts. When there are more of them than they may take, the
   ones served longest ago go first.
2. Prompts, and what must be recomputed, take the rest, but no more than keeps the step within the target for the gap
   between two tokens of those who decode. The first in rank goes first; only prompts that this very step completes pass
   it, with half of what is there.
So a prompt advances in every step and every decoding request is served within a bounded number of steps, also when the
budget is smaller than the number of requests.

**Who gets blocks.** A running request holds blocks for every token it has; it needs one more only when its newest token
does not fit. Short of blocks, the running request that is last in rank is preempted, before anybody is given a segment,
and nobody joins in that step. The first in rank is never preempted and always ends.

Who may join is the business of `gate` (when), `policy` (in which order) and `admission` (whether it fits); which blocks
it need not fill is that of `prefix`; what a step computes of prompts that of `budget`, and how long it takes of `cost`.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from potok.core.admission import Limits, Reject, Room, fit, headroom, joining, refusal
from potok.core.batch import Batch, Copy, Delta, Segment
from potok.core.blocks import BlockPool
from potok.core.budget import Budget, of_rows
from potok.core.cost import CostModel, Work, prompt_context
from potok.core.deadlines import Deadlines
from potok.core.describe import Prefix, top_prefixes
from potok.core.gate import Continuous, Gate
from potok.core.invariants import check
from potok.core.policy import Policy
from potok.core.prefix import PrefixCache
from potok.core.request import Phase, Request
from potok.core.tier import Done, Tier, Transfer
from potok.finish import Finish

__all__ = ["Counters", "Limits", "Reject", "Scheduler"]

BY_RANK = attrgetter("rank")
LEAST_RECENTLY_SERVED = attrgetter("served", "rank")
#: What means over steps and over answers follow the newest by.
FOLLOW = 0.05


@dataclass(slots=True)
class Counters:
    """Totals since the start, and two running means."""

    steps: int = 0
    busy_us: int = 0  # time inside the steps
    prompt_tokens: int = 0  # prompt tokens computed, recomputed ones counted again
    generation_tokens: int = 0  # tokens sampled
    preemptions: int = 0
    padding_rows: int = 0  # of ghosts
    timeouts: int = 0  # requests that missed a deadline, or were bound to
    slow_steps: int = 0  # whose decoding alone was expected to take longer than the target
    mean_step_us: float = 0.0
    mean_answer: float = 0.0  # tokens


class Scheduler:
    """One step is in flight at a time: schedule() -> the backend -> commit(). cancel() and submit() are legal always.

    prefix_caching: requests with the same first tokens share the blocks of these. policy: of joining; its own object,
    as it may keep accounts; None: first come, first served. gate: when requests may join. target_us: the gap between
    two tokens to keep while prompts are computed; 0: none. cost: what steps are expected to take, before any has run.
    tier: where more blocks may be. What take_transfers() asks for after each schedule() is done beside the steps, and
    its end told by transferred().
    checked: verify all invariants after each commit (slow: for tests and for hunting a bug).
    """

    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        *,
        prefix_caching: bool = True,
        policy: Policy | None = None,
        gate: Gate | None = None,
        target_us: int = 0,
        cost: CostModel | None = None,
        tier: Tier | None = None,
        checked: bool = False,
    ) -> None:
        self.limits = limits
        self.policy = policy or Policy()
        self.gate = gate or Continuous()
        self.target_us = target_us
        self.cost = cost or CostModel()
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, limits.block_size, enabled=prefix_caching, tier=tier)
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []  # by rank
        self.ghosts: list[Request] = []  # members of the batch that have ended before it
        self.leaving: list[Request] = []  # ended while a step is in flight: its commit releases their blocks
        self.waiting_tokens = 0
        self.counters = Counters()
        self._live: dict[int, Request] = {}  # whose end has not been told, by id
        self._held: list[Request] = []  # of them, those whose end is told when the batch has ended
        self._ended: list[Delta] = []  # ends that no step is to tell
        self._budget = Budget(limits, self.cost, target_us)
        self._deadlines = Deadlines(self._live, self._prompt_us)
        self._flight: Batch | None = None
        self._flying: list[Request] = []  # whose segments those of _flight are
        self._work = Work(0, 0, 0, 0)  # of _flight
        self._num_padding = 0  # rows of _flight
        self._copies: list[Copy] = []  # of the step that is being made
        self._arrivals = 0
        self._step = 0
        self._checked = checked

    def submit(self, request: Request) -> Reject | None:
        """Queues the request; one that can never fit is refused, with the limit in the message."""
        assert request.id not in self._live, f"request {request.id} is live already"
        reject = refusal(request, self.limits, self.pool.num_blocks)
        if reject is None:
            request.last_len = self.limits.last_len(request)
            request.order = self._arrivals
            request.rank = self.policy.rank(request)
            self._arrivals += 1
            self._live[request.id] = request
            self._queue(request)
            self.policy.arrive(request)
            self._deadlines.add(request)
        return reject

    def cancel(self, id: int) -> None:
        """Ends the request, in whatever phase it is. An unknown id is ignored: it may just have finished."""
        request = self._live.pop(id, None)
        if request is None:
            return
        if request in self._held:
            self._held.remove(request)
            if request.phase is Phase.GHOST:
                self.ghosts.remove(request)
                self._let_go(request)
        else:
            self._drop(request, Finish.CANCELLED)

    @property
    def flight(self) -> Batch | None:
        """The step that has been scheduled and not committed."""
        return self._flight

    def wake_at(self) -> int | None:
        """When (us) to call schedule() again although nothing arrives. None: no need."""
        times = [self.cache.transfers.wake_at(), self._deadlines.wake_at() if self._live else None]
        if not self.running:
            times.append(self.gate.wake_at(self.waiting))
        return min([t for t in times if t is not None], default=None)

    def place_us(self) -> int:
        """How long until one more of those who wait can join, as steps and answers have been of late. 0: unknown."""
        counters = self.counters
        return int(counters.mean_step_us * counters.mean_answer / max(1, len(self.running)))

    def transferred(self, done: Sequence[Done]) -> None:
        """Ends of transfers that take_transfers() asked for, in any order. Before schedule()."""
        assert self._flight is None, "blocks change hands between steps"
        for request in self.cache.transferred(done):
            request.served = self._step  # it comes into its turn behind those who have waited in the steps

    def take_transfers(self) -> list[Transfer]:
        """Transfers between blocks and the second tier to begin now. After schedule()."""
        return self.cache.transfers.take()

    def take_ended(self) -> list[Delta]:
        """Requests that ended without a step to tell of it: by a deadline, or with their batch. After schedule()."""
        ended, self._ended = self._ended, []
        return ended

    def top_prefixes(self, top: int, namespace: str | None = None) -> list[Prefix]:
        """What the prefix cache is good for: see potok.core.describe."""
        return top_prefixes(self.cache.tree, top, namespace)

    def schedule(self, now_us: int) -> Batch | None:
        """The next step, or None when there is nothing to compute. now_us: the engine's clock."""
        assert self._flight is None, "a step is in flight; commit it first"
        self._end_missed(now_us)
        for request in self.cache.transfers.late(now_us):
            self.running.remove(request)
            self.cache.give_up(request)
            self._requeue(request)
        if self._held or self.ghosts:
            self._ended += self._end_batch()
            if not self.running:  # who is left of the batch may need the ghosts' blocks to join
                self._drop_ghosts()
        size = self.limits.block_size
        short = [r for r in self.running if len(r.tokens) > len(r.blocks) * size]
        preempted = self._make_room(short) if short else False
        decoding: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            if not request.loading:
                (decoding if len(request.tokens) - request.computed == 1 else prompts).append(request)
        if not preempted and self.waiting:
            self._join(now_us, decoding, prompts)

        pending = sum([r.pending for r in prompts]) if prompts else 0
        share = self.limits.max_num_batched_tokens - min(self._budget.prompt_share, pending)
        decoding += self.ghosts
        if len(decoding) > share:
            decoding = sorted(decoding, key=LEAST_RECENTLY_SERVED)[:share]
        # The newest token, and all blocks: what _segment(r, 1) gives, at a third of the time.
        segments = [
            Segment(r.id, r.computed, r.tokens[-1:], r.blocks[:], True) if r.finish is None else self._padding(r)
            for r in decoding
        ]
        self._flying = decoding
        work = alone = of_rows(decoding)
        self.counters.slow_steps += self._budget.is_slow(alone)
        for request, n in self._budget.portions(prompts, pending, alone) if prompts else ():
            segment = self._segment(request, n)
            segments.append(segment)
            self._flying.append(request)
            work = work.plus(n, segment.num_rows, prompt_context(request.computed, n))
        if not segments:
            return None
        self._step = step = self._step + 1
        for request in self._flying:
            request.served = step
        self._flight = batch = Batch(step, tuple(segments), tuple(self._copies))
        self._work = work
        self._num_padding = sum([r.phase is Phase.GHOST for r in decoding]) if self.ghosts else 0
        self._copies.clear()
        return batch

    def commit(self, batch: Batch, sampled_ids: Sequence[int], step_us: int) -> list[Delta]:
        """What the step gave: `sampled_ids` for each row whose logits were wanted; -1 is a row that failed.

        step_us: how long the step took. Requests cancelled meanwhile are not reported.
        """
        assert batch is self._flight, "only the step in flight can be committed"
        rows = self._work.sampled
        assert len(sampled_ids) == rows, f"{len(sampled_ids)} ids for {rows} sampled rows"
        deltas, row, ended, prompts, failed = [], -1, False, 0, 0
        block_size = self.limits.block_size
        for segment, request in zip(batch.segments, self._flying, strict=True):
            _, start, tokens, _, sample, rate = segment
            first, row = row + 1, row + sample + len(rate)
            end = start + len(tokens)
            if start < request.prompt_len and request.phase is not Phase.GHOST:
                prompts += min(end, request.prompt_len) - start
            if request.finish is not None:  # cancelled while the step ran, or a ghost
                continue
            request.computed = end
            if end // block_size > start // block_size:
                self.cache.publish(request)
            request.rated += len(rate)
            if min(sampled_ids[first : row + 1]) < 0 if rate else sample and sampled_ids[row] < 0:
                deltas.append(self._fail(request, row))
                failed += 1
            elif sample:
                deltas.append(self._take(request, sampled_ids[row], row))
            ended |= request.finish is not None
        self._count(batch, len(deltas) - failed, prompts, step_us)

        self._flight, self._flying = None, []
        if batch.copies:
            self.cache.end_copies()
        if ended:
            self.running = [r for r in self.running if r.phase is Phase.RUNNING]
            self._deadlines.forget_ended()
        if self.leaving:
            for request in self.leaving:
                self.cache.release(request)
            self.leaving = []
        if self._held or self.ghosts:
            deltas += self._end_batch()
        if self._checked:
            check(self)
        return deltas

    # -- schedule -------------------------------------------------------------------------------------------------

    def _end_missed(self, now_us: int) -> None:
        for request in self._deadlines.missed(now_us):
            del self._live[request.id]
            if request in self._held:  # complete: it waits for its batch no longer
                self._held.remove(request)
            else:
                self._drop(request, Finish.TIMEOUT)
                self.counters.timeouts += 1
            self._ended.append(Delta(request.id, None, request.finish))

    def _prompt_us(self, request: Request) -> float:
        """What the rest of a request's prompt is expected to take. One that waits finds some of it in the cache.

        What is read counts as done: nobody knows how much will come, and what does not is seen when the reads are over.
        """
        done = request.computed
        if request.phase is Phase.WAITING:
            match = self.cache.match(request)
            done = match.num_tokens + match.read * len(match.stored) * self.limits.block_size
        if request.loading:
            done = len(request.tokens)
        return self.cost.prompt_us(done, max(0, len(request.tokens) - done))

    def _make_room(self, short: list[Request]) -> bool:
        """Gives each of these the block that its newest token needs; whether somebody was preempted for it."""
        preempted = False
        while len(short) > self.pool.available:
            if self.ghosts:  # nobody needs what they compute
                self._let_go(self.ghosts.pop())
                continue
            last = self.running.pop()
            if short[-1] is last:
                short.pop()
            self._preempt(last)
            preempted = True
        for request in short:
            request.blocks += self.cache.alloc(1)
        return preempted

    def _preempt(self, request: Request) -> None:
        request.preemptions += 1
        self._requeue(request)
        self.counters.preemptions += 1

    def _requeue(self, request: Request) -> None:
        """Back to the queue, to its place in rank. What is lost by then is recomputed, to the bit."""
        self.cache.release(request)
        request.computed = 0
        request.overtaken = 0
        request.move(Phase.WAITING)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        insort(self.waiting, request, key=BY_RANK)
        self.waiting_tokens += len(request.tokens)

    def _unqueue(self, request: Request) -> None:
        self.waiting.remove(request)
        self.waiting_tokens -= len(request.tokens)

    def _join(self, now_us: int, decoding: list[Request], prompts: list[Request]) -> None:
        """Moves waiting requests into `running` and `prompts`, no more than can get a token in this step."""
        full = len(self.running) >= self.limits.max_num_seqs
        if full and not self.policy.preempts:
            return
        room = self._budget.room(of_rows(decoding + self.ghosts), prompts, self.policy.by_rank)
        candidates = self.gate.candidates(self.waiting, self.running, now_us)
        candidates = self.policy.order(candidates, self.running, self.limits.max_num_seqs, self.cache)
        if self.policy.preempts and not self.limits.no_evict:
            self._join_by_right(candidates, decoding, prompts, room)
            candidates = [r for r in candidates if r.phase is Phase.WAITING]
        self._join_fitting(candidates, prompts, room)

    def _join_by_right(
        self, candidates: Sequence[Request], decoding: list[Request], prompts: list[Request], room: Room
    ) -> None:
        """Those that come next join, as long as each fits or somebody yields to it."""
        for request in candidates:
            self._join_fitting([request], prompts, room)
            if request.phase is Phase.WAITING:
                yielding = self._yielding(request, room)
                for other in yielding:
                    for some in (self.running, decoding, prompts):
                        if other in some:
                            some.remove(other)
                    self._preempt(other)
                self._join_fitting([request] if yielding else [], prompts, room)
                if request.phase is Phase.WAITING:
                    break

    def _join_fitting(self, candidates: Sequence[Request], prompts: list[Request], room: Room) -> None:
        seats = self.limits.max_num_seqs
        if len(self.running) >= seats:
            return
        for request, match in joining(candidates, self.running, self.cache, self.limits, self.policy, room):
            source = self.cache.take(request, match)
            if source >= 0:
                self._copies.append(Copy(source, request.blocks[len(match.blocks)]))
            self._unqueue(request)
            request.move(Phase.RUNNING)
            insort(self.running, request, key=BY_RANK)
            if not request.loading:
                insort(prompts, request, key=BY_RANK)
            if len(self.running) >= seats:
                return

    def _yielding(self, head: Request, room: Room) -> list[Request]:
        """Who is to be preempted so that `head`, which does not fit, can join: nobody when not even that helps."""
        match = self.cache.match(head)
        if match.wait or not room.admits(head):
            return []
        limits, pool = self.limits, self.pool
        yielding: list[Request] = []
        available, running = pool.available, list(self.running)
        kept, let_go = set(match.blocks), Counter[int]()

        def fits() -> bool:
            spare = headroom(head, running, limits)
            return len(running) < limits.max_num_seqs and fit(match, head, available, spare, self.cache) is not None

        for request in self.policy.yields(head, self.running, limits.max_num_seqs):
            yielding.append(request)
            running.remove(request)
            let_go.update(request.blocks)
            held = [b for b in request.blocks if b not in kept]
            available += sum([pool.refs(b) - pool.is_cached(b) == let_go[b] for b in held])
            if fits():
                return yielding
        return []

    def _segment(self, request: Request, n: int) -> Segment:
        start, end = request.computed, request.computed + n
        blocks = request.blocks[: self.limits.blocks_for(end)]
        rate = range(max(start, request.rated - 1), min(end, request.rate_until - 1))
        return Segment(request.id, start, request.tokens[start:end], blocks, end == len(request.tokens), rate)

    def _padding(self, ghost: Request) -> Segment:
        """Its last computed token, once more, into its own place: the same bits, and a result that nobody takes."""
        end = ghost.computed
        return Segment(
            ghost.id, end - 1, ghost.tokens[end - 1 : end], ghost.blocks[: self.limits.blocks_for(end)], True
        )

    # -- commit ---------------------------------------------------------------------------------------------------

    def _take(self, request: Request, token: int, row: int) -> Delta:
        """Appends a sampled token, which may end the request."""
        request.tokens.append(token)
        if token in request.stop_ids:
            finish = Finish.STOP
        elif len(request.tokens) >= request.last_len:
            finish = Finish.LENGTH
        else:
            return Delta(request.id, token, None, row)
        self.counters.mean_answer = follow(self.counters.mean_answer, len(request.tokens) - request.prompt_len)
        request.finish = finish
        self.policy.leave(request)
        if self.gate.padding:
            request.move(Phase.GHOST)
            self.ghosts.append(request)
        else:
            self._let_go(request)
        if self.gate.batched and request.whole:
            self._held.append(request)
            return Delta(request.id, token, None, row)
        del self._live[request.id]
        return Delta(request.id, token, finish, row)

    def _fail(self, request: Request, row: int) -> Delta:
        """Ends a request of which a row failed."""
        del self._live[request.id]
        request.finish = Finish.ERROR
        self.policy.leave(request)
        self._let_go(request)
        return Delta(request.id, None, Finish.ERROR, row)

    def _count(self, batch: Batch, tokens: int, prompt_tokens: int, step_us: int) -> None:
        """The accounts of a step that is over. tokens: that it sampled."""
        counters = self.counters
        counters.steps += 1
        counters.busy_us += step_us
        counters.mean_step_us = follow(counters.mean_step_us, step_us)
        counters.prompt_tokens += prompt_tokens
        counters.generation_tokens += tokens
        counters.padding_rows += self._num_padding
        self.policy.account(batch.segments, self._flying)
        self.gate.note_step(prompt_tokens > 0, step_us)
        self.cost.observe(self._work, step_us)
        self.cache.transfers.tier.note_step(step_us, self._work.rows)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _drop(self, request: Request, finish: Finish) -> None:
        """Ends a request that waits or runs."""
        if request.phase is Phase.WAITING:
            self._unqueue(request)
        else:
            self.running.remove(request)
        request.finish = finish
        self.policy.leave(request)
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Its blocks go at the next commit while a step may be writing them, else at once."""
        request.move(Phase.FINISHED)
        if self._flight is None:
            self.cache.release(request)
        else:
            self.leaving.append(request)

    def _drop_ghosts(self) -> None:
        for ghost in self.ghosts:
            self._let_go(ghost)
        self.ghosts = []

    def _end_batch(self) -> list[Delta]:
        """When the last member has ended, the others' ends are told, and their rows are no longer computed."""
        if self.running or self.gate.is_open(self.waiting):
            return []
        self._drop_ghosts()
        held, self._held = self._held, []
        for request in held:
            del self._live[request.id]
        return [Delta(request.id, None, request.finish) for request in held]


def follow(mean: float, value: float) -> float:
    return value if mean == 0 else mean + FOLLOW * (value - mean)
