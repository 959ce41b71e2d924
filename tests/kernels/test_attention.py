"""Attention over paged KV: equal bits for every table, block size, block order and chunking; near float64."""

from __future__ import annotations

import numpy as np
import pytest

from potok._native import kernels, supported_isas

FAST = [isa for isa in supported_isas() if isa != "scalar"]


class Sequence:
    """Keys and values of one sequence, laid out in blocks on demand."""

    def __init__(self, length: int, kv_heads: int, dim: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.length, self.kv_heads, self.dim = length, kv_heads, dim
        self.k, self.v = rng.standard_normal((2, length, kv_heads, dim)).astype(np.float16)

    def paged(self, block_size: int, seed: int, dtype: type = np.float16) -> tuple[np.ndarray, np.ndarray]:
        """(kv [blocks, stride], table): blocks in random places, every slot that is not the sequence's is NaN."""
        num = -(-self.length // block_size)
        table = np.random.default_rng(seed).permutation(num + 3)[:num].astype(np.int32)
        kv = np.full((num + 3, self.kv_heads, 2 * block_size * self.dim), np.nan, dtype)
        for t in range(self.length):
            block, slot = table[t // block_size], t % block_size
            for h in range(self.kv_heads):
                area = kv[block, h]
                area[: self.dim * block_size].reshape(self.dim, block_size)[:, slot] = self.k[t, h]
                area[self.dim * block_size :].reshape(block_size, self.dim)[slot] = self.v[t, h]
        return kv.reshape(num + 3, -1).view(np.uint8), table


def attend(
    isa: str, seq: Sequence, q: np.ndarray, position: int, block_size: int = 32, rows_per_task: int = 16, seed: int = 0
) -> np.ndarray:
    kv, table = seq.paged(block_size, seed)
    out = np.full_like(q, np.nan)
    kernels.attention(isa, q, kv, table, seq.kv_heads, seq.dim, block_size, position, out, rows_per_task)
    return out


def define(seq: Sequence, q: np.ndarray, position: int) -> np.ndarray:
    heads = q.shape[1] // seq.dim
    out = np.empty(q.shape)
    for r, row in enumerate(q.astype(np.float64).reshape(len(q), heads, seq.dim)):
        n = position + r + 1
        for h in range(heads):
            g = h * seq.kv_heads // heads
            s = seq.k[:n, g].astype(np.float64) @ row[h]
            p = np.exp(s - s.max())
            out[r, h * seq.dim : (h + 1) * seq.dim] = p @ seq.v[:n, g].astype(np.float64) / p.sum()
    return out


def queries(rows: int, heads: int, dim: int) -> np.ndarray:
    return np.random.default_rng(rows + heads).standard_normal((rows, heads * dim), dtype=np.float32) / 8


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("isa", supported_isas())
def test_near_float64_for_every_group_size(isa: str, group: int) -> None:
    for dim in (64, 80, 128):
        seq = Sequence(150, 2, dim, seed=group)
        for first, rows in ((0, 21), (63, 2), (149, 1)):
            q = queries(rows, 2 * group, dim)
            np.testing.assert_allclose(attend(isa, seq, q, first), define(seq, q, first), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("isa", supported_isas())
def test_long_context_merges_segments(isa: str) -> None:
    seq = Sequence(1300, 1, 64, seed=9)
    for first, rows in ((505, 12), (1290, 10), (1023, 3)):
        q = queries(rows, 3, 64)
        np.testing.assert_allclose(attend(isa, seq, q, first), define(seq, q, first), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_equals_scalar_bit_by_bit(isa: str, block_size: int) -> None:
    for group in (1, 3, 5, 7):
        seq = Sequence(200, 2, 64, seed=group)
        for first, rows in ((0, 40), (100, 17), (199, 1)):
            q = queries(rows, 2 * group, 64)
            fast = attend(isa, seq, q, first, block_size)
            assert np.isfinite(fast).all()
            assert fast.tobytes() == attend("scalar", seq, q, first, block_size).tobytes()


@pytest.mark.parametrize("isa", supported_isas())
def test_block_size_order_and_chunks_do_not_show(isa: str) -> None:
    seq = Sequence(580, 1, 64, seed=3)
    q = queries(580, 3, 64)
    whole = attend(isa, seq, q, 0)
    for block_size in (16, 32, 64):
        assert attend(isa, seq, q, 0, block_size, seed=block_size).tobytes() == whole.tobytes()
    for chunk in (1, 5, 16, 64):
        begin = 0 if isa != "scalar" else 480
        for first in range(begin, 580, chunk):
            part = attend(isa, seq, q[first : first + chunk], first, rows_per_task=7)
            assert part.tobytes() == whole[first : first + chunk].tobytes()


@pytest.mark.parametrize("isa", supported_isas())
def test_float32_storage_of_the_same_values_gives_the_same_bits(isa: str) -> None:
    seq = Sequence(200, 2, 64, seed=4)
    q = queries(9, 6, 64)
    kv, table = seq.paged(32, seed=0, dtype=np.float32)
    out = np.full_like(q, np.nan)
    kernels.attention(isa, q, kv, table, 2, 64, 32, 191, out, 16, kv_type=1)
    assert out.tobytes() == attend(isa, seq, q, 191).tobytes()
