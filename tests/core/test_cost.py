"""What a step costs does not grow with what is cached, or with who waits. Counted in bytecode, not in time."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import pytest
from kv_oracle import request

from potok.core.policy import Fair, LongestPrefix, Policy, Priority, Shortest
from potok.core.radix import Domain
from potok.core.scheduler import Limits, Scheduler

#: Tokens of a block. Small, so that many blocks are filled in little time.
B = 2
PROMPT = 200
FEW, MANY = 1_000, 100_000


def full(num_blocks: int, policy: type[Policy]) -> Scheduler:
    """A scheduler whose blocks are all cached, as prefixes that differ in their first block."""
    scheduler = Scheduler(Limits(2048, num_blocks * B, 4 * PROMPT, B), num_blocks, policy=policy())
    for id in range(num_blocks * B // PROMPT):
        assert scheduler.submit(request(id, prompt(id), 1)) is None
    run(scheduler)
    assert scheduler.pool.idle == num_blocks and scheduler.pool.free == 0
    return scheduler


def prompt(id: int) -> list[int]:
    return [id, *range(1, PROMPT)]


def run(scheduler: Scheduler) -> None:
    while (batch := scheduler.schedule(0)) is not None:
        scheduler.commit(batch, [7] * batch.num_sampled, 1)


class Opcodes:
    """Counts the instructions of Python code while it is entered."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Opcodes:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *reason: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, _: Any) -> Any:
        self.count += event == "opcode"
        return self._instruction


def cost(num_blocks: int, policy: type[Policy]) -> int:
    """Of ten requests that run side by side, after hits and misses; each new block means that one is dropped."""
    scheduler = full(num_blocks, policy)
    for i in range(10):
        known = prompt(i) if i % 2 else prompt(10**6 + i)
        assert scheduler.submit(request(10**6 + i, [*known[: 20 + 4 * i], 5], 10)) is None
    evicted = scheduler.cache.counters.evicted_blocks
    with Opcodes() as opcodes:
        run(scheduler)
    assert scheduler.cache.counters.evicted_blocks >= evicted + 100
    assert scheduler.cache.counters.hits >= 5
    return opcodes.count


@pytest.mark.parametrize("policy", [Policy, LongestPrefix])
def test_a_hundred_thousand_cached_blocks_cost_what_a_thousand_do(policy: type[Policy]) -> None:
    few, many = cost(FEW, policy), cost(MANY, policy)
    assert few > 10_000
    assert many <= 1.1 * few, (few, many)


def queue_cost(waiting: int, policy: type[Policy], seqs: int) -> int:
    """Of twenty steps of running requests, while so many wait: for a seat, or for a long prompt to be computed."""
    scheduler = Scheduler(Limits(seqs, 64, 4096, 16), 1000, policy=policy())
    for id in range(16 + waiting):
        prompt = [id] * (2000 if seqs > 16 and id == 0 else 40)
        r = request(id, prompt, 1000)
        r.domain = Domain(namespace="ab"[id % 2])
        assert scheduler.submit(r) is None
    while (seqs == 16 and len(scheduler.running) < seqs) or scheduler.counters.steps < 5:
        batch = scheduler.schedule(0)
        assert batch is not None
        scheduler.commit(batch, [7] * batch.num_sampled, 1)
    with Opcodes() as opcodes:
        for _ in range(20):
            batch = scheduler.schedule(0)
            assert batch is not None
            scheduler.commit(batch, [7] * batch.num_sampled, 1)
    assert len(scheduler.waiting) > waiting - 100
    return opcodes.count


@pytest.mark.parametrize(
    ("policy", "seqs"),
    [
        *itertools.product([Policy, LongestPrefix, Priority, Shortest], [16, 64]),
        (Fair, 16),  # while a seat is free it looks at all who wait
    ],
)
def test_five_thousand_waiting_requests_cost_what_two_hundred_do(policy: type[Policy], seqs: int) -> None:
    few, many = queue_cost(200, policy, seqs), queue_cost(5000, policy, seqs)
    assert few > 1_000
    assert many <= 1.1 * few, (few, many)
