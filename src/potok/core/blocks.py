"""Physical KV blocks: which are free, how many hold each of the others, and which are cached."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class BlockPool:
    """`num_blocks` blocks with reference counts. Knows nothing of tokens, requests or tensors.

    A block is free (count 0, on the free list) or held (count > 0). Several holders may share one block: whoever takes
    part adds one, and the block is free again when the last one lets go. The prefix cache is a holder like the
    others, but it holds nothing that anybody waits for: a block that it alone holds is idle, and may be dropped.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"a pool needs at least one block, not {num_blocks}"
        self._refs = [0] * num_blocks
        self._cached = bytearray(num_blocks)
        self._idle = 0
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
    def idle(self) -> int:
        """Blocks that the prefix cache alone holds."""
        return self._idle

    @property
    def available(self) -> int:
        """Blocks that can be had: free ones, and idle ones once they are dropped."""
        return len(self._free) + self._idle

    @property
    def used(self) -> int:
        """Blocks that somebody needs."""
        return len(self._refs) - self.available

    def refs(self, block: int) -> int:
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        return bool(self._cached[block])

    def is_idle(self, block: int) -> bool:
        return bool(self._cached[block]) and self._refs[block] == 1

    def alloc(self, n: int) -> array[int]:
        """`n` free blocks, each with count 1. The caller has made sure that there are so many."""
        assert 0 <= n <= len(self._free), f"{n} blocks wanted, {len(self._free)} free"
        start = len(self._free) - n
        out = array("i", self._free[start:])
        del self._free[start:]
        for block in out:
            self._refs[block] = 1
        return out

    def share(self, block: int) -> None:
        """Adds a holder to a block that is held."""
        assert self._refs[block] > 0, f"block {block} is free; it holds nothing to share"
        self._idle -= self.is_idle(block)
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Takes one from the count of each block; those that reach 0 are free."""
        refs, cached = self._refs, self._cached
        for block in blocks:
            assert refs[block] > cached[block], f"block {block} released more often than held"
            refs[block] -= 1
            if refs[block] == 0:
                self._free.append(block)
            elif refs[block] == 1 and cached[block]:
                self._idle += 1

    def cache(self, block: int) -> None:
        """The prefix cache becomes one more holder of a block that a request holds."""
        assert self._refs[block] > 0 and not self._cached[block], f"block {block} is free, or cached already"
        self._refs[block] += 1
        self._cached[block] = True

    def drop(self, block: int) -> None:
        """The prefix cache lets go of a block. An idle one is free then."""
        assert self._cached[block], f"block {block} is not cached"
        if self.is_idle(block):
            self._idle -= 1
            self._free.append(block)
        self._cached[block] = False
        self._refs[block] -= 1
