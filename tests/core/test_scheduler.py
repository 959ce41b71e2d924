"""The scheduler's rules one at a time, in small numbers that can be followed by hand. Nothing is shared here."""

from __future__ import annotations

import pytest
from kv_oracle import END, Executor, answer, request, step

from potok.core.policy import Policy
from potok.core.request import Phase
from potok.core.scheduler import Limits, Scheduler
from potok.finish import Finish


def scheduler(
    seqs: int = 8, budget: int = 64, context: int = 1024, block_size: int = 16, num_blocks: int = 64
) -> Scheduler:
    return Scheduler(Limits(seqs, budget, context, block_size), num_blocks, prefix_caching=False, checked=True)


def shape(s: Scheduler) -> list[tuple[int, int]]:
    """(id, tokens) of the next step's segments; the step is committed with token 0."""
    batch = s.schedule(0)
    assert batch is not None
    s.commit(batch, [0] * batch.num_sampled, 1)
    return [(x.id, len(x.tokens)) for x in batch.segments]


def test_prompt_chunks_share_each_step_with_decoding_requests() -> None:
    s = scheduler(budget=8)
    assert s.submit(request(0, [1] * 3, 50)) is None
    assert shape(s) == [(0, 3)]
    assert s.submit(request(1, [1] * 20, 50)) is None
    assert [shape(s) for _ in range(4)] == [[(0, 1), (1, 7)], [(0, 1), (1, 7)], [(0, 1), (1, 6)], [(0, 1), (1, 1)]]


