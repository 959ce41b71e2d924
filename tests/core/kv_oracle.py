"""A stand-in for a model whose tokens depend on the whole prefix, and an executor that checks every slot it reads."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence

from potok.core.batch import Batch
from potok.core.radix import Domain
from potok.core.request import Request
from potok.core.scheduler import Scheduler
from potok.core.tier import Done, Kind, Transfer

VOCAB = 7
END = 6
RATED = 0  # the id that comes back for a row that rates; nobody looks at it


def extend(prefix: int, token: int) -> int:
    return hash((prefix, token))


def model(prefix: int) -> int:
    """The next token after a prefix; few ids, so that end ids are met and prompts share prefixes."""
    return (prefix >> 3) % VOCAB


def empty(salt: str) -> int:
    """The prefix of no tokens. Salted ones differ, as if the salt changed the model, so that KV may not be mixed."""
    return sum(map(ord, salt))


def answer(
    prompt: Iterable[int], max_new: int, stop_ids: frozenset[int], max_model_len: int, salt: str = ""
) -> list[int]:
    """The tokens of the request alone."""
    prefix, length = empty(salt), 0
    for token in prompt:
        prefix, length = extend(prefix, token), length + 1
    out: list[int] = []
    while True:
        token = model(prefix)
        out.append(token)
        prefix, length = extend(prefix, token), length + 1
        if token in stop_ids or len(out) >= max_new or length >= max_model_len:
            return out


#: Position, prefix up to and with its token, token.
Slot = tuple[int, int, int]


class Executor:
    """KV memory of slots by number."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.salts: dict[int, str] = {}  # of requests, where they have one
        self.ghosts: set[int] = set()  # requests that have ended: what they write must be there already
        self.slots: dict[int, Slot] = {}
        self.reading: set[int] = set()  # blocks under transfer, and what they are for
        self.writing: set[int] = set()

    def run(self, batch: Batch) -> list[int]:
        """Sampled ids. Each segment reads [0, start) slot by slot: stale, foreign or missing KV raises."""
        size, slots = self.block_size, self.slots
        for source, target in batch.copies:
            assert source not in self.reading and target not in self.reading | self.writing
            for i in range(size):
                if source * size + i in slots:
                    slots[target * size + i] = slots[source * size + i]
        written: set[int] = set()
        sampled = []
        for segment in batch.segments:
            prefix = empty(self.salts.get(segment.id, ""))
            assert self.reading.isdisjoint(segment.blocks), f"request {segment.id} uses a block that is being read"
            for p in range(segment.start):
                position, stored, token = slots[segment.blocks[p // size] * size + p % size]
                prefix = extend(prefix, token)
                assert (position, stored) == (p, prefix), f"request {segment.id} reads foreign KV at {p}"
            for p, token in enumerate(segment.tokens, segment.start):
                prefix = extend(prefix, token)
                slot = segment.blocks[p // size] * size + p % size
                if segment.id in self.ghosts:
                    assert slots[slot] == (p, prefix, token), f"ghost {segment.id} changes slot {slot}"
                    continue
                assert slot // size not in self.writing, f"request {segment.id} writes a block that is being stored"
                assert slot not in written, f"request {segment.id} writes slot {slot}, which this step wrote already"
                written.add(slot)
                slots[slot] = (p, prefix, token)
            sampled += [RATED] * len(segment.rate)
            if segment.sample:
                sampled.append(model(prefix))
        return sampled


class Disk:
    """The second tier's slots. Transfers end late, in any order, some badly; what is read badly is garbage.

    failing: how often. Of the transfers under way each ends with probability `speed` when asked.
    """

    def __init__(self, rng: random.Random, *, failing: float = 0.0, speed: float = 1.0, us: int = 10) -> None:
        self.rng, self.failing, self.speed, self.us = rng, failing, speed, us
        self.stored: dict[int, tuple[bytes, bytes, list[Slot]]] = {}
        self.under_way: list[tuple[Transfer, list[Slot]]] = []

    def begin(self, executor: Executor, transfers: Iterable[Transfer]) -> None:
        for t in transfers:
            kept: list[Slot] = []
            if t.kind is Kind.WRITE:
                kept = self._block(executor, t.block)
                executor.writing.add(t.block)
                self.stored.pop(t.slot, None)
            else:
                assert t.block not in executor.reading | executor.writing, "two transfers into one block"
                executor.reading.add(t.block)
            self.under_way.append((t, kept))

    def end(self, executor: Executor) -> list[Done]:
        done, left = [], []
        self.rng.shuffle(self.under_way)
        for t, kept in self.under_way:
            if self.rng.random() >= self.speed:
                left.append((t, kept))
                continue
            ok = self.rng.random() >= self.failing
            if t.kind is Kind.WRITE:
                assert kept == self._block(executor, t.block), "a block changed while it was stored"
                executor.writing.remove(t.block)
                if ok:
                    self.stored[t.slot] = (t.digest, t.key, kept)
            else:
                executor.reading.remove(t.block)
                digest, key, slots = self.stored.get(t.slot, (b"", b"", []))
                ok = ok and (digest, key) == (t.digest, t.key)
                for i in range(executor.block_size):
                    executor.slots[t.block * executor.block_size + i] = slots[i] if ok else (-1, -1, -1)
            done.append(Done(t.id, ok, self.us))
        self.under_way = left
        return done

    def _block(self, executor: Executor, block: int) -> list[Slot]:
        size = executor.block_size
        return [executor.slots[block * size + i] for i in range(size)]

    def found(self) -> list[tuple[bytes, int]]:
        """What a restart finds."""
        return [(digest, slot) for slot, (digest, _, _) in self.stored.items()]


def request(id: int, prompt: Sequence[int], max_new: int, stop_ids: Iterable[int] = (), salt: str = "") -> Request:
    return Request(id, array("i", prompt), len(prompt), max_new, frozenset(stop_ids), Domain(salt=salt))


def step(scheduler: Scheduler, executor: Executor) -> Batch | None:
    batch = scheduler.schedule(0)
    if batch is not None:
        scheduler.commit(batch, executor.run(batch), 1)
    return batch
