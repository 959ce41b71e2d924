"""Kernels over one row: equal on every table, and near their float64 formulas."""

from __future__ import annotations

import numpy as np
import pytest

from potok._native import kernels, supported_isas

FAST = [isa for isa in supported_isas() if isa != "scalar"]
COLS = (32, 64, 576, 896, 2048)


def quantize(isa: str, x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    groups = len(x) // 32
    q = np.empty(len(x), np.int8 if bits == 8 else np.int16)
    d, s = np.empty(groups, np.float32), np.empty(groups, np.float32)
    sums = np.empty(groups, np.int32)
    (kernels.quantize_a8 if bits == 8 else kernels.quantize_a16)(isa, x, q, d, s, sums)
    assert (sums == q.reshape(groups, 32).sum(axis=1, dtype=np.int32)).all()
    return q, d, s


def define_quantize(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The definition of docs/numerics.md; 16-bit rows are stored in pair order 0 2 1 3."""
    groups = x.reshape(-1, 32)
    limit = np.float32(127 if bits == 8 else 32767)
    amax = np.abs(groups).max(axis=1)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 0, limit / amax, np.float32(0)).astype(np.float32)
    q = np.rint(groups * inverse[:, None]).astype(np.int32)
    d = (amax / limit).astype(np.float32)
    s = d * q.sum(axis=1).astype(np.float32)
    order = q.reshape(-1, 4)[:, [0, 2, 1, 3]] if bits == 16 else q
    return order.reshape(-1).astype(np.int8 if bits == 8 else np.int16), d, s


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("isa", supported_isas())
def test_quantisation_is_the_definition(isa: str, bits: int) -> None:
    rng = np.random.default_rng(bits)
    for cols in COLS:
        x = rng.standard_normal(cols, dtype=np.float32) * np.float32(10.0 ** rng.integers(-3, 4))
        x[:32] = 0
        for got, want in zip(quantize(isa, x, bits), define_quantize(x, bits), strict=True):
            assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("isa", supported_isas())
def test_rms_norm(isa: str) -> None:
    rng = np.random.default_rng(0)
    for cols in (*COLS, 40, 100):
        x, w = rng.standard_normal((2, cols), dtype=np.float32)
        out, scalar = np.empty((2, cols), np.float32)
        kernels.rms_norm(isa, x, w, 1e-5, out)
        kernels.rms_norm("scalar", x, w, 1e-5, scalar)
        assert out.tobytes() == scalar.tobytes()
        wide = x.astype(np.float64)
        np.testing.assert_allclose(out, wide / np.sqrt((wide**2).mean() + 1e-5) * w, rtol=1e-6)


@pytest.mark.parametrize("isa", supported_isas())
def test_swiglu(isa: str) -> None:
    rng = np.random.default_rng(0)
    for cols in (*COLS, 40):
        gate, up = rng.standard_normal((2, cols), dtype=np.float32) * np.float32(8)
        gate[:4] = [0, -200, 200, -0.0]
        out, scalar = np.empty((2, cols), np.float32)
        kernels.swiglu(isa, gate, up, out)
        kernels.swiglu("scalar", gate, up, scalar)
        assert out.tobytes() == scalar.tobytes()
        wide = gate.astype(np.float64)
        np.testing.assert_allclose(out, wide / (1 + np.exp(-wide)) * up, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("isa", supported_isas())
def test_rotation_and_the_cache_write(isa: str, halves: bool) -> None:
    heads, kv_heads, dim, rope_dim, block_size, slot = 6, 2, 64, 48, 32, 5
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((heads + 2 * kv_heads) * dim, dtype=np.float32)
    angles = rng.standard_normal(rope_dim // 2)
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)
    q = np.empty(heads * dim, np.float32)
    kv = np.zeros(kv_heads * 2 * block_size * dim, np.float16)
    kernels.rope_kv(isa, qkv, cos_sin, heads, kv_heads, block_size, slot, halves, q, kv.view(np.uint8))

    half = rope_dim // 2
    first = np.arange(half) if halves else 2 * np.arange(half)
    second = first + half if halves else first + 1
    x = qkv.reshape(-1, dim).astype(np.float64)
    want = x.copy()
    c, s = cos_sin[:half].astype(np.float64), cos_sin[half:].astype(np.float64)
    want[:, first] = x[:, first] * c - x[:, second] * s
    want[:, second] = x[:, first] * s + x[:, second] * c
    np.testing.assert_allclose(q.reshape(heads, dim), want[:heads] / 8, rtol=1e-5, atol=1e-6)
    stored = kv.reshape(kv_heads, 2, -1)
    keys = stored[:, 0].reshape(kv_heads, dim, block_size)
    values = stored[:, 1].reshape(kv_heads, block_size, dim)
    np.testing.assert_allclose(keys[:, :, slot], want[heads : heads + kv_heads], rtol=1e-3, atol=1e-6)
    assert (values[:, slot] == qkv.reshape(-1, dim)[heads + kv_heads :].astype(np.float16)).all()
    untouched = np.delete(np.arange(block_size), slot)
    assert not keys[:, :, untouched].any() and not values[:, untouched].any()


@pytest.mark.parametrize("isa", FAST)
def test_halves_round_alike(isa: str) -> None:
    """Every half, and floats between and around them, through the cache write of both tables."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)].astype(np.float32)
    between = np.nextafter(finite, np.float32(np.inf))
    midway = finite * np.float32(1 + 2.0**-11)
    floats = np.concatenate([finite, between, midway, [65519, 65520, 1e30, -1e30, 1e-8, 2.0**-25, 3 * 2.0**-26]])
    floats = floats[: len(floats) // 64 * 64].astype(np.float32)
    cos_sin = np.array([1, 0], np.float32)
    for row in floats.reshape(-1, 64):
        qkv = np.concatenate([row, row, row])
        stored = {}
        for table in (isa, "scalar"):
            q, kv = np.empty(64, np.float32), np.zeros(2 * 32 * 64, np.float16)
            kernels.rope_kv(table, qkv, cos_sin, 1, 1, 32, 0, False, q, kv.view(np.uint8))
            stored[table] = kv
        assert stored[isa].tobytes() == stored["scalar"].tobytes()
        with np.errstate(over="ignore"):
            assert stored[isa][32 * 64 :][:64].tobytes() == row.astype(np.float16).tobytes()


@pytest.mark.parametrize("isa", supported_isas())
def test_a_group_that_is_not_finite_says_so(isa: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for at in (0, 5, 15, 16, 17, 31):
            x = np.ones(64, np.float32)
            x[at] = bad
            for bits in (8, 16):
                q, d, s = quantize(isa, x, bits)
                assert np.isnan([d[0], s[0]]).all() and not q[:32].any()
                assert d[1] > 0 and s[1] == 32
