"""The second tier of the prefix cache: whole blocks in the slots of a file, found by the digest of their prefix.

Pure bookkeeping. What is in which slot, what is being read and written, and whether reading pays; the bytes are moved
elsewhere (potok.engine.tier_store), asked for by a Transfer and answered by a Done. A block is in the tier from the
moment that its write has succeeded until its slot is wanted for another, or reading it has failed once.

When no slot is free the block used longest ago goes. Using a prefix touches its blocks from the last to the first, so a
prefix loses its tail first here, too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

#: The estimate follows each measurement by an eighth, and one measurement counts as at most 8 times the estimate.
SMOOTHING = 8
OUTLIER = 8


class Kind(IntEnum):
    READ = 0  # from the slot into the block
    WRITE = 1  # from the block into the slot


class Transfer(NamedTuple):
    """One block to or from its slot. key: its own tokens, to be stored, or compared with those that are."""

    id: int
    kind: Kind
    block: int
    slot: int
    digest: bytes
    key: bytes


class Done(NamedTuple):
    """The end of a transfer. ok: all of it is there and was verified. us: how long it took, once it had begun."""

    id: int
    ok: bool
    us: int


@dataclass(slots=True)
class TierCounters:
    """Totals since the start, in blocks or as named."""

    read: int = 0
    written: int = 0
    failed: int = 0  # reads and writes
    hit_tokens: int = 0  # that requests need not compute because of a read
    given_up: int = 0  # requests that computed what took too long to read
    pauses: int = 0  # of writing, after failures in a row


class Tier:
    """found: what the slots hold already, used longest ago first. block_size: tokens of a block.

    read_us: first guess of the time to read a block. token_us: of the time to compute a token; 0: unknown.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        found: Iterable[tuple[bytes, int]] = (),
        *,
        read_us: float = 1000.0,
        token_us: float = 0.0,
    ) -> None:
        self.num_slots = num_slots
        self.counters = TierCounters()
        self.read_us = read_us
        self.token_us = token_us
        self._block_size = block_size
        self._slots: OrderedDict[bytes, int] = OrderedDict(found)  # what can be read; used longest ago first
        taken = set(self._slots.values())
        assert len(taken) == len(self._slots) and all(0 <= s < num_slots for s in taken), "slots that cannot be"
        self._free = [s for s in range(num_slots - 1, -1, -1) if s not in taken]
        self._writing: dict[bytes, int] = {}
        self._readers: Counter[int] = Counter()  # reads under way, by slot
        self._spoilt: set[int] = set()  # slots that are free once their last reader is done
        self.reads_under_way = 0
        self._transfers = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        """Whether the block can be read."""
        return digest in self._slots

    def is_writing(self, digest: bytes) -> bool:
        return digest in self._writing

    def touch(self, digest: bytes) -> None:
        """The block, which is in the tier, is wanted now."""
        self._slots.move_to_end(digest)

    # -- what pays ------------------------------------------------------------------------------------------------

    def pays(self, blocks: int, tokens: int) -> bool:
        """Whether reading `blocks`, after all reads under way, is faster than computing `tokens`."""
        return tokens > 0 and (self.token_us == 0 or self.wait_us(blocks) < tokens * self.token_us)

    def wait_us(self, blocks: int) -> float:
        """When so many more blocks will have been read, as an estimate, from now."""
        return (self.reads_under_way + blocks) * self.read_us

    def decline(self) -> None:
        """Reading did not pay. What is never tried is never measured, so the next one has better chances."""
        self.read_us -= self.read_us / SMOOTHING

    def give_up(self) -> None:
        """Somebody waited in vain for reads, which must be far slower than estimated."""
        self.read_us *= OUTLIER
        self.counters.given_up += 1

    def note_step(self, step_us: int, num_tokens: int) -> None:
        """A step of a block of tokens or more tells what prompts cost; one that only decodes does not."""
        if num_tokens >= self._block_size:
            measured = step_us / num_tokens
            self.token_us += (measured - self.token_us) / (SMOOTHING if self.token_us else 1)

    # -- transfers ------------------------------------------------------------------------------------------------

    def start_read(self, digest: bytes, block: int, key: bytes) -> Transfer:
        """The block is in the tier."""
        slot = self._slots[digest]
        self._readers[slot] += 1
        self.reads_under_way += 1
        return self._transfer(Kind.READ, block, slot, digest, key)

    def end_read(self, transfer: Transfer, ok: bool, us: int) -> None:
        """A block that could not be read as it was written is not in the tier any more."""
        slot = transfer.slot
        self._readers[slot] -= 1
        self.reads_under_way -= 1
        if ok:
            self.counters.read += 1
            self.read_us += (min(us, OUTLIER * max(1.0, self.read_us)) - self.read_us) / SMOOTHING
        else:
            self.counters.failed += 1
            if self._slots.get(transfer.digest) == slot:
                del self._slots[transfer.digest]
                self._spoilt.add(slot)
        if not self._readers[slot]:
            del self._readers[slot]
            if slot in self._spoilt:
                self._spoilt.remove(slot)
                self._free.append(slot)

    def start_write(self, digest: bytes, block: int, key: bytes) -> Transfer | None:
        """The block is not in the tier. None: every slot is being read or written."""
        assert digest not in self._slots and digest not in self._writing, "written already"
        slot = self._take_slot()
        if slot is None:
            return None
        self._writing[digest] = slot
        return self._transfer(Kind.WRITE, block, slot, digest, key)

    def end_write(self, transfer: Transfer, ok: bool) -> None:
        slot = self._writing.pop(transfer.digest)
        if ok:
            self.counters.written += 1
            self._slots[transfer.digest] = slot
        else:
            self.counters.failed += 1
            self._free.append(slot)

    def check(self) -> None:
        """Raises AssertionError unless every slot is exactly one of: free, readable, being written, spoilt."""
        places = [*self._free, *self._slots.values(), *self._writing.values(), *self._spoilt]
        assert sorted(places) == list(range(self.num_slots)), "a slot is lost, or used twice"
        assert self._spoilt <= self._readers.keys(), "a spoilt slot that nobody reads is not free"
        assert not self._readers.keys() & {*self._free, *self._writing.values()}, "a slot is read while it changes"

    def _transfer(self, kind: Kind, block: int, slot: int, digest: bytes, key: bytes) -> Transfer:
        self._transfers += 1
        return Transfer(self._transfers, kind, block, slot, digest, key)

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next((digest for digest, slot in self._slots.items() if slot not in self._readers), None)
        return None if oldest is None else self._slots.pop(oldest)
