"""A stand-in for a model whose tokens depend on the whole prefix, and an executor that checks every slot it reads."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from potok.core.batch import Batch
from potok.core.radix import Domain
from potok.core.request import Request
from potok.core.scheduler import Scheduler

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


class Executor:
    """KV memory where each slot holds (position, prefix up to and with its token, token)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.salts: dict[int, str] = {}  # of requests, where they have one
        self.slots: dict[int, tuple[int, int, int]] = {}

    def run(self, batch: Batch) -> list[int]:
        """Sampled ids. Each segment reads [0, start) slot by slot: stale, foreign or missing KV raises."""
        size, slots = self.block_size, self.slots
        for source, target in batch.copies:
            for i in range(size):
                if source * size + i in slots:
                    slots[target * size + i] = slots[source * size + i]
        written: set[int] = set()
        sampled = []
        for segment in batch.segments:
            prefix = empty(self.salts.get(segment.id, ""))
            for p in range(segment.start):
                position, stored, token = slots[segment.blocks[p // size] * size + p % size]
                prefix = extend(prefix, token)
                assert (position, stored) == (p, prefix), f"request {segment.id} reads foreign KV at {p}"
            for p, token in enumerate(segment.tokens, segment.start):
                prefix = extend(prefix, token)
                slot = segment.blocks[p // size] * size + p % size
                assert slot not in written, f"request {segment.id} writes slot {slot}, which this step wrote already"
                written.add(slot)
                slots[slot] = (p, prefix, token)
            sampled += [RATED] * len(segment.rate)
            if segment.sample:
                sampled.append(model(prefix))
        return sampled


def request(id: int, prompt: Sequence[int], max_new: int, stop_ids: Iterable[int] = (), salt: str = "") -> Request:
    return Request(id, array("i", prompt), len(prompt), max_new, frozenset(stop_ids), Domain(salt=salt))


def step(scheduler: Scheduler, executor: Executor) -> Batch | None:
    batch = scheduler.schedule(0)
    if batch is not None:
        scheduler.commit(batch, executor.run(batch), 1)
    return batch
