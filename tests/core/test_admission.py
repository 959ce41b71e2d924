"""Who joins: exact numbers at the edge of the headroom, of the lookahead, and of overtaking."""

from __future__ import annotations

import pytest
from kv_oracle import request

from potok.core.admission import LOOKAHEAD, MAX_OVERTAKEN, Limits, next_to_join
from potok.core.blocks import BlockPool
from potok.core.prefix import PrefixCache
from potok.core.request import Request

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1000, block_size=4)


def waiting(length: int, preemptions: int = 0, overtaken: int = 0) -> Request:
    r = request(0, [1] * length, 5)
    r.preemptions, r.overtaken = preemptions, overtaken
    return r


def joins(queue: list[Request], num_running: int, free: int, limits: Limits = LIMITS) -> int | None:
    cache = PrefixCache(BlockPool(free), limits.block_size, enabled=False)
    join = next_to_join(queue, [waiting(4)] * num_running, cache, limits)
    assert join is None or join.passed == queue[: join.place]
    return None if join is None else join.place


@pytest.mark.parametrize(
    ("length", "preemptions", "num_running", "least_free"),
    [
        (16, 0, 0, 4),
        (17, 0, 0, 5),
        (17, 5, 0, 5),  # nobody else runs: no headroom
        (17, 0, 3, 8),
        (17, 1, 3, 11),
        (17, 2, 3, 14),
    ],
)
def test_blocks_for_all_tokens_and_the_headroom(
    length: int, preemptions: int, num_running: int, least_free: int
) -> None:
    queue = [waiting(length, preemptions)]
    assert joins(queue, num_running, least_free, LIMITS) == 0
    assert joins(queue, num_running, least_free - 1, LIMITS) is None


def test_the_oldest_that_fits_is_next_unless_somebody_was_passed_too_often() -> None:
    small, big = 4, 400
    assert joins([waiting(big), waiting(big), waiting(small), waiting(small)], 1, 10, LIMITS) == 2
    passed = waiting(big, overtaken=MAX_OVERTAKEN - 1)
    assert joins([passed, waiting(small)], 1, 10, LIMITS) == 1
    passed.overtaken += 1
    assert joins([passed, waiting(small)], 1, 10, LIMITS) is None
    assert joins([waiting(small), passed], 1, 10, LIMITS) == 0
    assert joins([], 1, 10, LIMITS) is None


def test_the_queue_is_not_searched_beyond_the_lookahead() -> None:
    queue = [waiting(400)] * (LOOKAHEAD - 1) + [waiting(4)]
    assert joins(queue, 1, 10, LIMITS) == LOOKAHEAD - 1
    assert joins([waiting(400), *queue], 1, 10, LIMITS) is None


def test_without_eviction_only_those_join_who_can_run_to_their_ends() -> None:
    limits = Limits(8, 64, 1000, 4, no_evict=True)
    # 17 tokens and 5 to come: 6 blocks, the last token's KV is never needed. Each running one, of 4, wants 1 more.
    assert joins([waiting(17)], 0, 6, limits) == 0
    assert joins([waiting(17)], 0, 5, limits) is None
    assert joins([waiting(17)], 3, 9, limits) == 0
    assert joins([waiting(17, preemptions=5)], 3, 8, limits) is None
