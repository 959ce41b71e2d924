"""The prefix cache: what running and finished requests have computed, for whoever begins with the same tokens.

A request that joins takes over the blocks of the longest cached prefix of its tokens, shared and never written again.
Where the prefix ends inside a block, that block's head is copied into a block of its own, so hits are exact to the
token. At least one token is left to compute: its logits are what the request is here for.

Blocks come from the tree, and from requests that run now: a whole block is published as soon as it is computed, and the
block that a request is filling can be copied from. All this is invisible in the output: KV of a token depends on its
prefix and position alone (docs/numerics.md), so a shared block holds the very bits that would have been computed.

Where the tree ends, whole blocks may follow in the second tier (potok.core.tier). They are read into blocks of the
request's own when that is faster than computing them, and published then.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from potok.core.blocks import BlockPool
from potok.core.eviction import EvictionOrder
from potok.core.radix import BYTES, RadixNode, RadixTree, Root, common_tokens, digest_of, key_of
from potok.core.request import Request
from potok.core.tier import Done, Tier
from potok.core.transfers import Load, Transfers

#: A request waits for one that is computing its prefix when at least so many tokens are to be had from it.
WORTH_WAITING = 16
#: Dropped prefixes that are remembered, per block of the pool, so that a miss can say "evicted".
REMEMBERED = 4


class Miss(StrEnum):
    """Why a request found nothing of its tokens in the cache."""

    DIFFERS = "differs"  # from everything that is cached, in the first block
    TOO_SHORT = "too_short"  # less than a block, and nobody like it is running
    EVICTED = "evicted"  # it was there
    SKIPPED = "skipped"  # the request wants logits of its prompt, or caching is off


class Match(NamedTuple):
    """What of a request's tokens need not be computed.

    node: the deepest cached block. blocks: of the whole path. head: tokens to copy from `source` after that; 0: none.
    wait: somebody who runs is about to compute more of it. cost: blocks that must be available for all of its tokens.
    stored: digests of the whole blocks that follow in the second tier. read: they are to be read, as that pays.
    """

    node: RadixNode
    blocks: array[int]
    head: int
    source: int
    wait: bool
    cost: int
    stored: Sequence[bytes] = ()
    read: bool = False

    @property
    def num_tokens(self) -> int:
        return self.node.end + self.head


@dataclass(slots=True)
class PrefixCounters:
    """Totals since the start, in tokens or as named. queries: requests that joined, resumed ones not counted."""

    queries: int = 0
    hits: int = 0  # queries that found something
    queried_tokens: int = 0
    hit_tokens: int = 0
    copied_tokens: int = 0  # of the hit tokens, those whose block was copied
    evicted_blocks: int = 0
    evicted_reused_blocks: int = 0  # of them, those that had been hit
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Miss, 0))


class PrefixCache:
    """All blocks of the pool go out and come back through here. enabled: False shares nothing."""

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool = True, tier: Tier | None = None) -> None:
        self.pool = pool
        self.tree = RadixTree(block_size)
        self.transfers = Transfers(Tier(0, block_size) if tier is None else tier, pool, self.tree, block_size)
        self.counters = PrefixCounters()
        self.enabled = enabled
        self._order = EvictionOrder()
        self._block_size = block_size
        self._filling: dict[RadixNode, dict[int, Request]] = {}  # running requests, by their deepest cached block
        self._dropped: OrderedDict[bytes, int] = OrderedDict()  # digest of a dropped prefix -> its hits
        self._borrowed: list[int] = []  # blocks that the step in flight copies from

    # -- blocks for a request -------------------------------------------------------------------------------------

    def match(self, request: Request) -> Match:
        """Reads only."""
        size, known = self._block_size, len(request.tokens)
        root = self.tree.find_root(request.domain)
        total = -(-known // size)
        limit = min(known - 1, request.reusable)
        if not self.enabled or limit <= 0:
            return Match(root, array("i"), 0, -1, False, total)
        key = key_of(request.tokens[: limit + 1])
        node = self.tree.descend(root, key[: limit * BYTES])
        blocks = array("i", [n.block for n in node.path()])
        blocks.reverse()
        rest = key[node.end * BYTES : limit * BYTES]
        source, head = self._head(node, rest)
        # The token that must be computed may end a stored block: the tokens before it are good, and it comes out equal.
        stored = self.transfers.find(node, key[node.end * BYTES :])
        readable = min(len(stored) * size, limit - node.end)
        if readable <= head:
            stored = ()
        read = len(stored) > 0 and self.transfers.pays(len(stored), readable - head)
        wait = self._is_coming(node, rest, head, readable if read else head)
        if read:
            source, head = -1, 0
        reused = sum(map(self.pool.is_idle, blocks)) + (head > 0 and self.pool.is_idle(source))
        return Match(node, blocks, head, source, wait, total - len(blocks) + reused, stored, read)

    def without_copy(self, match: Match) -> Match:
        """The same, with the tokens of the last block to be computed: copying needs one block more for a step."""
        if not match.head:
            return match
        return match._replace(head=0, source=-1, cost=match.cost - self.pool.is_idle(match.source))

    def take(self, request: Request, match: Match) -> int:
        """Gives the request blocks for all its tokens. Returns the block to copy from into the first new one, or -1."""
        pool = self.pool
        self._count(request, match)
        request.joins += 1
        for block in match.blocks:
            pool.share(block)
        if match.head:
            pool.share(match.source)
            self._borrowed.append(match.source)
        request.blocks = match.blocks + self.alloc(-(-len(request.tokens) // self._block_size) - len(match.blocks))
        request.computed = match.num_tokens
        # A root may have been linked or forgotten since the match was made.
        self._settle(request, match.node if match.node.end else self.tree.link_root(request.domain))
        if match.read:
            self.transfers.read(request, match.node.end, match.stored)
        elif match.stored:
            self.transfers.decline()
        return match.source if match.head else -1

    def alloc(self, n: int) -> array[int]:
        """`n` blocks, dropping idle ones where free ones do not suffice. The caller has looked at pool.available."""
        while self.pool.free < n:
            self._drop_one()
        return self.pool.alloc(n)

    def publish(self, request: Request) -> None:
        """Caches the whole blocks that the request has computed since the last time. Between steps."""
        node, size = request.node, self._block_size
        if not self.enabled or node is None or node.end + size > request.computed:
            return
        while node.end + size <= request.computed:
            i = node.end // size
            key = key_of(request.tokens[node.end : node.end + size])
            child = node.children.get(key)
            if child is None:
                child = self.tree.add(node, key, request.blocks[i])
                self.pool.cache(child.block)
                self._order.touch(child, self._dropped.pop(child.digest, 0))
            elif child.block != request.blocks[i]:  # somebody computed the same tokens meanwhile: the same bits
                self.pool.share(child.block)
                self.pool.release((request.blocks[i],))
                request.blocks[i] = child.block
            node = child
        self._leave(request)
        self._settle(request, node)

    def release(self, request: Request) -> None:
        """Takes all blocks from the request."""
        load = self.transfers.leave(request)
        if load is not None:
            self._count_load(load, 0)
        self.pool.release(request.blocks)
        request.blocks = array("i")
        if request.node is not None:
            node = request.node
            self.transfers.note(node)
            self._leave(request)
            if isinstance(node, Root):
                self._forget(node)
            else:
                self._offer(node)

    def end_copies(self) -> None:
        """The step that copied has been committed."""
        for block in self._borrowed:
            self.pool.release((block,))
            node = self.tree.node_of(block)
            if node is not None:
                self._offer(node)
        self._borrowed.clear()

    def transferred(self, done: Iterable[Done]) -> list[Request]:
        """Ends of transfers, between steps. Returns the requests whose reads are over."""
        blocks, complete = self.transfers.end(done)
        self.pool.release(blocks)
        for load in complete:
            self._arrive(load)
        return [load.request for load in complete]

    def give_up(self, request: Request) -> None:
        """Whoever waits for this request's reads waits no longer; what they have brought so far is kept."""
        load = self.transfers.leave(request)
        assert load is not None, f"request {request.id} waits for nothing"
        load.good = min([load.good, *load.left.values()])
        self._arrive(load)
        self.transfers.tier.give_up()

    def borrowed(self) -> Iterator[int]:
        return iter(self._borrowed)

    def _arrive(self, load: Load) -> None:
        """The request's reads are over: it goes on behind the tokens that they brought."""
        request = load.request
        self.transfers.leave(request)
        end = load.start + load.good * self._block_size
        end = min(end, len(request.tokens) - 1, request.reusable)
        gained = max(0, end - request.computed)
        request.computed += gained
        self._count_load(load, gained)
        self.publish(request)

    def check_droppable(self) -> None:
        """Raises AssertionError when an idle leaf would never be dropped (for tests)."""
        for node in self.tree.nodes():
            assert not self._is_droppable(node) or self._order.holds(node), f"idle block {node.block} is forgotten"

    def clear(self) -> None:
        """Drops all that is idle."""
        while self.pool.idle:
            self._drop_one()

    # -- hits -----------------------------------------------------------------------------------------------------

    def _head(self, node: RadixNode, rest: bytes) -> tuple[int, int]:
        """Who has most of the block that begins `rest`: (block, tokens of it)."""
        source, head = -1, 0
        neighbour = self.tree.best_neighbour(node, rest)
        if neighbour is not None:
            source, head = neighbour[0].block, neighbour[1]
        for other in self._filling.get(node, {}).values():
            done = min(other.computed - node.end, self._block_size)
            if done > head:
                n = common_tokens(key_of(other.tokens[node.end : node.end + done]), rest)
                if n > head:
                    source, head = other.blocks[node.end // self._block_size], n
        return source, head

    def _is_coming(self, node: RadixNode, rest: bytes, head: int, readable: int) -> bool:
        """Whether a running request is about to have so much of `rest` that waiting for it pays.

        head: tokens that are to be had without it. readable: the same where it computes and does not read them, too.
        """
        for other in self._filling.get(node, {}).values():
            if other.pending > 1:
                n = common_tokens(key_of(other.tokens[node.end :]), rest)
                if n - max(head if other.loading else readable, other.computed - node.end) >= WORTH_WAITING:
                    return True
        return False

    def _count(self, request: Request, match: Match) -> None:
        counters, found = self.counters, match.num_tokens
        used = [*match.node.path()]
        copied = self.tree.node_of(match.source)  # None of -1, and of a block that somebody is filling
        if copied is not None:
            used.append(copied)
        for node in used:
            self._order.touch(node, not request.joins)
        if request.joins:
            return
        request.cached = found
        counters.queries += 1
        counters.queried_tokens += len(request.tokens)
        if found:
            counters.hits += 1
            counters.hit_tokens += found
            counters.copied_tokens += match.head
        elif not match.read:
            counters.misses[self._why(request)] += 1

    def _count_load(self, load: Load, gained: int) -> None:
        """gained: tokens. A request that found nothing in memory is a hit or a miss only now."""
        request, counters = load.request, self.counters
        self.transfers.tier.counters.hit_tokens += gained
        if request.joins > 1:
            return
        if not request.cached:
            if gained:
                counters.hits += 1
            else:
                counters.misses[self._why(request)] += 1
        request.cached += gained
        counters.hit_tokens += gained

    def _why(self, request: Request) -> Miss:
        limit = min(len(request.tokens) - 1, request.reusable)
        if not self.enabled or limit <= 0:
            return Miss.SKIPPED
        if limit < self._block_size:
            return Miss.TOO_SHORT
        root = self.tree.find_root(request.domain)
        first = digest_of(root.digest, key_of(request.tokens[: self._block_size]))
        return Miss.EVICTED if first in self._dropped else Miss.DIFFERS

    # -- eviction -------------------------------------------------------------------------------------------------

    def _drop_one(self) -> None:
        node = self._order.pop(self._is_droppable)
        counters = self.counters
        counters.evicted_blocks += 1
        counters.evicted_reused_blocks += node.hits > 0
        self._remember(node)
        parent = node.parent
        self.tree.remove(node)
        self.pool.drop(node.block)
        assert parent is not None
        if isinstance(parent, Root):
            self._forget(parent)
        else:
            self._offer(parent)

    def _remember(self, node: RadixNode) -> None:
        self._dropped[node.digest] = node.hits
        if len(self._dropped) > REMEMBERED * self.pool.num_blocks:
            self._dropped.popitem(last=False)

    def _offer(self, node: RadixNode) -> None:
        if self._is_droppable(node):
            self._order.offer(node)
            self._order.compact(self._is_droppable, 2 * self.pool.num_blocks)

    def _is_droppable(self, node: RadixNode) -> bool:
        """A leaf that no request needs. One that is being written may go: its block is free when that is done.

        It has to be possible, as the blocks above it are idle and count as available.
        """
        if node.children or self.tree.node_of(node.block) is not node:
            return False
        return self.pool.refs(node.block) == 1 + self.transfers.is_written(node.block)

    # -- who fills what -------------------------------------------------------------------------------------------

    def _settle(self, request: Request, node: RadixNode) -> None:
        request.node = node
        self._filling.setdefault(node, {})[request.id] = request

    def _leave(self, request: Request) -> None:
        assert request.node is not None
        others = self._filling[request.node]
        del others[request.id]
        if not others:
            del self._filling[request.node]
        request.node = None

    def _forget(self, root: Root) -> None:
        if not root.children and root not in self._filling:
            self.tree.forget_root(root)
