"""Requests whose block tables begin with the same blocks: the logits of each are those it has alone."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
from make_model import make_model

from potok.backends.inputs import pack
from potok.backends.native.backend import NativeBackend
from potok.core.batch import Batch, Segment
from potok.protocol import Sampling
from potok.sampling.state import RowState, build_rows
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config

GREEDY = Sampling(logit_hash=True)
NUM_BLOCKS = 1500
CONTEXT = 2048


class Tables:
    """A backend whose block tables the test writes itself. Blocks are given out once, and hold NaN before."""

    def __init__(self, model: Path, threads: int, block_size: int, kv_dtype: str) -> None:
        file = GGUFFile.open(model)
        self.config = read_config(file)
        self.block_size = block_size
        self.backend = NativeBackend(
            file, self.config, threads=threads, activation_bits=8, block_size=block_size, kv_dtype=kv_dtype
        )
        self.backend.allocate(NUM_BLOCKS, CONTEXT)
        self.backend.poison(np.arange(NUM_BLOCKS, dtype=np.int32))
        self._free = np.random.default_rng(block_size).permutation(NUM_BLOCKS).tolist()

    def table(self, tokens: int, shared: list[int]) -> list[int]:
        """Blocks for so many tokens, the first of them those of `shared`."""
        return shared + [self._free.pop() for _ in range(-(-tokens // self.block_size) - len(shared))]

    def step(self, segments: list[tuple[list[int], int, list[int]]]) -> list[int]:
        """Hashes of the logits after each (all tokens, how many of them are computed already, block table)."""
        batch = Batch(0, tuple(Segment(i, n, ids[n:], table, True) for i, (ids, n, table) in enumerate(segments)))
        states = [RowState(GREEDY, ids) for ids, _, _ in segments]
        rows = build_rows(states, array("i", [len(ids) for ids, _, _ in segments]), True)
        hashes = self.backend.step(pack(batch, self.block_size), rows).hashes
        assert hashes is not None
        return [int(h) for h in hashes]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model.gguf", "tiny-llama", None)


@pytest.mark.parametrize(("threads", "block_size", "kv_dtype"), [(1, 32, "f16"), (2, 16, "int8"), (6, 64, "f16")])
@pytest.mark.parametrize(("system", "topic"), [(64, 192), (320, 576), (600, 1100)])
def test_hashes_are_those_alone(
    model: Path, threads: int, block_size: int, kv_dtype: str, system: int, topic: int
) -> None:
    """Eight requests share a system prompt, four of them a topic; some decode, some still read their own tokens."""
    together, alone = (Tables(model, n, block_size, kv_dtype) for n in (threads, 1))
    rng = np.random.default_rng(system)
    vocab = together.config.vocab_size

    def draw(count: int) -> list[int]:
        return [int(i) for i in rng.integers(0, vocab, count)]

    def own(prefix: list[int], count: int) -> list[int]:
        return prefix + draw(count)

    shared = draw(system)
    deeper = own(shared, topic - system)
    prompts = [own(deeper if i % 2 else shared, 70 + 13 * i) for i in range(8)]

    # The first of each kind computes the blocks that all others hold after it.
    tables = [together.table(len(prompts[0]) + 2, [])]
    together.step([(prompts[0], 0, tables[0])])
    tables.append(together.table(len(prompts[1]) + 2, tables[0][: system // block_size]))
    together.step([(prompts[1], system // block_size * block_size, tables[1])])
    common = [(topic if i % 2 else system) // block_size for i in range(8)]
    for i in range(2, 8):
        tables.append(together.table(len(prompts[i]) + 2, tables[i % 2][: common[i]]))
    done = [len(p) - 1 if i < 2 else common[i] * block_size for i, p in enumerate(prompts)]
    # One step in which two decode and six read what is their own, then one in which all decode.
    first = together.step(list(zip(prompts, done, tables, strict=True)))
    longer = [[*p, 7 + i] for i, p in enumerate(prompts)]
    second = together.step([(p, len(p) - 1, table) for p, table in zip(longer, tables, strict=True)])

    for i, p in enumerate(longer):
        table = alone.table(len(p), [])
        assert alone.step([(p[:-1], 0, table)]) == [first[i]]
        assert alone.step([(p, len(p) - 1, table)]) == [second[i]]
