"""Float32 arithmetic as docs/numerics.md means it. Every function works element by element: no row sees another.

numpy rounds +, -, *, / and sqrt of float32 correctly, so only what numpy lacks is here.
"""

from __future__ import annotations

import numpy as np

from potok.sampling.rows import F32, F64

LANES = 16

#: The bits of a float64 that float32 has no room for, and their pattern in the middle between two float32 numbers.
BELOW_F32, MIDDLE = 0x1FFF_FFFF, 0x1000_0000
SUBNORMAL = 2.0**-126


def fma(a: F32, b: F32, c: F32) -> F32:
    """a * b + c with one rounding, shapes broadcast.

    float64 holds the product exactly but rounds the sum. Rounding that to float32 errs only if it lies in the middle
    of two float32 numbers and the true sum beside it; float32 numbers below 2^-126 have their middles elsewhere.
    """
    product = a.astype(np.float64) * b
    total = np.asarray(product + c)
    unsure = (total.view(np.int64) & BELOW_F32 == MIDDLE) | (np.abs(total) < SUBNORMAL)
    if unsure.any():
        addends = (np.broadcast_to(x, total.shape)[unsure] for x in (product, c))
        total[unsure] = _sum_to_odd(*addends)
    return total.astype(np.float32)


def _sum_to_odd(a: F64, b: F32) -> F64:
    """a + b; where float64 cannot hold it, of its two neighbours the one whose last bit is 1: never a middle."""
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)  # exactly what rounding took away
    bits = total.view(np.int64)
    odd = np.where((error > 0) == (total > 0), bits + 1, bits - 1)
    inexact = (np.abs(error) > 0) & (bits & 1 == 0)
    return np.where(inexact, odd, bits).view(np.float64)


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
