"""One rounding means one: compared with exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from potok.backends.reference.arithmetic import fma, sum_lanes
from potok.backends.reference.linear import quantize


def rounded(value: Fraction) -> np.float32:
    """The nearest float32, ties to the even one."""
    guess = np.float32(float(value))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1))


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3000)).astype(np.float32)
    a[:500] *= np.float32(2.0**-140)  # results below the normal range
    c = (rng.standard_normal(3000) * 2.0 ** rng.integers(-30, 30, 3000)).astype(np.float32)
    c[:500] *= np.float32(2.0**-120)
    # Sums a hair beside the middle of two float32 numbers, so near that float64 holds the middle itself.
    scale = 2.0 ** rng.integers(-4, 4, 1000)
    a = np.concatenate([a, (scale * (1 + 2.0**-23)).astype(np.float32)])
    b = np.concatenate([b, (rng.choice([-1, 1], 1000) * (1 - 2.0**-23) * 2.0**-24).astype(np.float32)])
    c = np.concatenate([c, (scale * (1 + rng.integers(1, 2**23 - 1, 1000) * 2.0**-23)).astype(np.float32)])
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    got = fma(a, b, c)
    want = [
        rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    assert got.tobytes() == np.array(want, np.float32).tobytes()
    assert (twice != got).any(), "no case here needs the care that fma takes"


def test_fma_of_numbers_that_are_not_finite() -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    with np.errstate(invalid="ignore"):
        a, b, c = np.array([[inf, 2, 0], [0, inf, 1], [nan, 1, 1], [1, 1, -inf], [inf, 1, -inf]], np.float32).T
        assert np.array_equal(fma(a, b, c), np.array([inf, nan, nan, -inf, nan]), equal_nan=True)


def test_lanes_are_added_in_a_fixed_tree() -> None:
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    for row, total in zip(x, sum_lanes(x), strict=True):
        lanes = [np.float32(0)] * 16
        for i, v in enumerate(row):
            lanes[i % 16] += v
        for half in (8, 4, 2, 1):
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        assert lanes[0] == total


def test_activations_are_whole_numbers_within_half_a_step() -> None:
    x = np.random.default_rng(2).standard_normal((4, 96)).astype(np.float32) * np.float32(3)
    x[1, 32:64] = 0
    for limit in (127, 32767):
        q, d = quantize(x, limit)
        assert np.array_equal(q, np.rint(q)) and np.abs(q).max() == limit
        assert np.abs(q * d[..., None] - x.reshape(q.shape)).max() <= 0.5001 * d.max()
        assert d[1, 1] == 0 and not q[1, 1].any()
