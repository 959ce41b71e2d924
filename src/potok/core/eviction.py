"""Which cached block goes first when blocks run short: the leaf whose prefix is least likely to be wanted again.

The value of a block is a clock plus what it has earned: 1 for having been computed, and REUSE for each time that its
prefix was hit, up to MOST_HITS. The clock is the value of the block that was dropped last. So of blocks that were used
equally often the one used longest ago goes first, as in least-recently-used; a prefix that h requests have shared
survives 1 + REUSE * h turnovers of the pool by prompts that nobody repeats; and no merit lasts for ever. (The scheme is
GreedyDual-Size-Frequency: Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
Policy", HP Labs 1998, with one size and one cost.)

Only leaves are dropped, so a prefix loses its tail first: what is left is still a prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from potok.core.radix import RadixNode

REUSE = 4
MOST_HITS = 16


class EvictionOrder:
    """A heap of (value, block, serial number, node) with stale entries, each found out when it comes to the top."""

    def __init__(self) -> None:
        self.clock = 0
        self._heap: list[tuple[int, int, int, RadixNode]] = []
        self._offers = 0

    def __len__(self) -> int:
        return len(self._heap)

    def touch(self, node: RadixNode, hits: int) -> None:
        """The block was computed (hits 0) or hit once more."""
        node.hits = min(MOST_HITS, node.hits + hits)
        node.value = self.clock + 1 + REUSE * node.hits

    def offer(self, node: RadixNode) -> None:
        """The node is a leaf that nobody needs now."""
        self._offers += 1
        heappush(self._heap, (node.value, node.block, self._offers, node))

    def pop(self, droppable: Callable[[RadixNode], bool]) -> RadixNode:
        """The next to go. There is one: whoever asks has counted the idle blocks."""
        while True:
            value, _, _, node = heappop(self._heap)
            if node.value == value and droppable(node):
                self.clock = value
                return node

    def holds(self, node: RadixNode) -> bool:
        return any(entry[3] is node and entry[0] == node.value for entry in self._heap)

    def compact(self, droppable: Callable[[RadixNode], bool], limit: int) -> None:
        """Throws stale entries away once there are more than `limit` in all."""
        if len(self._heap) > limit:
            live = {
                node.block: entry for entry in self._heap if entry[0] == (node := entry[3]).value and droppable(node)
            }
            self._heap = list(live.values())
            heapify(self._heap)
