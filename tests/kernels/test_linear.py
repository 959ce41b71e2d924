"""Linears: every table equals the scalar one bit by bit, and all stay near the float64 product of the real weights."""

from __future__ import annotations

import numpy as np
import pytest
from make_model import BY_NAME, random_rows

from potok._native import kernels, supported_isas
from potok.backends.native.weights import PACKED
from potok.model.precision import INTEGER_FORMATS
from potok.weights.formats import Format, dequantize
from potok.weights.rewritten import REWRITTEN, rewritten

ACT_F32, ACT_A8, ACT_A16 = 0, 1, 2
#: Of rewritten formats one for each form that they are packed in.
FORMS = [name for name in PACKED if name not in REWRITTEN or name in ("IQ2_XS", "IQ3_S", "TQ1_0", "Q8_1")]
COMBINATIONS = [
    (name, act)
    for name in FORMS
    for act in (
        (ACT_F32,) if name not in INTEGER_FORMATS else (ACT_A16,) if INTEGER_FORMATS[name] == 8 else (ACT_A8, ACT_A16)
    )
]
FAST = [isa for isa in supported_isas() if isa != "scalar"]


def shapes(format: Format) -> list[tuple[int, int]]:
    if format.qblock_elements == 256:
        return [(16, 256), (48, 512), (33, 2048), (7, 768)]
    return [(16, 32), (48, 64), (64, 576), (1000, 96), (7, 1536), (33, 2048)]


def random_weight(rng: np.random.Generator, format: Format, n: int, k: int) -> np.ndarray:
    """uint8 [n, row bytes] with values of a usual size."""
    return random_rows(format, n, k, 0.05, rng)


def run(isa: str, name: str, act: int, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    target, packable = rewritten(BY_NAME[name], weight)
    kernels.linear(isa, target.id, act, packable, x, out)
    return out


@pytest.mark.parametrize(("name", "act"), COMBINATIONS)
@pytest.mark.parametrize("isa", FAST)
def test_equals_scalar_bit_by_bit(isa: str, name: str, act: int) -> None:
    rng = np.random.default_rng(act)
    for n, k in shapes(BY_NAME[name]):
        weight = random_weight(rng, BY_NAME[name], n, k)
        for rows in (1, 2, 3, 4, 5, 9, 12, 32, 133):
            if rows * n * k > 1_000_000:
                continue
            x = rng.standard_normal((rows, k), dtype=np.float32)
            assert run(isa, name, act, weight, x).tobytes() == run("scalar", name, act, weight, x).tobytes()


@pytest.mark.parametrize(("name", "act"), COMBINATIONS)
@pytest.mark.parametrize("isa", FAST)
def test_every_division_into_tiles_equals_scalar(isa: str, name: str, act: int) -> None:
    rng = np.random.default_rng(4)
    weight = random_weight(rng, BY_NAME[name], 20, 256)
    x = rng.standard_normal((27, 256), dtype=np.float32)
    whole = run("scalar", name, act, weight, x)
    for rows in range(1, len(x) + 1):
        assert run(isa, name, act, weight, x[:rows]).tobytes() == whole[:rows].tobytes()


@pytest.mark.parametrize(("name", "act"), COMBINATIONS)
@pytest.mark.parametrize("isa", FAST)
def test_row_counts_around_a_tile_of_16_equal_scalar(isa: str, name: str, act: int) -> None:
    """AMX unpacks a panel for 128 rows, and at most 32 (A8) or 8 (A16) groups of it at a time."""
    rng = np.random.default_rng(5)
    large = BY_NAME[name].qblock_elements == 256
    for k in (256, 1280) if large else (32, 64, 288, 1056):
        weight = random_weight(rng, BY_NAME[name], 17, k)
        x = rng.standard_normal((130, k), dtype=np.float32)
        whole = run("scalar", name, act, weight, x)
        for rows in (15, 16, 17, 20, 31, 32, 33, 48, 100, 130):
            assert run(isa, name, act, weight, x[:rows]).tobytes() == whole[:rows].tobytes()


@pytest.mark.parametrize(("name", "act"), COMBINATIONS)
@pytest.mark.parametrize("isa", supported_isas())
def test_a_row_never_depends_on_its_neighbours(isa: str, name: str, act: int) -> None:
    rng = np.random.default_rng(1)
    weight = random_weight(rng, BY_NAME[name], 48, 256)
    x = rng.standard_normal((21, 256), dtype=np.float32)
    together = run(isa, name, act, weight, x)
    for i in range(len(x)):
        assert run(isa, name, act, weight, x[i : i + 1]).tobytes() == together[i].tobytes()


@pytest.mark.parametrize(("name", "act"), COMBINATIONS)
@pytest.mark.parametrize("isa", supported_isas())
def test_near_the_float64_product(isa: str, name: str, act: int) -> None:
    """Relative to the norm of the row: rounding 32 activations to 8 bits costs under 1.5e-2, to 16 bits under 2e-4."""
    rng = np.random.default_rng(2)
    weight = random_weight(rng, BY_NAME[name], 64, 512)
    x = rng.standard_normal((5, 512), dtype=np.float32)
    exact = x.astype(np.float64) @ dequantize(BY_NAME[name], weight).astype(np.float64).T
    error = np.linalg.norm(run(isa, name, act, weight, x) - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert error.max() < {ACT_F32: 1e-6, ACT_A8: 1.5e-2, ACT_A16: 2e-4}[act]


@pytest.mark.parametrize(("name", "act"), [c for c in COMBINATIONS if c[1] != ACT_F32])
@pytest.mark.parametrize("isa", FAST)
def test_extreme_levels_do_not_overflow(isa: str, name: str, act: int) -> None:
    """Largest activations of either sign against the smallest and largest bytes, scale 1 where the type has a half."""
    format = BY_NAME[name]
    k = 512
    x = np.ones((18, k), np.float32) * np.array([[1], [-1]] * 9, np.float32)
    half_at = {"Q6_K": 208, "Q3_K": 108, "Q2_K": 80, "TQ1_0": 52}.get(name, 0)
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        qblocks = np.full((16, k // format.qblock_elements, format.qblock_bytes), fill, np.uint8)
        qblocks[:, :, half_at : half_at + 2] = np.array([1], np.float16).view(np.uint8)
        if name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"):
            qblocks[:, :, half_at + 2 : half_at + 4] = 0
        weight = qblocks.reshape(16, -1)
        got = run(isa, name, act, weight, x)
        assert got.tobytes() == run("scalar", name, act, weight, x).tobytes()
        exact = x.astype(np.float64) @ dequantize(format, weight).astype(np.float64).T
        np.testing.assert_allclose(got, exact, rtol=1e-5)


@pytest.mark.parametrize(("name", "act"), COMBINATIONS)
@pytest.mark.parametrize("isa", FAST)
def test_random_bytes_equal_scalar(isa: str, name: str, act: int) -> None:
    """Any bits may stand in a file: infinite, NaN and subnormal scales included. Payloads of NaN may differ."""
    rng = np.random.default_rng(3)
    k, n = 256, 48
    weight = rng.integers(0, 256, (n, BY_NAME[name].nbytes(k)), dtype=np.uint8)
    x = rng.standard_normal((22, k), dtype=np.float32)
    np.testing.assert_array_equal(run(isa, name, act, weight, x), run("scalar", name, act, weight, x))
