from __future__ import annotations

import random
from array import array

import pytest

from potok.core.blocks import BlockPool
from potok.core.invariants import check
from potok.core.scheduler import Limits, Scheduler


def test_blocks_are_given_once_until_released() -> None:
    rng, pool = random.Random(0), BlockPool(50)
    held: list[int] = []
    for _ in range(2000):
        if rng.random() < 0.5:
            new = pool.alloc(rng.randint(0, pool.free))
            assert not set(new) & set(held) and len(set(new)) == len(new)
            held += new
        else:
            rng.shuffle(held)
            cut = rng.randint(0, len(held))
            pool.release(held[cut:])
            del held[cut:]
        assert pool.used == len(held) and pool.free == 50 - len(held)
        assert all(pool.refs(b) == (b in held) for b in range(50))


def test_what_is_not_there_cannot_be_taken_or_released() -> None:
    pool = BlockPool(4)
    taken = pool.alloc(3)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        pool.alloc(2)
    pool.release(taken)
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release(taken[:1])
    assert pool.free == 4


def test_invariants_see_a_block_that_nobody_holds() -> None:
    scheduler = Scheduler(Limits(1, 1, 8, 1), 8)
    check(scheduler)
    lost = scheduler.pool.alloc(1)
    with pytest.raises(AssertionError, match=f"block {lost[0]}: count 1, held by 0"):
        check(scheduler)
    assert lost == array("i", lost)
