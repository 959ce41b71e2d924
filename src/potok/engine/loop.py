"""The engine's loop: messages in, one step, one message out."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from potok.backends.api import Backend, Sampled
from potok.backends.inputs import pack
from potok.core.batch import Batch, Delta
from potok.core.radix import Domain
from potok.core.request import Request
from potok.core.scheduler import Reject, Scheduler
from potok.engine.tier_store import NoStore, Store
from potok.finish import Finish
from potok.protocol import (
    CacheContents,
    CachedPrefix,
    Cancel,
    Chunk,
    DescribeCache,
    FromEngine,
    Sampling,
    Shutdown,
    Stats,
    Step,
    Submit,
    ToEngine,
    TokenLogprobs,
)
from potok.sampling.state import RowBuilder, RowState

#: A logit beside which no other counts: the largest float32.
LARGEST = (2 - 2**-23) * 2.0**127

#: So many steps whose decoding was expected to take longer than the target are no accident.
SLOW_STEPS = 20

#: While nobody comes and nobody goes, the engine tells its numbers this often, and not with each step.
STATS_EVERY_US = 100_000

#: An idle engine says that it lives this often, in seconds.
HEARTBEAT_SECONDS = 0.5


class Connection(Protocol):
    """The engine's end of the way to whoever asks."""

    def receive(self, timeout: float) -> Sequence[ToEngine]:
        """All messages that have arrived; when there are none, waits up to `timeout` seconds for the first."""
        ...

    def send(self, message: FromEngine) -> None: ...


class Live(NamedTuple):
    """What the loop keeps of a live request; all else is the scheduler's, also what `request` holds.

    prompt: begins with the prompt; what follows is the scheduler's.
    """

    sampling: Sampling
    row: RowState
    request: Request
    prompt: array[int]


#: In the place of requests that have ended and are computed on as padding.
NOBODY = Live(Sampling(), RowState(Sampling(), ()), Request(-1, array("i"), 0, 0), array("i"))


