"""What must hold of a scheduler between steps; one broken line here is a bug, never a condition to handle."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from potok.core.radix import key_of
from potok.core.request import Phase, Request
from potok.core.tier import Kind

if TYPE_CHECKING:
    from potok.core.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError naming the request or the block. O(blocks): for tests and for hunting a bug."""
    check_blocks(scheduler)
    check_tree(scheduler)
    check_transfers(scheduler)
    for queue in (scheduler.waiting, scheduler.running):
        assert all(a.rank < b.rank for a, b in pairwise(queue)), "a queue is not in the order of ranks"
    tokens = sum(len(r.tokens) for r in scheduler.waiting)
    assert scheduler.waiting_tokens == tokens, f"{tokens} tokens wait, counted {scheduler.waiting_tokens}"
    for request in scheduler.waiting:
        assert request.phase is Phase.WAITING, f"request {request.id} waits but is {request.phase.name}"
        assert not request.blocks and not request.computed, f"request {request.id} waits but holds KV"
    for request in scheduler.running:
        check_running(scheduler, request)
    for ghost in scheduler.ghosts:
        assert ghost.phase is Phase.GHOST and ghost.finish is not None, f"request {ghost.id} haunts the batch alive"
        assert 0 < ghost.computed <= len(ghost.blocks) * scheduler.limits.block_size, f"ghost {ghost.id} has no place"
    limit, rows = scheduler.limits.max_num_seqs, len(scheduler.running) + len(scheduler.ghosts)
    assert rows <= limit, f"{rows} running or padding, max_num_seqs is {limit}"


def check_blocks(scheduler: Scheduler) -> None:
    """Every block is free, or held exactly as often as its count says: by requests, the cache, a copy, a transfer."""
    pool, cache = scheduler.pool, scheduler.cache
    held = Counter(b for r in (*scheduler.running, *scheduler.ghosts, *scheduler.leaving) for b in r.blocks)
    held.update(cache.borrowed())
    held.update(t.block for t in cache.transfers.under_way())
    needed = len(held)
    held.update(node.block for node in cache.tree.nodes())
    for block in range(pool.num_blocks):
        assert pool.refs(block) == held[block], f"block {block}: count {pool.refs(block)}, held by {held[block]}"
        assert pool.is_cached(block) == (cache.tree.node_of(block) is not None), f"block {block}: cached or not?"
    assert pool.free == pool.num_blocks - len(held), f"{pool.free} blocks free, {len(held)} held"
    assert pool.idle == len(held) - needed, f"{pool.idle} blocks idle, {len(held) - needed} held by the cache alone"


def check_tree(scheduler: Scheduler) -> None:
    """The tree and each running request agree about its whole blocks, and every idle leaf can be dropped."""
    cache, size = scheduler.cache, scheduler.limits.block_size
    for request in scheduler.running:
        assert request.node is not None, f"request {request.id} runs outside the tree"
        nodes = list(request.node.path())[::-1]
        assert [n.block for n in nodes] == list(request.blocks[: len(nodes)]), f"request {request.id} strays"
        assert b"".join(n.key for n in nodes) == key_of(request.tokens[: request.node.end])
        if cache.enabled and scheduler.flight is None:
            assert request.computed - request.node.end < size, f"request {request.id} keeps a whole block to itself"
    for node in cache.tree.nodes():
        assert node.order == sorted(node.children) and node.parent is not None
        assert node.parent.children[node.key] is node
    cache.check_droppable()


def check_transfers(scheduler: Scheduler) -> None:
    """Who waits for reads has them under way, into its own blocks; nobody computes into a block under transfer."""
    transfers, size = scheduler.cache.transfers, scheduler.limits.block_size
    transfers.tier.check()
    under_way = {t.id: t for t in transfers.under_way()}
    for load in transfers.loads():
        request = load.request
        assert request.loading and request in scheduler.running and load.left, f"request {request.id} waits for nothing"
        for id, i in load.left.items():
            assert under_way[id].block == request.blocks[load.start // size + i], f"request {request.id}: not its block"
    assert sum(r.loading for r in scheduler.running) == sum(1 for _ in transfers.loads()), "somebody waits for ever"
    targets = {t.block for t in under_way.values() if t.kind is Kind.READ}
    for request in scheduler.running:
        assert request.loading or targets.isdisjoint(request.blocks), f"request {request.id} has a block that is read"
    for transfer in under_way.values():
        cached = scheduler.pool.is_cached(transfer.block)
        assert not (cached and transfer.kind is Kind.READ), f"block {transfer.block} is cached and read"


def check_running(scheduler: Scheduler, request: Request) -> None:
    assert request.phase is Phase.RUNNING, f"request {request.id} runs but is {request.phase.name}"
    assert request.pending > 0, f"request {request.id} runs but has nothing to compute"
    # The newest token's block comes with the next schedule.
    known, blocks_for = len(request.tokens), scheduler.limits.blocks_for
    assert blocks_for(known - 1) <= len(request.blocks) <= blocks_for(known), (
        f"request {request.id}: {len(request.blocks)} blocks for {known} tokens"
    )
    assert known < scheduler.limits.max_model_len, f"request {request.id} outgrew the context"
