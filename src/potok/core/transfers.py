"""What is under way between the pool and the second tier: for whom it is read, and what is to be written.

Each transfer holds its block like any other holder until it is done, whoever else lets go of it meanwhile. So a request
whose blocks are being read may be cancelled, preempted or given up at any time: nothing else gets a block that is still
being written to, and nothing waits for a device that does not answer but the blocks themselves.

**Reads.** All blocks that a request wants are asked for at once; it runs, but takes part in no step until the last has
come, and then has the tokens of those before the first that failed. One that waits for longer than PATIENCE times what
was estimated is given up. Nobody else reads while a read that was given up is under way.

**Writes** are behind: the blocks of a request that ends or is preempted are noted, and written a few at a time while
they are still cached. A noted block is not held, so it may be dropped before its turn; that costs speed only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from potok.core.blocks import BlockPool
from potok.core.radix import BYTES, RadixNode, RadixTree, digest_of, key_of
from potok.core.request import Request
from potok.core.tier import Done, Kind, Tier, Transfer

#: A request waits for its reads so many times as long as estimated, and at least so long.
PATIENCE = 4
LEAST_PATIENCE_US = 200_000
#: How soon to look again for ends of reads, which somebody waits for, and of writes.
READS_EVERY_US = 1_000
WRITES_EVERY_US = 10_000
#: Writes under way at most; in small pools an eighth of the blocks.
MOST_WRITES = 16
#: After so many failed writes in a row nothing is written for a while: the device is full, or gone.
FAILURES = 4
PAUSE_US = 30_000_000
BY_END = attrgetter("end")


@dataclass(slots=True)
class Load:
    """Reads for one request. start: its tokens before them. good: blocks before the first that failed."""

    request: Request
    start: int
    deadline_us: int
    good: int
    left: dict[int, int] = field(default_factory=dict)  # transfers under way -> which of the blocks


class Transfers:
    """num_slots of the tier may be 0: then nothing is ever found, and nothing written."""

    def __init__(self, tier: Tier, pool: BlockPool, tree: RadixTree, block_size: int) -> None:
        self.tier = tier
        self._pool = pool
        self._tree = tree
        self._block_size = block_size
        self._most_writes = max(1, min(MOST_WRITES, pool.num_blocks // 8))
        self._under_way: dict[int, Transfer] = {}
        self._fresh: list[Transfer] = []  # of those under way, the ones that nobody was told of yet
        self._loads: dict[int, Load] = {}  # by request
        self._awaited: dict[int, Load] = {}  # by read: the others under way were given up
        self._noted: OrderedDict[bytes, int] = OrderedDict()  # blocks to be written, by digest
        self._written: dict[int, RadixNode] = {}  # blocks whose writes are under way
        self._failures = 0  # in a row, of writes
        self._paused_until_us = 0
        self._now_us = 0

    def under_way(self) -> Iterator[Transfer]:
        return iter(self._under_way.values())

    def loads(self) -> Iterator[Load]:
        return iter(self._loads.values())

    def take(self) -> list[Transfer]:
        """Transfers to begin now; their ends are told to `end`, in any order."""
        self._start_writes()
        fresh, self._fresh = self._fresh, []
        return fresh

    def wake_at(self) -> int | None:
        """When to ask for ends, and to begin what is noted, if nothing else happens."""
        if not self._under_way and not self._noted:
            return None
        return self._now_us + (READS_EVERY_US if self._loads else WRITES_EVERY_US)

    # -- reads ----------------------------------------------------------------------------------------------------

    def find(self, node: RadixNode, rest: bytes) -> Sequence[bytes]:
        """Digests of the whole blocks with which the tier goes on after `node`. rest: the tokens that follow it."""
        found: list[bytes] = []
        if not len(self.tier):
            return found
        digest, width = node.digest, self._block_size * BYTES
        for at in range(0, len(rest) - width + 1, width):
            digest = digest_of(digest, rest[at : at + width])
            if digest not in self.tier:
                break
            found.append(digest)
        return found

    def pays(self, blocks: int, tokens: int) -> bool:
        return not self._is_stuck() and self.tier.pays(blocks, tokens)

    def decline(self) -> None:
        """A request joined that found blocks which did not pay to be read."""
        if not self._is_stuck():
            self.tier.decline()

    def _is_stuck(self) -> bool:
        """Whether reads are under way that were given up."""
        return self.tier.reads_under_way > len(self._awaited)

    def read(self, request: Request, start: int, digests: Sequence[bytes]) -> None:
        """Begins to read the request's whole blocks that follow its first `start` tokens."""
        size, first = self._block_size, start // self._block_size
        patience_us = max(LEAST_PATIENCE_US, int(PATIENCE * self.tier.wait_us(len(digests))))
        load = Load(request, start, self._now_us + patience_us, len(digests))
        for i, digest in enumerate(digests):
            block = request.blocks[first + i]
            key = key_of(request.tokens[start + i * size : start + (i + 1) * size])
            id = self._begin(self.tier.start_read(digest, block, key))
            load.left[id] = i
            self._awaited[id] = load
        for digest in reversed(digests):
            self.tier.touch(digest)
        self._loads[request.id] = load
        request.loading = True

    def late(self, now_us: int) -> list[Request]:
        """Those whose reads have taken too long. now_us: the time from here on."""
        self._now_us = now_us
        if not self._loads:
            return []
        return [load.request for load in self._loads.values() if now_us >= load.deadline_us]

    def leave(self, request: Request) -> Load | None:
        """The request waits no longer. Its reads go on, and hold their blocks. Returns what it waited for."""
        request.loading = False
        load = self._loads.pop(request.id, None)
        if load is not None:
            for id in load.left:
                del self._awaited[id]
        return load

    # -- writes ---------------------------------------------------------------------------------------------------

    def is_written(self, block: int) -> bool:
        """Whether a write of the block is under way."""
        return block in self._written

    def note(self, node: RadixNode) -> None:
        """A request that used the prefix up to `node` has let go of it."""
        if not self.tier.num_slots:
            return
        path = list(node.path())
        self._use(path)
        if self._now_us < self._paused_until_us:
            return
        for above in reversed(path):
            if above.digest not in self.tier and len(self._noted) < self._pool.num_blocks:
                self._noted.setdefault(above.digest, above.block)

    def _start_writes(self) -> None:
        tier = self.tier
        while self._noted and len(self._written) < self._most_writes:
            digest, block = self._noted.popitem(last=False)
            node = self._tree.node_of(block)
            if node is None or node.digest != digest or digest in tier or tier.is_writing(digest):
                continue
            transfer = tier.start_write(digest, block, node.key)
            if transfer is None:
                return
            self._begin(transfer)
            self._written[block] = node

    def _use(self, nodes: Iterable[RadixNode]) -> None:
        """Their blocks are those used last, the heads of prefixes after the tails."""
        for node in sorted(nodes, key=BY_END, reverse=True):
            if node.digest in self.tier:
                self.tier.touch(node.digest)

    # -- both -----------------------------------------------------------------------------------------------------

    def end(self, done: Iterable[Done]) -> tuple[array[int], list[Load]]:
        """Blocks that are no longer held by a transfer, each to be released once; and loads with all their reads."""
        blocks, complete = array("i"), []
        written: dict[RadixNode, None] = {}  # and all above them; ordered, since a set of objects is not
        for id, ok, us in done:
            transfer = self._under_way.pop(id)
            blocks.append(transfer.block)
            if transfer.kind is Kind.WRITE:
                self.tier.end_write(transfer, ok)
                self._note_failure(ok)
                for node in self._written.pop(transfer.block).path():
                    if node in written:
                        break
                    written[node] = None
                continue
            self.tier.end_read(transfer, ok, us)
            load = self._awaited.pop(id, None)
            if load is None:
                continue
            i = load.left.pop(id)
            if not ok:
                load.good = min(load.good, i)
            if not load.left:
                complete.append(load)
        self._use(written)
        return blocks, complete

    def _note_failure(self, ok: bool) -> None:
        self._failures = 0 if ok else self._failures + 1
        if self._failures >= FAILURES:
            self._failures = 0
            self._paused_until_us = self._now_us + PAUSE_US
            self._noted.clear()
            self.tier.counters.pauses += 1

    def _begin(self, transfer: Transfer) -> int:
        self._pool.share(transfer.block)
        self._under_way[transfer.id] = transfer
        self._fresh.append(transfer)
        return transfer.id
