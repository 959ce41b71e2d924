"""A store over plain memory, and the transfers that a test asks of it. As a program: writes until it is killed."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from potok.core.tier import Done, Kind, Transfer
from potok.engine.tier_store import TierStore

BLOCK = 8
KEY_BYTES = 4 * BLOCK
PAYLOAD = 10_000  # not a multiple of anything
STRIDE = 12_288


class Kit:
    """Blocks of memory and a store for them. Block 2 i is what is written, block 2 i + 1 what is read."""

    def __init__(
        self, folder: Path | str, *, slots: int = 8, fingerprint: str = "abc", blocks: int = 16, lock_seconds: float = 2
    ) -> None:
        self.memory = np.zeros((blocks, PAYLOAD), np.uint8)
        self.store = TierStore(
            str(folder),
            fingerprint,
            num_bytes=slots * STRIDE,
            key_bytes=KEY_BYTES,
            kv_block=lambda block: self.memory[block].data,
            lock_seconds=lock_seconds,
        )
        self._ids = 0

    def begin(self, kind: Kind, name: int, slot: int, block: int) -> int:
        self._ids += 1
        self.store.begin([Transfer(self._ids, kind, block, slot, digest(name), key(name))])
        return self._ids

    def write(self, name: int, slot: int) -> Done:
        self.memory[0] = payload(name)
        return self.wait([self.begin(Kind.WRITE, name, slot, 0)])[0]

    def read(self, name: int, slot: int) -> Done:
        """Checks that what is said to be there is there."""
        self.memory[1] = 0
        done = self.wait([self.begin(Kind.READ, name, slot, 1)])[0]
        if done.ok:
            assert np.array_equal(self.memory[1], payload(name)), "a wrong block"
        return done

    def wait(self, ids: Sequence[int]) -> list[Done]:
        done: list[Done] = []
        while len(done) < len(ids):
            done += self.store.end()
            time.sleep(0.0005)
        assert sorted(d.id for d in done) == sorted(ids)
        return done


def digest(name: int) -> bytes:
    return hashlib.blake2b(str(name).encode(), digest_size=16).digest()


def key(name: int) -> bytes:
    return name.to_bytes(KEY_BYTES, "big")


def payload(name: int) -> np.ndarray:
    return np.random.default_rng(name).integers(0, 256, PAYLOAD, np.uint8)


def write_for_ever(folder: str) -> None:
    """Overwrites 8 slots again and again."""
    kit = Kit(folder)
    name = 0
    while True:
        ids = []
        for i in range(4):
            kit.memory[i] = payload(name)
            ids.append(kit.begin(Kind.WRITE, name, name % 8, i))
            name += 1
        kit.wait(ids)
        print(name, flush=True)


if __name__ == "__main__":
    write_for_ever(sys.argv[1])
