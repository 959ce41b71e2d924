"""Who joins: exact numbers at the edge of the headroom, of the lookahead, and of overtaking."""

from __future__ import annotations

import pytest
from kv_oracle import request

from potok.core.admission import Limits, Room, joining
from potok.core.blocks import BlockPool
from potok.core.policy import WINDOW, LongestPrefix, Policy
from potok.core.prefix import PrefixCache
from potok.core.request import Request

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1000, block_size=4)
ROOM = Room(10**6, [], 0)


def waiting(length: int, preemptions: int = 0, overtaken: int = 0) -> Request:
    r = request(0, [1] * length, 5)
    r.preemptions, r.overtaken = preemptions, overtaken
    return r


def joins(queue: list[Request], num_running: int, free: int, limits: Limits = LIMITS) -> list[int]:
    """Places in the queue of those who may join, when each takes its blocks."""
    for place, r in enumerate(queue):
        r.id = r.order = place
        r.rank = (place, 0)
    pool = BlockPool(max(1, free))
    cache = PrefixCache(pool, limits.block_size, enabled=False)
    running = [waiting(4) for _ in range(num_running)]
    joined = []
    policy = Policy()
    for r, match in joining(policy.order(queue, running, 8, cache), running, cache, limits, policy, ROOM):
        cache.take(r, match)
        running.append(r)
        joined.append(r.id)
    return joined


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
    assert joins(queue, num_running, least_free) == [0]
    assert joins(queue, num_running, least_free - 1) == []


def test_the_oldest_that_fit_are_next_unless_somebody_was_passed_too_often() -> None:
    small, big = 4, 400
    queue = [waiting(big), waiting(small), waiting(big), waiting(small)]
    assert joins(queue, 1, 10) == [1, 3]
    assert [r.overtaken for r in queue] == [2, 0, 1, 0]
    passed = waiting(big, overtaken=Policy.patience - 1)
    assert joins([passed, waiting(small)], 1, 10) == [1]
    assert passed.overtaken == Policy.patience
    assert joins([passed, waiting(small)], 1, 10) == []
    assert joins([waiting(small), passed, waiting(small)], 1, 10) == [0]
    assert joins([], 1, 10) == []


def test_the_queue_is_not_searched_beyond_the_window() -> None:
    assert joins([*(waiting(400) for _ in range(WINDOW - 1)), waiting(4)], 1, 10) == [WINDOW - 1]
    assert joins([*(waiting(400) for _ in range(WINDOW)), waiting(4)], 1, 10) == []


def test_who_waits_for_a_prefix_is_not_passed() -> None:
    cache = PrefixCache(BlockPool(100), 4)
    computing = request(99, list(range(40)), 5)
    cache.take(computing, cache.match(computing))
    queue = [request(0, list(range(41)), 5), request(1, [7] * 20, 5)]
    for r in queue:
        r.order, r.rank = r.id, (r.id, 0)
    assert [r.id for r, _ in joining(queue, [computing], cache, LIMITS, Policy(), ROOM)] == [1]
    assert queue[0].overtaken == 0


def test_who_needs_least_computing_is_next_but_not_for_ever() -> None:
    cache = PrefixCache(BlockPool(100), 4)
    known = request(99, list(range(40)), 5)
    cache.take(known, cache.match(known))
    known.computed = 40
    cache.publish(known)
    queue = [request(0, [7] * 30, 5), request(1, list(range(20)), 5), request(2, [*range(35), 9], 5)]
    for r in queue:
        r.order, r.rank = r.id, (r.id, 0)
    policy = LongestPrefix()

    def order() -> list[int]:
        candidates = policy.order(queue, [known], 8, cache)
        return [r.id for r, _ in joining(candidates, [known], cache, LIMITS, policy, ROOM)]

    assert order() == [2, 1, 0]
    assert [r.overtaken for r in queue] == [2, 1, 0]
    queue[0].overtaken = LongestPrefix.patience
    assert order() == [0, 2, 1]


def test_without_eviction_only_those_join_who_can_run_to_their_ends() -> None:
    limits = Limits(8, 64, 1000, 4, no_evict=True)
    # 17 tokens and 5 to come: 6 blocks, the last token's KV is never needed. Each running one, of 4, wants 1 more.
    assert joins([waiting(17)], 0, 6, limits) == [0]
    assert joins([waiting(17)], 0, 5, limits) == []
    assert joins([waiting(17)], 3, 9, limits) == [0]
    assert joins([waiting(17, preemptions=5)], 3, 8, limits) == []
