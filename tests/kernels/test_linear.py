"""Linears: every table equals the scalar one bit by bit, and all stay near the float64 product of the real weights."""

from __future__ import annotations

import numpy as np
import pytest

from potok._native import kernels, supported_isas
from potok.weights.formats import FORMATS, dequantize

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
ACT_F32, ACT_A8, ACT_A16 = 0, 1, 2
COMBINATIONS = [(F32, ACT_F32), (F16, ACT_F32), (Q4_1, ACT_A8), (Q4_1, ACT_A16), (Q8_0, ACT_A16)]
FAST = [isa for isa in supported_isas() if isa != "scalar"]


def random_weight(rng: np.random.Generator, source: int, n: int, k: int) -> np.ndarray:
    """uint8 [n, row bytes]: random values, random quants, scales near 0.01."""
    if source == F32:
        return rng.standard_normal((n, k), dtype=np.float32).view(np.uint8)
    if source == F16:
        return rng.standard_normal((n, k), dtype=np.float32).astype(np.float16).view(np.uint8)
    format = FORMATS[source]
    blocks = rng.integers(0, 256, (n, k // 32, format.qblock_bytes), dtype=np.uint8)
    num_scales = 2 if source == Q4_1 else 1
    scales = (0.01 * rng.standard_normal((n, k // 32, num_scales))).astype(np.float16)
    blocks[:, :, : 2 * num_scales] = scales.view(np.uint8)
    return blocks.reshape(n, -1)


def run(isa: str, source: int, act: int, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    kernels.linear(isa, source, act, weight, x, out)
    return out


@pytest.mark.parametrize(("source", "act"), COMBINATIONS)
@pytest.mark.parametrize("isa", FAST)
def test_equals_scalar_bit_by_bit(isa: str, source: int, act: int) -> None:
    rng = np.random.default_rng(source * 10 + act)
    for n, k in [(16, 32), (48, 64), (64, 576), (1000, 96), (7, 1536), (33, 2048)]:
        weight = random_weight(rng, source, n, k)
        for rows in (1, 2, 3, 4, 5, 9, 32):
            if rows * n * k > 4_000_000:
                continue
            x = rng.standard_normal((rows, k), dtype=np.float32)
            assert run(isa, source, act, weight, x).tobytes() == run("scalar", source, act, weight, x).tobytes()


@pytest.mark.parametrize(("source", "act"), COMBINATIONS)
@pytest.mark.parametrize("isa", supported_isas())
def test_a_row_never_depends_on_its_neighbours(isa: str, source: int, act: int) -> None:
    rng = np.random.default_rng(1)
    weight = random_weight(rng, source, 80, 160)
    x = rng.standard_normal((13, 160), dtype=np.float32)
    together = run(isa, source, act, weight, x)
    for i in range(len(x)):
        assert run(isa, source, act, weight, x[i : i + 1]).tobytes() == together[i].tobytes()


@pytest.mark.parametrize(("source", "act"), COMBINATIONS)
@pytest.mark.parametrize("isa", supported_isas())
def test_near_the_float64_product(isa: str, source: int, act: int) -> None:
    """Relative to the norm of the row: rounding 32 activations to 8 bits costs under 1.5e-2, to 16 bits under 2e-4."""
    rng = np.random.default_rng(2)
    weight = random_weight(rng, source, 64, 576)
    x = rng.standard_normal((5, 576), dtype=np.float32)
    exact = x.astype(np.float64) @ dequantize(FORMATS[source], weight).astype(np.float64).T
    error = np.linalg.norm(run(isa, source, act, weight, x) - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert error.max() < {ACT_F32: 1e-6, ACT_A8: 1.5e-2, ACT_A16: 2e-4}[act]


@pytest.mark.parametrize(("source", "act"), COMBINATIONS[2:])
@pytest.mark.parametrize("isa", FAST)
def test_extreme_quants_do_not_overflow(isa: str, source: int, act: int) -> None:
    format = FORMATS[source]
    k, n = 64, 16
    x = np.ones((4, k), np.float32) * np.array([[1], [-1], [1], [-1]], np.float32)
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        blocks = np.full((n, k // 32, format.qblock_bytes), fill, np.uint8)
        blocks[:, :, :2] = np.array([1], np.float16).view(np.uint8)
        if source == Q4_1:
            blocks[:, :, 2:4] = 0
        weight = blocks.reshape(n, -1)
        got = run(isa, source, act, weight, x)
        assert got.tobytes() == run("scalar", source, act, weight, x).tobytes()
        exact = x.astype(np.float64) @ dequantize(format, weight).astype(np.float64).T
        np.testing.assert_allclose(got, exact, rtol=1e-5)


@pytest.mark.parametrize(("source", "act"), COMBINATIONS)
@pytest.mark.parametrize("isa", FAST)
def test_random_bytes_equal_scalar(isa: str, source: int, act: int) -> None:
    """Any bits may stand in a file: infinite, NaN and subnormal scales included. Payloads of NaN may differ."""
    rng = np.random.default_rng(3)
    k, n = 64, 48
    row_bytes = FORMATS[source].nbytes(k)
    weight = rng.integers(0, 256, (n, row_bytes), dtype=np.uint8)
    x = rng.standard_normal((6, k), dtype=np.float32)
    np.testing.assert_array_equal(run(isa, source, act, weight, x), run("scalar", source, act, weight, x))