class EngineLoop:
    """store: moves blocks to and from the scheduler's second tier, if it has one."""

    def __init__(
        self, scheduler: Scheduler, backend: Backend, connection: Connection, store: Store | None = None
    ) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self._connection = connection
        self._store = store or NoStore()
        self._live: dict[int, Live] = {}
        self._held: dict[int, Chunk] = {}  # last tokens of requests whose end is told with that of their batch
        self._submits = 0
        self._refused: list[Chunk] = []
        self._rows = RowBuilder()
        self._said_slow = False
        self._told = (-1, -1, -1)  # of the numbers, those that are told at once when they change
        self._tell_at_us = 0

    def run(self) -> None:
        """Serves until a Shutdown arrives. Sends one Step a turn; a turn without work is a heartbeat."""
        patience = 0.0
        while True:
            for message in self._connection.receive(patience):
                match message:
                    case Submit():
                        self._accept(message)
                    case Cancel():
                        self._scheduler.cancel(message.id)
                        self._live.pop(message.id, None)
                        self._held.pop(message.id, None)
                    case DescribeCache():
                        self._connection.send(CacheContents(message.id, self._describe(message)))
                    case Shutdown():
                        return
            done = self._store.end()
            if done:
                self._scheduler.transferred(done)
            now_us = _now_us()
            batch = self._scheduler.schedule(now_us)
            transfers = self._scheduler.take_transfers()
            if transfers:
                self._store.begin(transfers)
            chunks, self._refused = self._refused, []
            ended = self._scheduler.take_ended()
            if ended:
                chunks += [self._end(delta) for delta in ended]
            if batch is not None:
                chunks += self._step(batch)
            stats = self._stats() if batch is None else self._stats_to_tell(now_us)
            self._connection.send(Step(chunks, stats))
            patience = self._patience(batch)

    def _accept(self, message: Submit) -> None:
        self._submits += 1
        reject = refusal(message, self._backend.info.vocab_size)
        if reject is None:
            stop_ids = frozenset(message.sampling.stop_ids)
            tokens = array("i", message.prompt)
            domain = Domain(namespace=message.namespace, salt=message.salt)
            rate_until = len(tokens) if message.sampling.prompt_logprobs >= 0 else 0
            request = Request(
                message.id,
                tokens,
                len(tokens),
                message.max_tokens,
                stop_ids,
                domain,
                rate_until,
                arrived_us=message.arrived_us or _now_us(),
                first_by_us=message.first_by_us,
                ends_by_us=message.ends_by_us,
                priority=message.priority,
                whole=message.whole,
            )
            reject = self._scheduler.submit(request)
        if reject is None:
            self._live[message.id] = Live(message.sampling, RowState(message.sampling, message.prompt), request, tokens)
        else:
            self._refused.append(Chunk(message.id, [], Finish.ERROR, error=reject.message, param=reject.param))

    def _step(self, batch: Batch) -> list[Chunk]:
        states: list[RowState] = []
        positions = array("i")
        want_hashes = rated = False
        for id, start, tokens, _, sample, rate in batch.segments:
            if sample or rate:
                sampling, row, _, prompt = self._live.get(id, NOBODY)
                want_hashes |= sampling.logit_hash
                for position in rate:
                    rated = True
                    states.append(rating(prompt[position + 1], sampling.prompt_logprobs))
                    positions.append(position + 1)
                if sample:
                    states.append(row)
                    positions.append(start + len(tokens))
        rows = self._rows.build(states, positions, want_hashes)
        inputs = pack(batch, self._scheduler.limits.block_size)
        started = _now_us()
        sampled = self._backend.step(inputs, rows)
        deltas = self._scheduler.commit(batch, sampled.ids.tolist(), _now_us() - started)
        chunks = self._ratings(batch, sampled) if rated else []
        chunks += [chunk for delta in deltas if (chunk := self._chunk(delta, sampled)) is not None]
        return chunks

    def _ratings(self, batch: Batch, sampled: Sampled) -> list[Chunk]:
        """Log-probabilities of prompts' tokens, ahead of whatever else the step gave those requests."""
        chunks, first = [], 0
        for segment in batch.segments:
            live = self._live.get(segment.id)
            if segment.rate and live is not None:
                count = live.sampling.prompt_logprobs
                rated = [token_logprobs(sampled, first + i, count) for i in range(len(segment.rate))]
                chunks.append(Chunk(segment.id, [], prompt_logprobs=rated))
            first += segment.num_rows
        return chunks

    def _chunk(self, delta: Delta, sampled: Sampled) -> Chunk | None:
        """sampled: of the step that gave the delta. None: it is told later."""
        id, token, finish, at = delta
        if token is None:
            return self._end(delta)
        sampling, row, request, _ = self._live[id] if finish is None else self._live.pop(id)
        if not row.settled:
            row.push(token)
        logprobs = [token_logprobs(sampled, at, sampling.logprobs)] if sampling.logprobs >= 0 else None
        hashes = [int(sampled.hashes[at])] if sampling.logit_hash else None
        chunk = Chunk(id, [token], finish, logprobs, None, None, hashes, None, request.cached)
        if finish is None and request.finish is not None:
            self._held[id] = chunk  # its last token: the reader has to know that, to spell it
            return None
        return chunk

    def _end(self, delta: Delta) -> Chunk:
        """An end that brings no token, unless one was held back for it."""
        request = self._live.pop(delta.id).request
        held = self._held.pop(delta.id, None)
        if held is not None:
            return msgspec.structs.replace(held, finish=delta.finish)
        if delta.finish is Finish.TIMEOUT:
            late = lateness(request, _now_us())
            return Chunk(delta.id, [], delta.finish, error=late.message, param=late.param)
        return Chunk(delta.id, [], delta.finish, error="the model's output for this request was not finite")

    def _describe(self, asked: DescribeCache) -> list[CachedPrefix]:
        found = self._scheduler.top_prefixes(asked.top, asked.namespace)
        return [
            CachedPrefix([] if domain.salt else head, num_tokens, num_blocks, hits, domain.namespace, bool(domain.salt))
            for domain, head, num_tokens, num_blocks, hits in found
        ]

    def _stats_to_tell(self, now_us: int) -> Stats | None:
        """None while nothing has happened that cannot wait. To make them takes longer than all else of such a step."""
        told = len(self._scheduler.running), len(self._scheduler.waiting), self._submits
        if told == self._told and now_us < self._tell_at_us:
            return None
        self._told = told
        self._tell_at_us = now_us + STATS_EVERY_US
        self._say_once_that_it_is_slow()
        return self._stats()

    def _stats(self) -> Stats:
        scheduler, counters = self._scheduler, self._scheduler.counters
        prefix = scheduler.cache.counters
        tier, info = scheduler.cache.transfers.tier, self._backend.info
        block_bytes = info.block_size * info.kv_bytes_per_token
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks_used=scheduler.pool.used,
            kv_blocks_total=scheduler.pool.num_blocks,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
            busy_us=counters.busy_us,
            kv_blocks_idle=scheduler.pool.idle,
            prefix_queries=prefix.queries,
            prefix_hits=prefix.hits,
            prefix_queried_tokens=prefix.queried_tokens,
            prefix_hit_tokens=prefix.hit_tokens,
            prefix_misses=prefix.misses,
            evicted_blocks=prefix.evicted_blocks,
            evicted_reused_blocks=prefix.evicted_reused_blocks,
            tier_blocks=len(tier),
            tier_slots=tier.num_slots,
            tier_read_blocks=tier.counters.read,
            tier_written_blocks=tier.counters.written,
            tier_read_bytes=tier.counters.read * block_bytes,
            tier_written_bytes=tier.counters.written * block_bytes,
            tier_failures=tier.counters.failed,
            tier_hit_tokens=tier.counters.hit_tokens,
            tier_given_up=tier.counters.given_up,
            tier_pauses=tier.counters.pauses,
            waiting_tokens=scheduler.waiting_tokens,
            padding_rows=counters.padding_rows,
            timeouts=counters.timeouts,
            slow_steps=counters.slow_steps,
            place_us=scheduler.place_us() if scheduler.waiting else 0,
            submits=self._submits,
        )

    def _say_once_that_it_is_slow(self) -> None:
        scheduler = self._scheduler
        if scheduler.counters.slow_steps >= SLOW_STEPS and not self._said_slow:
            self._said_slow = True
            logging.getLogger(__name__).warning(
                "decoding alone takes longer than target_itl_ms %g with %d requests at once; "
                "lower max_num_seqs, or raise the target",
                scheduler.target_us / 1000,
                len(scheduler.running),
            )

    def _patience(self, batch: Batch | None) -> float:
        """How long to wait for messages before the next turn, in seconds."""
        if self._live and batch is not None:
            return 0.0
        wake = self._scheduler.wake_at()
        if wake is None:
            assert not self._live, f"{len(self._live)} requests wait, and nothing will ever wake them"
            return HEARTBEAT_SECONDS
        return min(HEARTBEAT_SECONDS, max(0.0, (wake - _now_us()) / 1e6))