def test_decoding_requests_leave_half_of_the_budget_to_prompts_and_take_turns() -> None:
    s = scheduler(seqs=16, budget=8)
    for i in range(10):
        assert s.submit(request(i, [1], 50)) is None
    assert shape(s) == [(i, 1) for i in range(8)]
    # Two more join; six of the eight that decode are served, then the two that were put off are first.
    assert shape(s) == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (8, 1), (9, 1)]
    assert shape(s) == [(6, 1), (7, 1), (0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]
    assert s.submit(request(10, [1] * 100, 50)) is None
    assert shape(s) == [(8, 1), (9, 1), (0, 1), (1, 1), (10, 4)]
    assert shape(s) == [(2, 1), (3, 1), (4, 1), (5, 1), (10, 4)]


def test_budget_far_below_the_number_of_requests_starves_nobody() -> None:
    s = scheduler(seqs=100, budget=16, num_blocks=300)
    for i in range(100):
        assert s.submit(request(i, [1] * 5, 1000)) is None
    while len(s.running) < 100 or any(r.pending > 1 for r in s.running):
        shape(s)
    served = [dict(shape(s)) for _ in range(70)]
    counts = [sum(i in step for step in served) for i in range(100)]
    assert max(counts) - min(counts) <= 2 and sum(counts) == 70 * 16


def test_budget_of_one_token_serves_all() -> None:
    s, executor = scheduler(budget=1), Executor(16)
    requests = [request(i, [i] * 5, 7) for i in range(3)]
    for r in requests:
        assert s.submit(r) is None
    while step(s, executor) is not None:
        pass
    for i, r in enumerate(requests):
        assert list(r.tokens[5:]) == answer([i] * 5, 7, frozenset(), 1024)


@pytest.mark.parametrize("budget", [16, 64, 512])
@pytest.mark.parametrize(("copies", "most"), [(2, 1), (6, 2)])
def test_requests_that_fill_the_pool_together_all_finish_with_few_preemptions(
    copies: int, most: int, budget: int
) -> None:
    s, executor = scheduler(budget=budget), Executor(16)
    requests = [request(i, [i] + [1] * 479, 300) for i in range(copies)]
    for r in requests:
        assert s.submit(r) is None
    while step(s, executor) is not None:
        assert s.counters.steps < 4000
    for i, r in enumerate(requests):
        assert list(r.tokens[480:]) == answer([i] + [1] * 479, 300, frozenset(), 1024)
        assert r.finish is Finish.LENGTH and r.preemptions <= most
    assert s.counters.preemptions >= 1, "two such requests cannot both keep their blocks"
    assert requests[0].preemptions == 0, "the oldest is never preempted"


def test_request_that_comes_back_into_a_tight_pool_waits_for_more_room_each_time() -> None:
    s = scheduler(block_size=1, num_blocks=20)
    old, young = request(0, [1] * 9, 11), request(1, [1] * 9, 5)
    assert s.submit(old) is None and s.submit(young) is None
    while not young.preemptions:
        shape(s)
    assert young.phase is Phase.WAITING and young not in s.running
    assert [shape(s) for _ in range(4)] == [[(0, 1)]] * 4  # it would fit now and then, but not with the headroom


def test_younger_requests_pass_one_that_does_not_fit_but_only_so_often() -> None:
    s = scheduler(seqs=64, budget=200, block_size=1, num_blocks=200)
    assert s.submit(request(0, [1] * 80, 40)) is None
    shape(s)
    big = request(1, [1] * 150, 5)
    assert s.submit(big) is None
    small = [request(2 + i, [1], 3) for i in range(3 * Policy.patience)]
    for r in small:
        assert s.submit(r) is None
    for _ in range(30):
        shape(s)
    assert big.phase is Phase.WAITING and big.overtaken == Policy.patience
    assert [r.phase for r in small] == [Phase.FINISHED] * Policy.patience + [Phase.WAITING] * 2 * Policy.patience
    while big.phase is Phase.WAITING:
        shape(s)
    assert sum(r.phase is not Phase.WAITING for r in small) <= Policy.patience + 30
    assert s.counters.steps < 60


def test_what_can_never_fit_is_refused_with_the_limit() -> None:
    s = scheduler(context=100, block_size=16, num_blocks=4)
    for prompt, max_new, param, words in [
        ([], 1, "prompt", "at least 1 token"),
        ([1], 0, "max_tokens", "at least 1, not 0"),
        ([1] * 100, 1, "prompt", "100 tokens, but max_model_len is 100"),
        ([1] * 70, 1, "prompt", "70 tokens, but the KV memory holds 64 (4 blocks of 16)"),
        ([1] * 60, 6, "max_tokens", "lower max_tokens to at most 5"),
    ]:
        reject = s.submit(request(0, prompt, max_new))
        assert reject is not None and reject.param == param and words in reject.message
    assert s.schedule(0) is None
    assert s.submit(request(0, [1] * 60, 5)) is None
    while s.running or s.waiting:
        shape(s)
    assert s.counters.generation_tokens == 5


@pytest.mark.parametrize(
    ("script", "max_new", "finish", "given"),
    [
        ([3, END], 5, Finish.STOP, 2),
        ([3, 3, 3], 3, Finish.LENGTH, 3),
        ([3, 3, END], 3, Finish.STOP, 3),  # an end id as the last token allowed
        ([3, 3, 3, 3, 3], 50, Finish.LENGTH, 5),  # the context is full
        ([3, 3, 3, 3, END], 50, Finish.STOP, 5),
        ([3, -1], 5, Finish.ERROR, 1),
    ],
)
def test_how_a_request_ends(script: list[int], max_new: int, finish: Finish, given: int) -> None:
    s = scheduler(context=15)
    r = request(0, [1] * 10, max_new, [END])
    assert s.submit(r) is None
    for i, token in enumerate(script):
        batch = s.schedule(0)
        assert batch is not None
        (delta,) = s.commit(batch, [token], 1)
        assert delta.finish == (finish if i == len(script) - 1 else None)
        assert delta.token == (token if token >= 0 else None) and delta.row == 0
    assert r.finish is finish and len(r.tokens) == 10 + given
    assert s.schedule(0) is None and s.pool.used == 0


def test_row_that_failed_ends_its_request_alone() -> None:
    s = scheduler()
    for i in range(3):
        assert s.submit(request(i, [1], 5)) is None
    batch = s.schedule(0)
    assert batch is not None
    deltas = s.commit(batch, [4, -1, 5], 1)
    assert [(d.id, d.token, d.finish, d.row) for d in deltas] == [
        (0, 4, None, 0),
        (1, None, Finish.ERROR, 1),
        (2, 5, None, 2),
    ]
    assert shape(s) == [(0, 1), (2, 1)]


def test_cancel_in_every_phase() -> None:
    s = scheduler(seqs=2, budget=4)
    requests = [request(i, [1] * 6, 5) for i in range(4)]
    for r in requests:
        assert s.submit(r) is None
    s.cancel(3)  # waiting
    s.cancel(99)  # never known
    assert requests[3].finish is Finish.CANCELLED
    assert shape(s) == [(0, 4)]
    batch = s.schedule(0)
    assert batch is not None and [x.id for x in batch.segments] == [0, 1]
    s.cancel(0)  # its last prompt chunk, and its first token, are being computed
    s.cancel(0)
    assert requests[0].phase is Phase.FINISHED and s.pool.refs(batch.segments[0].blocks[0]) == 1
    assert s.commit(batch, [5], 1) == []
    assert s.pool.refs(batch.segments[0].blocks[0]) == 0
    assert requests[0].tokens[-1] == 1, "a token for nobody"
    s.cancel(1)  # between steps, half its prompt computed
    assert s.pool.used == 0
    assert shape(s) == [(2, 4)]
    s.cancel(2)
    assert s.schedule(0) is None and not s.running and not s.waiting


def test_a_step_rates_no_more_rows_of_a_prompt_than_there_is_memory_for() -> None:
    s = scheduler(budget=512)
    rated, plain = request(0, [1] * 300, 5), request(1, [1] * 300, 5)
    rated.rate_until = 300
    assert s.submit(rated) is None and s.submit(plain) is None
    assert [shape(s) for _ in range(3)] == [[(0, 128), (1, 300)], [(1, 1), (0, 128)], [(1, 1), (0, 44)]]
    assert rated.rated == 300 and rated.pending == 1


def test_the_oldest_prompt_is_finished_first() -> None:
    s = scheduler(budget=8)
    for i in range(3):
        assert s.submit(request(i, [1] * 10, 5)) is None
    assert [shape(s) for _ in range(3)] == [[(0, 8)], [(0, 2), (1, 6)], [(0, 1), (1, 4), (2, 3)]]


def test_short_prompts_join_beside_a_long_one_as_far_as_half_of_a_step_goes() -> None:
    s = scheduler(seqs=16, num_blocks=200)
    assert s.submit(request(0, [0] * 500, 5)) is None
    shape(s)
    for i in range(1, 9):
        assert s.submit(request(i, [i] * 10, 5)) is None
    assert shape(s) == [(1, 10), (2, 10), (3, 10), (0, 34)]
    assert [r.id for r in s.waiting] == [4, 5, 6, 7, 8]
    assert shape(s) == [(1, 1), (2, 1), (3, 1), (4, 10), (5, 10), (6, 10), (0, 31)]


def test_place_is_expected_after_an_answer_shared_by_those_who_run() -> None:
    s = scheduler(seqs=2)
    for i in range(3):
        assert s.submit(request(i, [i] * 9, 4)) is None
    assert s.place_us() == 0, "nothing is known yet"
    for i in range(5):
        batch = s.schedule(0)
        assert batch is not None
        s.commit(batch, [0] * batch.num_sampled, 1000)
        assert s.submit(request(9 + i, [i] * 9, 4)) is None
    assert len(s.running) == 2 and s.place_us() == 1000 * 4 // 2


def test_counters_count_recomputed_prompt_tokens_again() -> None:
    s = scheduler(block_size=1, num_blocks=12, context=12)
    assert s.submit(request(0, [1] * 5, 7)) is None and s.submit(request(1, [1] * 4, 8)) is None
    while s.running or s.waiting:
        shape(s)
    c = s.counters
    assert (c.prompt_tokens, c.generation_tokens, c.preemptions) == (5 + 2 * 4, 7 + 8, 1)
    assert c.steps == c.busy_us > 0
