"""What must hold of a scheduler between steps; one broken line here is a bug, never a condition to handle."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from potok.core.request import Phase, Request

if TYPE_CHECKING:
    from potok.core.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError naming the request or the block. O(blocks): for tests and for hunting a bug."""
    check_blocks(scheduler)
    for queue in (scheduler.waiting, scheduler.running):
        assert all(a.order < b.order for a, b in pairwise(queue)), "a queue is not oldest first"
    for request in scheduler.waiting:
        assert request.phase is Phase.WAITING, f"request {request.id} waits but is {request.phase.name}"
        assert not request.blocks and not request.computed, f"request {request.id} waits but holds KV"
    for request in scheduler.running:
        check_running(scheduler, request)
    limit = scheduler.limits.max_num_seqs
    assert len(scheduler.running) <= limit, f"{len(scheduler.running)} running, max_num_seqs is {limit}"


def check_blocks(scheduler: Scheduler) -> None:
    """Every block is free, or held exactly as often as its count says."""
    pool = scheduler.pool
    held = Counter(b for r in (*scheduler.running, *scheduler.leaving) for b in r.blocks)
    for block in range(pool.num_blocks):
        assert pool.refs(block) == held[block], f"block {block}: count {pool.refs(block)}, held by {held[block]}"
    assert pool.used == len(held), f"{pool.used} blocks in use, {len(held)} held"


def check_running(scheduler: Scheduler, request: Request) -> None:
    assert request.phase is Phase.RUNNING, f"request {request.id} runs but is {request.phase.name}"
    assert request.pending > 0, f"request {request.id} runs but has nothing to compute"
    # The newest token's block comes with the next schedule.
    known, blocks_for = len(request.tokens), scheduler.limits.blocks_for
    assert blocks_for(known - 1) <= len(request.blocks) <= blocks_for(known), (
        f"request {request.id}: {len(request.blocks)} blocks for {known} tokens"
    )
    assert known < scheduler.limits.max_model_len, f"request {request.id} outgrew the context"