def refusal(request: Submit, vocab_size: int) -> Reject | None:
    """Ids that would index outside the model's tables. The API side has looked; memory is worth a second look."""
    sampling = request.sampling
    for field, ids in (
        ("prompt", request.prompt),
        ("stop_token_ids", sampling.stop_ids),
        ("logit_bias", [id for id, _ in sampling.logit_bias]),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            return Reject(f"{field} must hold token ids from 0 to {vocab_size - 1} only.", field)
    for field, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count > vocab_size:
            return Reject(f"{field} must be at most {vocab_size}, not {count}.", field)
    return None


def lateness(request: Request, now_us: int) -> Reject:
    """Which deadline ended the request, and when."""
    first = request.first_by_us if len(request.tokens) == request.prompt_len else 0
    if first and first <= (request.ends_by_us or first):
        param, what, by_us = "ttft_timeout_ms", "the first token", first
    else:
        param, what, by_us = "timeout_ms", "the answer", request.ends_by_us
    allowed_ms, passed_ms = ((us - request.arrived_us) // 1000 for us in (by_us, now_us))
    return Reject(
        f"{param} is {allowed_ms}, but {what} cannot come by then; the request was ended after {passed_ms} ms.", param
    )


def rating(token: int, count: int) -> RowState:
    """A row that can only choose `token`: what it reports of the raw logits is the token's log-probability."""
    return RowState(Sampling(logprobs=count, logit_bias=((token, LARGEST),)), ())


def token_logprobs(sampled: Sampled, row: int, count: int) -> TokenLogprobs:
    best = slice(row, row + 1), slice(count)
    top_ids, top = sampled.top_ids[best].ravel(), sampled.top_logprobs[best].ravel()
    return TokenLogprobs(float(sampled.logprob[row]), top_ids.tolist(), top.tolist())


def _now_us() -> int:
    return time.monotonic_ns() // 1000
