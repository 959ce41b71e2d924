"""Attention over paged KV: equal bits for every table, block size, block order, chunking, sharing; near float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from potok._native import kernels, supported_isas

FAST = [isa for isa in supported_isas() if isa != "scalar"]
F16, F32, I8 = 0, 1, 2
DTYPES = [np.float16, np.float32, np.int8]


class Sequence:
    """Keys and values of one sequence: in float16, and other ones in int8 with scales. Begins like `prefix`."""

    def __init__(self, length: int, kv_heads: int, dim: int, seed: int, prefix: Sequence | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.length, self.kv_heads, self.dim = length, kv_heads, dim
        self.k, self.v = rng.standard_normal((2, length, kv_heads, dim)).astype(np.float16)
        self.bytes = rng.integers(-127, 128, (2, length, kv_heads, dim)).astype(np.int8)
        self.scales = rng.uniform(0.004, 0.012, (2, length, kv_heads)).astype(np.float32)
        if prefix is not None:
            n = min(length, prefix.length)
            self.k[:n], self.v[:n] = prefix.k[:n], prefix.v[:n]
            self.bytes[:, :n], self.scales[:, :n] = prefix.bytes[:, :n], prefix.scales[:, :n]

    def until(self, length: int) -> Sequence:
        """The same sequence when it had `length` tokens."""
        return Sequence(length, self.kv_heads, self.dim, 0, prefix=self)

    def write(self, area: np.ndarray, slot: int, token: int, head: int, block_size: int, kv_type: int) -> None:
        """Into one head of one block: K [dim, block_size], V [block_size, dim], then the scales of both."""
        elements = self.dim * block_size
        dtype = DTYPES[kv_type]
        values = area[: 2 * elements * np.dtype(dtype).itemsize].view(dtype)
        k, v = self.bytes[:, token, head] if kv_type == I8 else (self.k[token, head], self.v[token, head])
        values[:elements].reshape(self.dim, block_size)[:, slot] = k
        values[elements:].reshape(block_size, self.dim)[slot] = v
        if kv_type == I8:
            area[2 * elements :].view(np.float32).reshape(2, block_size)[:, slot] = self.scales[:, token, head]


@dataclass(frozen=True)
class Part:
    """The last `rows` tokens of a sequence are computed; its first `shares` tokens lie in the blocks of part `of`."""

    seq: Sequence
    rows: int = 1
    of: int = 0
    shares: int = 0


@dataclass(frozen=True)
class Done:
    """out: [rows, heads * dim]. tiles: visited by all tasks of one KV head. ahead: tasks that worked ahead."""

    out: np.ndarray
    tiles: int
    ahead: int


def attend_step(
    isa: str,
    parts: list[Part],
    q: np.ndarray,
    block_size: int = 32,
    kv_type: int = F16,
    threads: int = 1,
    *,
    shared: bool = True,
) -> Done:
    """One step of all parts, cut as for `threads`. Blocks lie in random places; slots that nobody wrote hold NaN."""
    kv_heads, dim = parts[0].seq.kv_heads, parts[0].seq.dim
    counts = [-(-p.seq.length // block_size) for p in parts]
    order = np.random.default_rng(block_size).permutation(sum(counts) + 3).astype(np.int32)
    kv = np.full((len(order), kv_heads, 2 * block_size * (dim * DTYPES[kv_type]().nbytes + 4 * (kv_type == I8))), 0xFF)
    kv = kv.astype(np.uint8)
    tables: list[np.ndarray] = []
    kv_indptr = indptr_of(counts)
    for i, p in enumerate(parts):
        table = order[kv_indptr[i] : kv_indptr[i + 1]].copy()
        own = p.shares // block_size if shared else 0
        if own:
            table[:own] = tables[p.of][:own]
        for t in range(own * block_size, p.seq.length):
            for h in range(kv_heads):
                p.seq.write(kv[table[t // block_size], h], t % block_size, t, h, block_size, kv_type)
        tables.append(table)
    q_indptr = indptr_of([p.rows for p in parts])
    positions = np.concatenate([np.arange(p.seq.length - p.rows, p.seq.length) for p in parts]).astype(np.int32)
    out = np.full_like(q, np.nan)
    step = q_indptr, positions, kv_indptr, np.concatenate(tables)
    kv = kv.reshape(len(order), -1)
    tiles, ahead = kernels.attention(
        isa, q, kv, *step, kv_heads, dim, block_size, out, kv_type=kv_type, threads=threads
    )
    assert np.isfinite(out).all()
    return Done(out, tiles, ahead)


def indptr_of(counts: list[int]) -> np.ndarray:
    return np.cumsum([0, *counts]).astype(np.int32)


def attend(
    isa: str, seq: Sequence, q: np.ndarray, first: int, block_size: int = 32, threads: int = 1, kv_type: int = F16
) -> np.ndarray:
    """Rows q at positions from `first` on, alone."""
    part = Part(seq.until(first + len(q)), len(q))
    return attend_step(isa, [part], q, block_size, kv_type, threads).out


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
@pytest.mark.parametrize("kv_type", [F16, F32, I8])
def test_equals_scalar_bit_by_bit(isa: str, block_size: int, kv_type: int) -> None:
    for group, dim in ((1, 64), (3, 64), (5, 16), (7, 80), (2, 256)):
        seq = Sequence(200, 2, dim, seed=group)
        for first, rows in ((0, 40), (100, 17), (199, 1)):
            q = queries(rows, 2 * group, dim)
            fast = attend(isa, seq, q, first, block_size, kv_type=kv_type)
            assert np.isfinite(fast).all()
            assert fast.tobytes() == attend("scalar", seq, q, first, block_size, kv_type=kv_type).tobytes()


@pytest.mark.parametrize("isa", supported_isas())
def test_block_size_and_chunks_do_not_show(isa: str) -> None:
    seq = Sequence(580, 1, 64, seed=3)
    q = queries(580, 3, 64)
    whole = attend(isa, seq, q, 0)
    for block_size in (16, 64):
        assert attend(isa, seq, q, 0, block_size).tobytes() == whole.tobytes()
    for chunk in (1, 5, 16, 64):
        begin = 0 if isa != "scalar" and chunk > 1 else 500
        for first in range(begin, 580, chunk):
            part = attend(isa, seq, q[first : first + chunk], first, threads=chunk)
            assert part.tobytes() == whole[first : first + chunk].tobytes()


@pytest.mark.parametrize("isa", supported_isas())
def test_float32_storage_of_the_same_values_gives_the_same_bits(isa: str) -> None:
    seq = Sequence(200, 2, 64, seed=4)
    q = queries(9, 6, 64)
    assert attend(isa, seq, q, 191, kv_type=F32).tobytes() == attend(isa, seq, q, 191).tobytes()


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("kv_type", [F16, F32, I8])
def test_a_context_visited_by_several_tasks(isa: str, kv_type: int) -> None:
    """A few rows are split where there is nothing else to do; a prompt of many rows never is."""
    seq = Sequence(1500, 1, 16, seed=5)
    q = queries(100, 3, 16)
    prompt = attend_step(isa, [Part(seq, 100)], q, kv_type=kv_type)
    assert prompt.ahead == 0
    for rows, threads in ((1, 1), (1, 64), (3, 2), (8, 16)):
        few = attend_step(isa, [Part(seq, rows)], q[-rows:], kv_type=kv_type, threads=threads)
        assert few.ahead == 3
        assert few.out.tobytes() == prompt.out[-rows:].tobytes()


def family(prefix: int, lengths: list[int], rows: list[int], kv_heads: int = 1, dim: int = 16) -> list[Part]:
    """Sequences that share their first `prefix` tokens, whole blocks of 64 of them in memory."""
    first = Sequence(lengths[0], kv_heads, dim, seed=prefix)
    parts = [Part(first, rows[0])]
    for i in range(1, len(lengths)):
        seq = Sequence(lengths[i], kv_heads, dim, seed=i, prefix=first.until(prefix))
        parts.append(Part(seq, rows[i % len(rows)], 0, prefix // 64 * 64))
    return parts


def queries_of(parts: list[Part], group: int) -> np.ndarray:
    return queries(sum(p.rows for p in parts), group * parts[0].seq.kv_heads, parts[0].seq.dim)


@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_a_shared_prefix_is_visited_once(isa: str, group: int, block_size: int) -> None:
    for dim, kv_type in ((16, F16), (64, I8), (80, F32), (256, F16)):
        parts = family(150, [170, 200, 155, 300, 151], [1, 2], 2, dim)
        q = queries_of(parts, group)
        shared = attend_step(isa, parts, q, block_size, kv_type)
        copies = attend_step(isa, parts, q, block_size, kv_type, shared=False)
        assert (copies.ahead, shared.ahead) == (0, 1)
        assert copies.tiles - shared.tiles == 4 * (150 // 64)
        assert shared.out.tobytes() == copies.out.tobytes()
        assert shared.out.tobytes() == attend_step("scalar", parts, q, block_size, kv_type).out.tobytes()


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("threads", [1, 2, 6])
@pytest.mark.parametrize("prefix", [64, 500, 512, 600, 1100])
def test_prefixes_of_any_length_among_prompts_and_strangers(isa: str, threads: int, prefix: int) -> None:
    rows = [1, 1, 2, 1, 5, 40]  # the 40 rows are too many to be worth it, or just not, as the threads have it
    parts = family(prefix, [prefix + n for n in (41, 30, 90, 1, 65, 140)], rows)
    parts += [Part(Sequence(n, 1, 16, seed=n), min(n, 7)) for n in (1, 64, 130)]
    q = queries_of(parts, 3)
    shared = attend_step(isa, parts, q, threads=threads)
    copies = attend_step(isa, parts, q, threads=threads, shared=False)
    assert shared.tiles < copies.tiles
    assert shared.out.tobytes() == copies.out.tobytes()


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize(("system", "topic"), [(576, 640), (576, 1100), (1024, 1300), (64, 128)])
def test_prefixes_within_prefixes(isa: str, system: int, topic: int) -> None:
    """Nine requests share a system prompt, and five of them more than that; two of those still more."""
    parts = family(system, [system + 80] * 4 + [topic + 300], [1])
    leader = len(parts) - 1
    for i in range(4):
        same = topic + 192 if i == 3 else topic
        seq = Sequence(topic + 200 + 9 * i, 1, 16, seed=50 + i, prefix=parts[leader].seq.until(same))
        parts.append(Part(seq, 1, leader, same // 64 * 64))
    q = queries_of(parts, 3)
    shared = attend_step(isa, parts, q, threads=2)
    copies = attend_step(isa, parts, q, threads=2, shared=False)
    # All nine visit the system prompt at once, and the five their topic.
    saved = 8 * (system // 64) + 4 * ((topic - system) // 64)
    again = system % 512 // 64  # the five begin with a segment of 512
    assert copies.tiles - shared.tiles >= saved - again
    assert shared.out.tobytes() == copies.out.tobytes()
