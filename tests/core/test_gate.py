"""Modes of batching: who may join when, which rows are padding, and when ends are told. Times are the test's own."""

from __future__ import annotations

import pytest
from kv_oracle import END, Executor, answer, request

from potok.core.batch import Batch
from potok.core.gate import Continuous, Gate, Gathered
from potok.core.request import Phase, Request
from potok.core.scheduler import Limits, Scheduler
from potok.finish import Finish


class Run:
    """One scheduler under a gate; notes what each step computed and when each end was told."""

    def __init__(self, gate: Gate, *, seqs: int = 4, budget: int = 64, num_blocks: int = 64) -> None:
        self.scheduler = Scheduler(Limits(seqs, budget, 1000, 4), num_blocks, gate=gate, checked=True)
        self.executor = Executor(4)
        self.now_us = 0
        self.step_us = 1000
        self.ends: dict[int, tuple[int, Finish]] = {}  # id -> steps done until it was told
        self.requests: dict[int, Request] = {}

    def submit(self, id: int, prompt: int, max_new: int, *, whole: bool = False) -> Request:
        r = self.requests[id] = request(id, [id % 5] * prompt, max_new)
        r.arrived_us, r.whole = self.now_us, whole
        assert self.scheduler.submit(r) is None
        return r

    def step(self) -> Batch | None:
        s = self.scheduler
        batch = s.schedule(self.now_us)
        self.tell(s.take_ended())
        if batch is not None:
            self.executor.ghosts = {r.id for r in s.ghosts}
            self.tell(s.commit(batch, self.executor.run(batch), self.step_us))
        return batch

    def tell(self, deltas: list) -> None:
        for d in deltas:
            if d.finish is not None:
                assert d.id not in self.ends, "an end is told twice"
                self.ends[d.id] = (self.scheduler.counters.steps, d.finish)

    def rows(self) -> list[int]:
        """Ids of the next step, in the order of arrival."""
        batch = self.step()
        return sorted(x.id for x in batch.segments) if batch is not None else []

    def check_answers(self) -> None:
        for r in self.requests.values():
            prompt = list(r.tokens[: r.prompt_len])
            assert list(r.tokens[r.prompt_len :]) == answer(prompt, r.max_new, r.stop_ids, 1000)


def test_static_batch_runs_until_its_longest_member_ends_and_nobody_joins() -> None:
    run = Run(Gathered(3))
    for id, new in enumerate([2, 5, 3, 1]):
        run.submit(id, 4, new, whole=id != 2)
    assert run.rows() == [0, 1, 2]
    run.submit(4, 4, 1)
    assert [run.rows() for _ in range(4)] == [[0, 1, 2]] * 4, "members that have ended are computed on"
    assert run.scheduler.counters.padding_rows == 3 + 2
    # The first answer was complete after 2 steps; it is told with its batch. A stream's end is told at once.
    assert {id: steps for id, (steps, _) in run.ends.items()} == {0: 5, 1: 5, 2: 3}
    assert run.rows() == [3, 4]
    assert run.step() is None and len(run.ends) == 5
    run.check_answers()
    assert run.scheduler.pool.used == 0
    for id in run.requests:
        run.scheduler.cancel(id)  # all have been told
    assert run.step() is None and len(run.ends) == 5


def test_padding_beyond_the_budget_takes_turns_and_what_is_computed_is_counted() -> None:
    run = Run(Gathered(6), budget=3, seqs=6)
    for id in range(6):
        run.submit(id, 2, 1 if id else 12)
    rows = 0
    while (batch := run.scheduler.schedule(0)) is not None:
        ghosts = run.executor.ghosts = {r.id for r in run.scheduler.ghosts}
        rows += sum(x.id in ghosts for x in batch.segments)
        run.scheduler.commit(batch, run.executor.run(batch), 1000)
    assert 0 < rows == run.scheduler.counters.padding_rows
    assert run.scheduler.counters.prompt_tokens == 6 * 2 - run.scheduler.cache.counters.hit_tokens
    run.check_answers()


def test_without_batches_whole_answers_are_told_at_once() -> None:
    run = Run(Continuous())
    run.submit(0, 4, 2, whole=True)
    run.submit(1, 4, 9, whole=True)
    while run.step() is not None:
        pass
    assert {id: steps for id, (steps, _) in run.ends.items()} == {0: 2, 1: 9}


def test_finished_rows_can_be_skipped() -> None:
    run = Run(Gathered(3, padding=False))
    for id, new in enumerate([2, 5, 3]):
        run.submit(id, 4, new, whole=True)
    assert [run.rows() for _ in range(5)] == [[0, 1, 2], [0, 1, 2], [1, 2], [1], [1]]
    assert {steps for steps, _ in run.ends.values()} == {5} and run.scheduler.counters.padding_rows == 0


def test_off_is_one_request_at_a_time() -> None:
    run = Run(Gathered(1))
    for id in range(3):
        run.submit(id, 4, 2, whole=True)
    assert [run.rows() for _ in range(6)] == [[0], [0], [1], [1], [2], [2]]
    assert {id: steps for id, (steps, _) in run.ends.items()} == {0: 2, 1: 4, 2: 6}


