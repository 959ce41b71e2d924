"""Float32 arithmetic as docs/numerics.md means it. Every function works element by element: no row sees another.

numpy rounds +, -, *, / and sqrt of float32 correctly, so only what numpy lacks is here.
"""

from __future__ import annotations

import numpy as np

from potok.sampling.rows import F32, F64

LANES = 16


def fma(a: F32, b: F32, c: F32) -> F32:
    """a * b + c with one rounding, shapes broadcast.

    float64 holds the product exactly, but its sum with c is rounded, and rounding that again to float32 could err in a
    tie. So the sum is rounded to odd first: where it is not exact, its last bit is made 1 by moving towards the truth.
    """
    product = a.astype(np.float64) * b
    total = np.asarray(product + c)
    error = _error(product, c.astype(np.float64), total)
    bits = total.view(np.int64)
    away_from_zero = (error > 0) == (total > 0)
    odd = np.where(away_from_zero, bits + 1, bits - 1)
    inexact = (np.abs(error) > 0) & (bits & 1 == 0)  # false where the sum is not finite
    return np.where(inexact, odd, bits).view(np.float64).astype(np.float32)


def _error(a: F64, b: F64, total: F64) -> F64:
    """(a + b) - total, exactly."""
    b_part = total - a
    return (a - (total - b_part)) + (b - b_part)


def sum_lanes(x: F32) -> F32:
    """[..., n] -> [...]: 16 running sums over n, then halves are added until one is left. n is a multiple of 16."""
    rows = x.reshape(*x.shape[:-1], -1, LANES)
    lanes = rows[..., 0, :]
    for i in range(1, rows.shape[-2]):
        lanes = lanes + rows[..., i, :]
    return sum_tree(lanes)


def sum_tree(lanes: F32) -> F32:
    """[..., 16] -> [...]: ((0 + 8) + (4 + 12)) + ..."""
    half = LANES // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half:]
        half //= 2
    return lanes[..., 0]
