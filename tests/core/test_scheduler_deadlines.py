"""Deadlines: who cannot make it ends before more is computed for it, and nobody else is touched."""

from __future__ import annotations

import random

import pytest
from kv_oracle import Executor, request

from potok.core.batch import Delta
from potok.core.cost import CostModel, Work
from potok.core.deadlines import Deadlines
from potok.core.gate import Gathered
from potok.core.request import Phase, Request
from potok.core.scheduler import Limits, Scheduler
from potok.finish import Finish

TOKEN_US = 1_000
MISSED = Finish.TIMEOUT


class Known(CostModel):
    """A prompt's token takes TOKEN_US, whatever steps take."""

    def observe(self, work: Work, step_us: int) -> None:
        pass


def scheduler(seqs: int = 1) -> Scheduler:
    return Scheduler(Limits(seqs, 50, 1000, 4), 400, cost=Known(TOKEN_US), checked=True)


def submit(
    s: Scheduler, id: int, *, prompt: int = 4, new: int = 3, first_by: int = 0, ends_by: int = 0, own: int | None = None
) -> Request:
    r = request(id, [id % 6 if own is None else own] * prompt, new)
    r.first_by_us, r.ends_by_us = first_by, ends_by
    assert s.submit(r) is None
    return r


def step(s: Scheduler, executor: Executor, now_us: int) -> list[Delta]:
    batch = s.schedule(now_us)
    ended = s.take_ended()
    return ended + (s.commit(batch, executor.run(batch), TOKEN_US) if batch is not None else [])


def test_queued_request_is_ended_when_its_prompt_cannot_be_computed_in_time() -> None:
    s, executor = scheduler(), Executor(4)
    submit(s, 0, new=500)
    step(s, executor, 0)
    late = submit(s, 1, prompt=100, first_by=200_000)  # its prompt takes 100 ms
    assert s.wake_at() is not None
    last = 200_000 - int(0.8 * 100 * TOKEN_US)
    assert not any(d.finish for d in step(s, executor, last - 1))
    assert step(s, executor, last)[0] == Delta(1, None, MISSED)
    assert late.phase is Phase.FINISHED and s.counters.prompt_tokens == 4 and s.counters.timeouts == 1
    assert s.waiting_tokens == 0 and s.wake_at() is None
    s.cancel(1)  # its caller left as it was told
    assert s.take_ended() == []


def test_what_the_cache_holds_of_a_prompt_takes_no_time() -> None:
    s, executor = scheduler(), Executor(4)
    submit(s, 0, prompt=101, new=1, own=3)
    while s.running or s.waiting:
        step(s, executor, 0)
    submit(s, 1, new=500)
    step(s, executor, 0)
    submit(s, 2, prompt=101, own=3, first_by=200_000)
    assert not any(d.finish for d in step(s, executor, 195_000)), "one token is left to compute"
    assert step(s, executor, 200_000)[0] == Delta(2, None, MISSED)


def test_prompt_under_way_is_ended_as_soon_as_it_is_hopeless() -> None:
    s, executor = scheduler(), Executor(4)
    r = submit(s, 0, prompt=200, first_by=100_000)
    now = ended = 0
    while not ended:
        ended = len([d for d in step(s, executor, now) if d.finish])
        now += 60_000
    assert r.finish is MISSED and r.computed <= 100 and s.pool.used == 0


@pytest.mark.parametrize("stalls", [False, True])
def test_what_is_computed_of_a_prompt_gives_it_more_time(stalls: bool) -> None:
    s, executor = scheduler(), Executor(4)
    r = submit(s, 0, prompt=200, first_by=230_000)  # the last chance to begin it is at 70 ms
    for now in (0, 50_000, 100_000, 200_000 if stalls else 150_000):
        step(s, executor, now)
    assert r.finish is (MISSED if stalls else None) and len(r.tokens) == 200 + (not stalls)


def test_first_token_in_time_is_enough() -> None:
    s, executor = scheduler(), Executor(4)
    r = submit(s, 0, new=20, first_by=60_000)
    for now in range(0, 200_000, 5_000):
        step(s, executor, now)
    assert r.finish is Finish.LENGTH and s.counters.timeouts == 0


def test_answer_is_ended_with_what_it_has() -> None:
    s, executor = scheduler(seqs=2), Executor(4)
    r, other = submit(s, 0, new=100, ends_by=50_000), submit(s, 1, new=100)
    for now in range(0, 50_000, 10_000):
        assert not any(d.finish for d in step(s, executor, now))
    assert step(s, executor, 50_000)[0] == Delta(0, None, MISSED)
    assert len(r.tokens) == 4 + 5 and other.phase is Phase.RUNNING


def test_deadline_wakes_an_engine_that_gathers() -> None:
    s = scheduler()
    submit(s, 0, ends_by=70_000)
    s.waiting[0].phase = Phase.WAITING
    assert s.wake_at() == 70_000


@pytest.mark.parametrize("whole", [False, True])
def test_request_that_has_ended_misses_nothing(whole: bool) -> None:
    s, executor = scheduler(), Executor(4)
    submit(s, 0, new=1, first_by=90_000, ends_by=90_000).whole = whole
    step(s, executor, 0)
    cancelled = submit(s, 1, ends_by=90_000)
    s.cancel(1)
    assert step(s, executor, 100_000) == [] and s.counters.timeouts == 0
    assert cancelled.finish is Finish.CANCELLED


def test_complete_answer_is_not_held_for_its_batch_beyond_its_deadline() -> None:
    s = Scheduler(Limits(2, 50, 1000, 4), 400, gate=Gathered(2), cost=Known(TOKEN_US), checked=True)
    executor = Executor(4)
    short, long = submit(s, 0, new=2, ends_by=50_000), submit(s, 1, new=100)
    short.whole = long.whole = True
    for now in range(0, 50_000, 10_000):
        assert not any(d.finish is not None for d in step(s, executor, now))
    assert short.finish is Finish.LENGTH
    assert step(s, executor, 50_000)[0] == Delta(0, None, Finish.LENGTH)
    assert s.counters.timeouts == 0 and s.ghosts == [short]


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    s, executor = scheduler(), Executor(4)
    for id in range(1000):
        submit(s, id, new=1, ends_by=10**12)
        step(s, executor, 0)
    assert len(s._deadlines._heap) < 100


def test_deadlines_are_seen_in_time_whatever_was_forgotten() -> None:
    live: dict[int, Request] = {}
    deadlines, rng = Deadlines(live, lambda r: 0.0), random.Random(1)
    for id in range(500):
        r = request(id, [1], 1)
        r.order, r.ends_by_us = id, rng.randrange(1, 1000)
        live[id] = r
        deadlines.add(r)
    for id in range(500):
        if rng.random() < 0.9:
            del live[id]
    deadlines.forget_ended()
    for now in range(1, 1000):
        assert {r.id for r in deadlines.missed(now)} == {r.id for r in live.values() if r.ends_by_us == now}