def test_lone_request_of_a_dynamic_batch_waits_just_so_long() -> None:
    run = Run(Gathered(4, max_wait_us=20_000))
    run.now_us = 5_000
    run.submit(0, 4, 1)
    assert run.step() is None and run.scheduler.wake_at() == 25_000
    run.now_us = 24_999
    run.submit(1, 4, 1)
    assert run.step() is None and run.scheduler.wake_at() == 25_000
    run.now_us = 25_000
    assert run.rows() == [0, 1]


def test_who_belongs_to_a_batch_waits_for_blocks_and_not_for_a_time() -> None:
    """Else an engine without free blocks would ask again and again."""
    gate, members = Gathered(2), [request(id, [1], 1) for id in range(2)]
    late = request(2, [1], 1)
    assert gate.candidates([*members, late], [], 0) == members
    assert gate.wake_at([members[1], late]) is None
    assert gate.candidates([members[1], late], [], 0) == [members[1]]
    assert gate.wake_at([late]) == 0


@pytest.mark.parametrize(
    ("prompts", "first"),
    [
        ([4, 4, 4, 4], [0, 1, 2, 3]),  # the batch is full
        ([10, 10], [0, 1]),  # and so it is with 20 tokens
        ([10, 9, 4], [0, 1]),  # more would not go in
        ([50, 4], [0]),  # one that is larger than the limit is a batch by itself
    ],
)
def test_full_dynamic_batch_starts_at_once(prompts: list[int], first: list[int]) -> None:
    run = Run(Gathered(4, max_wait_us=20_000, max_tokens=20))
    for id, length in enumerate(prompts):
        run.submit(id, length, 1)
    assert run.rows() == first


def test_batch_whose_prompts_take_several_steps_still_takes_all_its_members() -> None:
    run = Run(Gathered(3), budget=8)
    for id in range(4):
        run.submit(id, 10, 3, whole=True)
    seen = [run.rows() for _ in range(7)]
    assert {id for step in seen for id in step} == {0, 1, 2}
    while run.step() is not None:
        pass
    assert run.ends[0][0] == run.ends[1][0] == run.ends[2][0] < run.ends[3][0]
    run.check_answers()


def test_ghosts_make_room_before_anybody_is_preempted() -> None:
    run = Run(Gathered(2), num_blocks=6)
    short, long = run.submit(0, 9, 1), run.submit(1, 8, 12)
    while run.step() is not None:
        assert short.phase is not Phase.GHOST or run.scheduler.pool.used <= 6
    assert run.scheduler.counters.preemptions == 0 and len(long.tokens) == 20
    assert 0 < run.scheduler.counters.padding_rows < 11
    run.check_answers()


def test_member_preempted_from_a_batch_of_ghosts_comes_back() -> None:
    run = Run(Gathered(3), num_blocks=8)
    for id, new in enumerate([2, 14, 14]):
        run.submit(id, 8, new)
    while run.step() is not None:
        assert run.scheduler.counters.steps < 100
    assert run.scheduler.counters.preemptions > 0
    run.check_answers()


@pytest.mark.parametrize("padding", [True, False])
def test_caller_of_a_held_answer_may_leave(padding: bool) -> None:
    run = Run(Gathered(3, padding=padding))
    for id, new in enumerate([1, 1, 3]):
        run.submit(id, 4, new, whole=True)
    run.step()
    run.scheduler.cancel(0)
    assert run.rows() == ([1, 2] if padding else [2])
    batch = run.scheduler.schedule(0)
    run.scheduler.cancel(1)  # while a step computes its row of padding
    assert batch is not None
    run.tell(run.scheduler.commit(batch, [2] * batch.num_sampled, 1))
    assert run.ends.keys() == {2} and run.scheduler.pool.used == 0


def test_last_member_that_is_cancelled_ends_the_batch() -> None:
    run = Run(Gathered(2))
    run.submit(0, 4, 1, whole=True)
    run.submit(1, 4, 50, whole=True)
    run.step()
    run.scheduler.cancel(1)
    run.submit(2, 4, 1)
    assert run.rows() == [2] and run.ends[0] == (1, Finish.LENGTH)


def test_prompts_are_held_for_a_factor_of_the_last_prompt_step_while_others_run() -> None:
    run = Run(Continuous(2.0))
    run.submit(0, 4, 20)
    assert run.rows() == [0]  # nobody runs: nothing to wait for; that step took 1000 us
    run.step_us = 50_000
    assert run.rows() == [0]  # and computed no prompt
    run.now_us = 10_000
    run.submit(1, 4, 20)
    assert run.rows() == [0]
    run.now_us = 11_999
    run.submit(2, 4, 20)
    assert run.rows() == [0]
    run.now_us = 12_000
    assert run.rows() == [0, 1, 2]
    while run.step() is not None:
        pass
    run.submit(3, 4, 1)
    assert run.rows() == [3], "nobody runs"


def test_end_ids_end_members_of_a_batch_too() -> None:
    run = Run(Gathered(4))
    for id in range(4):
        r = request(id, [id, id + 1, 3, 2, id], 30, [END])
        run.requests[id] = r
        assert run.scheduler.submit(r) is None
    while run.step() is not None:
        pass
    run.check_answers()
    assert {finish for _, finish in run.ends.values()} <= {Finish.STOP, Finish.LENGTH} and len(run.ends) == 4
