"""Replay: the calls of a journal, made again on a new scheduler, without a model.

The scheduler is pure, so the same calls have the same outcomes, in any process and on any machine. Where one differs,
either the journal is not what was written, or something that decides depends on more than its calls: a bug.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from potok.core.batch import Batch
from potok.core.request import Request
from potok.core.scheduler import Scheduler
from potok.engine.calls import Call, Cancel, Schedule, Submit
from potok.engine.journal import Damaged, JournalReader, Record, Shares, outcome_of, raised
from potok.engine.scheduling import build_scheduler

#: Calls before a difference that are shown; and so many of anything else.
CALLS_SHOWN = 8
SHOWN = 16
MOST_CHARS = 160


@dataclass(slots=True)
class Replayed:
    """What was replayed: all, or all before the difference. torn: bytes of a last line that is not whole."""

    calls: int = 0
    steps: int = 0
    requests: int = 0
    refused: int = 0
    cancels: int = 0
    preemptions: int = 0
    seconds: float = 0.0  # from the first schedule to the last, on the clock of the engine that wrote it
    torn: int = 0
    difference: list[str] = field(default_factory=list)  # lines for a person; none: identical


def replay(reader: JournalReader, on_call: Callable[[], None] = lambda: None) -> Replayed:
    """Makes every call, up to the first whose outcome differs. on_call: called after each."""
    scheduler = build_scheduler(reader.header.settings, Scheduler)
    replayed = Replayed()
    before: deque[Call] = deque(maxlen=CALLS_SHOWN)
    started_us = None
    try:
        for record in reader.records():
            step = scheduler.counters.steps + 1
            found, batch = _make(record.call, scheduler)
            if found != record.came:
                replayed.difference = [
                    f"line {reader.line}, step {step}: {shown(record.call)}",
                    *_difference(record, found, batch),
                    "the calls before it:",
                    *(f"  {shown(call)}" for call in before),
                    *state_of(scheduler),
                ]
                break
            before.append(record.call)
            match record.call:
                case Submit():
                    replayed.requests += 1
                    replayed.refused += found != ""
                case Cancel():
                    replayed.cancels += 1
                case Schedule(now_us):
                    started_us = now_us if started_us is None else started_us
                    replayed.seconds = (now_us - started_us) / 1e6
            replayed.calls += 1
            on_call()
    except Damaged as error:
        replayed.difference = [f"{error}.", "What comes before it is replayed.", *state_of(scheduler)]
    replayed.steps, replayed.preemptions = scheduler.counters.steps, scheduler.counters.preemptions
    replayed.torn = reader.torn
    return replayed


def _make(call: Call, scheduler: Scheduler) -> tuple[str, Batch | None]:
    """What came of the call, and the batch if it is one."""
    try:
        outcome = call.make(scheduler)
    except Exception as error:
        return raised(error), None
    return outcome_of(outcome), outcome if isinstance(outcome, Batch) else None


def _difference(record: Record, found: str, batch: Batch | None) -> list[str]:
    lines = [f"  expected: {record.came or 'nothing'}", f"  found:    {found or 'nothing'}"]
    if not isinstance(record.call, Schedule):
        return lines
    expected = record.shares or Shares([], [])
    if batch is not None and expected == Shares.of(batch):
        lines.append("  the same tokens of the same requests, but not all of their ids, places and blocks; found:")
        for s in islice(batch.segments, SHOWN):
            blocks = _few(s.blocks)
            lines.append(f"    request {s.id}: {len(s.tokens)} from {s.start}, ids {_few(s.tokens)}, blocks {blocks}")
        return [*lines, f"    copies: {[tuple(copy) for copy in batch.copies]}"]
    return lines + _shares(expected, Shares([], []) if batch is None else Shares.of(batch))


def _shares(expected: Shares, found: Shares) -> list[str]:
    """The requests whose part in the step differs."""
    then, now = (dict(zip(*shares, strict=True)) for shares in (expected, found))
    if then == now:
        return ["  the same segments in another order"]
    differing = [id for id in {**then, **now} if then.get(id) != now.get(id)]
    return [
        *(
            f"  request {id}: expected {_tokens(then.get(id))}, found {_tokens(now.get(id))}"
            for id in differing[:SHOWN]
        ),
        *_more(len(differing), "requests differ"),
    ]


def state_of(scheduler: Scheduler) -> list[str]:
    """Who runs, who waits, and what is left, for a person."""
    pool, running, waiting = scheduler.pool, scheduler.running, scheduler.waiting
    size = scheduler.limits.block_size
    return [
        f"{len(running)} running, {len(waiting)} waiting; {pool.num_blocks} blocks of {size} tokens: "
        f"{pool.free} free, {pool.idle} idle, {pool.used} in use",
        *(f"  running: {_request(r)}" for r in running[:SHOWN]),
        *_more(len(running), "running"),
        *(f"  waiting: {_request(r)}" for r in waiting[:SHOWN]),
        *_more(len(waiting), "waiting"),
    ]


def _request(r: Request) -> str:
    loading = ", blocks are being read for it" if r.loading else ""
    return (
        f"request {r.id}: {len(r.tokens)} tokens, {r.computed} computed, {len(r.blocks)} blocks, "
        f"preempted {r.preemptions} times{loading}"
    )


def shown(call: Call) -> str:
    """On one line, without a whole prompt."""
    if isinstance(call, Submit):
        return f"submit request {call.id}: {len(call.tokens)} tokens {_few(call.tokens)}, at most {call.max_new} more"
    text = repr(call)
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 3] + "..."


def _few(numbers: Sequence[int]) -> str:
    more = f", ... {numbers[-1]}" if len(numbers) > SHOWN else ""
    return f"[{', '.join(map(str, numbers[:SHOWN]))}{more}]"


def _tokens(count: int | None) -> str:
    return "no part" if count is None else f"{count} tokens"


def _more(count: int, what: str) -> list[str]:
    return [f"  ({count} {what} in all)"] if count > SHOWN else []
