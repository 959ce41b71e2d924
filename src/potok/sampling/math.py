"""exp and log in float32 as the kernels compute them (csrc/kernels/math.inl): polynomials, no fma, no libm."""

from __future__ import annotations

import numpy as np

from potok.sampling.rows import F32

#: ln 2 in two parts. The first has 9 bits, so a whole number up to 2^15 times it is exact.
LN2_HIGH = np.float32(float.fromhex("0x1.63p-1"))
LN2_LOW = np.float32(float.fromhex("-0x1.bd0106p-13"))
LOG2_E = np.float32(float.fromhex("0x1.715476p+0"))

#: Adding and subtracting it rounds a float32 to a whole number, ties to even.
ROUND = np.float32(float.fromhex("0x1.8p23"))

EXP_UNDERFLOW = np.float32(-87.3)

#: exp(r) = 1 + r + r^2 P(r) for |r| <= ln 2 / 2; highest power first.
EXP_P = tuple(
    np.float32(float.fromhex(c))
    for c in ("0x1.6a524ep-10", "0x1.12396ep-7", "0x1.5558aap-5", "0x1.555492p-3", "0x1.fffffcp-2")
)

#: log(1 + f) = f - f^2 / 2 + f^3 Q(f) for sqrt(1/2) <= 1 + f < sqrt(2); highest power first.
LOG_Q = tuple(
    np.float32(float.fromhex(c))
    for c in (
        "-0x1.38c97ep-4",
        "0x1.055ebp-3",
        "-0x1.0d8246p-3",
        "0x1.22d93p-3",
        "-0x1.54728ap-3",
        "0x1.99a01cp-3",
        "-0x1.000226p-2",
        "0x1.555554p-2",
    )
)

SQRT_HALF_BITS = 0x3F3504F3


def exp_f32(x: F32) -> F32:
    """e^x for x <= 88: 0 below -87.3, exactly 1 at 0, NaN for NaN; relative error below 1e-7; never falls as x rises.

    x and the result: float32 of any shape.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # far below the range, where the result is 0 anyway
        n = (x * LOG2_E + ROUND) - ROUND
        n = np.where(n > -126, n, np.float32(-126))
        r = (x - n * LN2_HIGH) - n * LN2_LOW
        p = np.full_like(r, EXP_P[0])
        for c in EXP_P[1:]:
            p = p * r + c
        p = (p * (r * r) + r) + np.float32(1)
        power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
        result: F32 = np.where(x < EXP_UNDERFLOW, np.float32(0), p * power)
    return result


def log_f32(x: F32) -> F32:
    """ln x for normal x > 0; relative error below 2e-7. x and the result: float32 of any shape."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    whole = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (whole << 23)).view(np.float32) - np.float32(1)
    e = whole.astype(np.float32)
    square = f * f
    q = np.full_like(f, LOG_Q[0])
    for c in LOG_Q[1:]:
        q = q * f + c
    q = q * f * square
    q = q + e * LN2_LOW
    q = q - square * np.float32(0.5)
    result: F32 = (f + q) + e * LN2_HIGH
    return result
