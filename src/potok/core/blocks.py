"""Physical KV blocks: which are free, and how many hold each of the others."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class BlockPool:
    """`num_blocks` blocks with reference counts. Knows nothing of tokens, requests or tensors.

    A block is free (count 0, on the free list) or held (count > 0). The count is what lets several holders share one
    block: whoever takes part adds one, and the block is free again when the last one lets go.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"a pool needs at least one block, not {num_blocks}"
        self._refs = [0] * num_blocks
        self._free = list(
            range(num_blocks - 1, -1, -1)
        )  # a stack: the block freed last is still warm in the CPU's caches

    @property
    def num_blocks(self) -> int:
        return len(self._refs)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._refs) - len(self._free)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def alloc(self, n: int) -> array[int]:
        """`n` free blocks, each with count 1. The caller has made sure that there are so many."""
        assert 0 <= n <= len(self._free), f"{n} blocks wanted, {len(self._free)} free"
        start = len(self._free) - n
        out = array("i", self._free[start:])
        del self._free[start:]
        for block in out:
            self._refs[block] = 1
        return out

    def release(self, blocks: Iterable[int]) -> None:
        """Takes one from the count of each block; those that reach 0 are free."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} released more often than held"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)
