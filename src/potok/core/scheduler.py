"""Continuous batching over paged KV memory: what each step computes, and for whom.

Pure: no clock, no I/O, no tensors, no threads, no logging. Calls in, batches and deltas out. There is no prefill and no
decode mode: a request has tokens and a count of computed ones, and a step hands out one budget of tokens.

    submit -> WAITING --joins--> RUNNING --end id, length, error, cancel--> FINISHED
                 ^                  |
                 +---- preempted ---+       (blocks dropped, tokens kept: recomputed when it joins again)

**Who gets the budget.** `max_num_batched_tokens` is never exceeded.
1. Requests with one pending token (decoding) go first. While prompt tokens are pending they leave half of the
   budget (at least 1 token, at most what is pending) to prompts. When there are more of them than they may take, the
   ones served longest ago go first.
2. Prompts, and what must be recomputed, take all the rest, oldest request first.
So a prompt advances in every step and every decoding request is served within a bounded number of steps, also when the
budget is smaller than the number of requests.

**Who gets blocks.** A running request holds blocks for every token it has; it needs one more only when its newest token
does not fit. Short of blocks, the youngest running request is preempted, before anybody is given a segment, and nobody
joins in that step. Age is arrival, so the oldest running request is never preempted and always ends.
Who may join is the business of `admission`; which blocks it need not fill is that of `prefix`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from potok.core.admission import Limits, Reject, joining, refusal
from potok.core.batch import Batch, Copy, Delta, Segment
from potok.core.blocks import BlockPool
from potok.core.invariants import check
from potok.core.policy import FCFS, Policy
from potok.core.prefix import PrefixCache
from potok.core.request import Phase, Request
from potok.core.tier import Done, Tier, Transfer
from potok.finish import Finish

__all__ = ["Counters", "Limits", "Reject", "Scheduler"]

BY_AGE = attrgetter("order")
#: Tokens of a request that one step rates at most: each takes a row of logits in memory.
MOST_RATED = 128
LEAST_RECENTLY_SERVED = attrgetter("served", "order")


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    busy_us: int = 0  # time inside the steps
    prompt_tokens: int = 0  # prompt tokens computed, recomputed ones counted again
    generation_tokens: int = 0  # tokens sampled
    preemptions: int = 0


class Scheduler:
    """One step is in flight at a time: schedule() -> the backend -> commit(). cancel() and submit() are legal always.

    prefix_caching: requests with the same first tokens share the blocks of these. policy: of joining.
    tier: where more of them may be. What take_transfers() asks for after each schedule() is done beside the steps, and
    its end told by transferred().
    checked: verify all invariants after each commit (slow: for tests and for hunting a bug).
    """

    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        *,
        prefix_caching: bool = True,
        policy: Policy = FCFS,
        tier: Tier | None = None,
        checked: bool = False,
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, limits.block_size, enabled=prefix_caching, tier=tier)
        self.waiting: list[Request] = []  # oldest first
        self.running: list[Request] = []  # oldest first
        self.leaving: list[Request] = []  # cancelled while a step is in flight: its commit releases their blocks
        self.counters = Counters()
        self._live: dict[int, Request] = {}  # waiting and running, by id
        self._flight: Batch | None = None
        self._flying: list[Request] = []  # whose segments those of _flight are
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
            self._arrivals += 1
            self._live[request.id] = request
            self.waiting.append(request)
        return reject

    def cancel(self, id: int) -> None:
        """Ends the request, in whatever phase it is. An unknown id is ignored: it may just have finished."""
        request = self._live.pop(id, None)
        if request is None:
            return
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        self._finish(request, Finish.CANCELLED)

    @property
    def flight(self) -> Batch | None:
        """The step that has been scheduled and not committed."""
        return self._flight

    def wake_at(self) -> int | None:
        """When (us) to call schedule() again although nothing arrives. None: no need."""
        return self.cache.transfers.wake_at()

    def transferred(self, done: Sequence[Done]) -> None:
        """Ends of transfers that take_transfers() asked for, in any order. Before schedule()."""
        assert self._flight is None, "blocks change hands between steps"
        for request in self.cache.transferred(done):
            request.served = self._step  # it comes into its turn behind those who have waited in the steps

    def take_transfers(self) -> list[Transfer]:
        """Transfers between blocks and the second tier to begin now. After schedule()."""
        return self.cache.transfers.take()

    def schedule(self, now_us: int) -> Batch | None:
        """The next step, or None when there is nothing to compute. now_us: the engine's clock, for policies of time."""
        assert self._flight is None, "a step is in flight; commit it first"
        for request in self.cache.transfers.late(now_us):
            self.running.remove(request)
            self.cache.give_up(request)
            self._requeue(request)
        preempted = self._make_room()
        decoding: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            if not request.loading:
                (decoding if len(request.tokens) - request.computed == 1 else prompts).append(request)
        if not preempted:
            self._join(len(decoding), prompts)

        budget = self.limits.max_num_batched_tokens
        share = budget - min(self._prompt_share(), sum(r.pending for r in prompts))
        if len(decoding) > share:
            decoding = sorted(decoding, key=LEAST_RECENTLY_SERVED)[:share]
        budget -= len(decoding)
        # The newest token, and all blocks: what _segment(r, 1) gives, at a third of the time.
        segments = [Segment(r.id, r.computed, r.tokens[-1:], r.blocks[:], True) for r in decoding]
        self._flying = decoding
        for request in prompts:
            if budget == 0:
                break
            n = min(request.pending, budget)
            if request.rated < request.rate_until:
                n = min(n, MOST_RATED)
            segments.append(self._segment(request, n))
            self._flying.append(request)
            budget -= n
        if not segments:
            return None
        self._step += 1
        for request in self._flying:
            request.served = self._step
        self._flight = Batch(self._step, tuple(segments), tuple(self._copies))
        self._copies.clear()
        return self._flight

    def commit(self, batch: Batch, sampled_ids: Sequence[int], step_us: int) -> list[Delta]:
        """What the step gave: `sampled_ids` for each row whose logits were wanted; -1 is a row that failed.

        step_us: how long the step took. Requests cancelled meanwhile are not reported.
        """
        assert batch is self._flight, "only the step in flight can be committed"
        assert len(sampled_ids) == batch.num_sampled, f"{len(sampled_ids)} ids for {batch.num_sampled} sampled rows"
        deltas, row, ended = [], -1, False
        counters = self.counters
        for segment, request in zip(batch.segments, self._flying, strict=True):
            row += segment.num_rows
            start, end = segment.start, segment.start + len(segment.tokens)
            if start < request.prompt_len:
                counters.prompt_tokens += min(end, request.prompt_len) - start
            if request.finish is not None:  # cancelled while the step ran
                continue
            request.computed = end
            request.rated += len(segment.rate)
            self.cache.publish(request)
            if segment.rate and min(sampled_ids[row - len(segment.rate) + 1 - segment.sample : row + 1]) < 0:
                ended = True
                deltas.append(self._fail(request, row))
            elif segment.sample:
                delta = self._take(request, sampled_ids[row], row)
                ended |= delta.finish is not None
                deltas.append(delta)
        counters.steps += 1
        counters.busy_us += step_us
        self.cache.transfers.tier.note_step(step_us, batch.num_tokens)
        counters.generation_tokens += sum([d.token is not None for d in deltas])

        self._flight, self._flying = None, []
        self.cache.end_copies()
        if ended:
            self.running = [r for r in self.running if r.phase is Phase.RUNNING]
        for request in self.leaving:
            self.cache.release(request)
        self.leaving = []
        if self._checked:
            check(self)
        return deltas

    # -- schedule -------------------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Gives each running request the block that its newest token needs; whether somebody was preempted for it."""
        size = self.limits.block_size
        short = [r for r in self.running if len(r.tokens) > len(r.blocks) * size]
        preempted = False
        while len(short) > self.pool.available:
            youngest = self.running.pop()
            if short[-1] is youngest:
                short.pop()
            self._preempt(youngest)
            preempted = True
        for request in short:
            request.blocks += self.cache.alloc(1)
        return preempted

    def _preempt(self, request: Request) -> None:
        request.preemptions += 1
        self._requeue(request)
        self.counters.preemptions += 1

    def _requeue(self, request: Request) -> None:
        """Back to the queue, ahead of all that are younger. What is lost by then is recomputed, to the bit."""
        self.cache.release(request)
        request.computed = 0
        request.overtaken = 0
        request.move(Phase.WAITING)
        insort(self.waiting, request, key=BY_AGE)

    def _join(self, num_decoding: int, prompts: list[Request]) -> None:
        """Moves waiting requests into `running` and `prompts`, no more than can get a token in this step."""
        backlog = sum(r.pending for r in prompts)
        room = max(self.limits.max_num_batched_tokens - num_decoding, self._prompt_share())
        if backlog >= room or len(self.running) >= self.limits.max_num_seqs:
            return
        for request, match in joining(self.waiting, self.running, self.cache, self.limits, self.policy):
            source = self.cache.take(request, match)
            if source >= 0:
                self._copies.append(Copy(source, request.blocks[len(match.blocks)]))
            self.waiting.remove(request)
            request.move(Phase.RUNNING)
            insort(self.running, request, key=BY_AGE)
            if not request.loading:
                insort(prompts, request, key=BY_AGE)
                backlog += request.pending
            if backlog >= room or len(self.running) >= self.limits.max_num_seqs:
                return

    def _prompt_share(self) -> int:
        """Tokens of a step that decoding requests leave to prompts."""
        return max(1, self.limits.max_num_batched_tokens // 2)

    def _segment(self, request: Request, n: int) -> Segment:
        start, end = request.computed, request.computed + n
        blocks = request.blocks[: self.limits.blocks_for(end)]
        rate = range(max(start, request.rated - 1), min(end, request.rate_until - 1))
        return Segment(request.id, start, request.tokens[start:end], blocks, end == len(request.tokens), rate)

    # -- commit ---------------------------------------------------------------------------------------------------

    def _take(self, request: Request, token: int, row: int) -> Delta:
        """Appends a sampled token, or ends the request whose row failed."""
        if token < 0:
            return self._fail(request, row)
        request.tokens.append(token)
        if token in request.stop_ids:
            finish = Finish.STOP
        elif len(request.tokens) >= request.last_len:
            finish = Finish.LENGTH
        else:
            return Delta(request.id, token, None, row)
        del self._live[request.id]
        self._finish(request, finish)
        return Delta(request.id, token, finish, row)

    def _fail(self, request: Request, row: int) -> Delta:
        del self._live[request.id]
        self._finish(request, Finish.ERROR)
        return Delta(request.id, None, Finish.ERROR, row)

    def _finish(self, request: Request, finish: Finish) -> None:
        """Ends the request. Its blocks go at the next commit while a step may be writing them, else at once."""
        request.finish = finish
        request.move(Phase.FINISHED)
        if self._flight is None:
            self.cache.release(request)
        else:
            self.leaving.append(request)
