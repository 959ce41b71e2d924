"""What decoders of tensor formats are written with: fields of bytes, and the parts of quantised values.

A decoder takes n qblocks, uint8 [n, qblock_bytes], and stands under a drawing of their bytes; "half" is IEEE float16,
everything is little endian. Arithmetic is float32, rounded once per operation in the order written: every reader of a
file gets the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
F32 = npt.NDArray[np.float32]


class Parts(NamedTuple):
    """Quantised values as what they are made of: value = scale * level (+ minimum), rounded after each operation.

    levels: int8 [n, g, e], g groups of e values each. scales: float32 [n, g]. minimums: float32 [n, g], or None.
    """

    levels: I8
    scales: F32
    minimums: F32 | None = None


def single(levels: npt.NDArray[Any], scale: F32, minimum: F32 | None = None) -> Parts:
    """Parts of a format whose qblock is one group: levels [n, e], scale and minimum [n, 1]."""
    return Parts(levels[:, None, :].astype(np.int8), scale, minimum)


def signed(levels: npt.NDArray[Any], zero_point: int) -> I8:
    return (levels.astype(np.int16) - zero_point).astype(np.int8)


def f32(q: U8) -> F32:
    return np.ascontiguousarray(q).view("<f4").astype(np.float32)


def f16(q: U8) -> F32:
    return np.ascontiguousarray(q).view("<f2").astype(np.float32)


def bf16(q: U8) -> F32:
    high = np.ascontiguousarray(q).view("<u2").astype(np.uint32)
    return (high << np.uint32(16)).view(np.float32)


def half(qblocks: U8, at: int) -> F32:
    """The half at byte `at` of every qblock, as float32 [n, 1]."""
    return f16(qblocks[:, at : at + 2])


def u16(q: U8) -> npt.NDArray[np.uint16]:
    """[n, 2m] -> [n, m]."""
    return np.ascontiguousarray(q).view("<u2")


def fields(packed: U8, bits: int) -> U8:
    """Cuts bytes into fields of `bits` bits: [..., b] -> [..., 8 / bits, b], the lowest bits of all bytes first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    cut: U8 = np.bitwise_and(packed[..., None, :] >> shifts, 2**bits - 1, dtype=np.uint8)
    return cut


def in_place(packed: U8, bits: int) -> U8:
    """The same, those of a byte side by side, the lowest first: [n, b] -> [n, 8 / bits * b]."""
    return fields(packed, bits).swapaxes(-1, -2).reshape(*packed.shape[:-1], -1)


def nibbles(packed: U8) -> U8:
    """[..., b] -> [..., 2b]: all low nibbles, then all high ones."""
    return fields(packed, 4).reshape(*packed.shape[:-1], -1)


def planes(packed: U8, bits: int) -> U8:
    """Fields of K formats: [n, 32 * s] -> [n, s * 8 / bits, 32], for every 32 bytes all their lowest fields first."""
    return fields(packed.reshape(len(packed), -1, 32), bits).reshape(len(packed), -1, 32)


def each_bit(packed: U8) -> U8:
    """[..., b] -> [..., 8b] of 0 or 1, the lowest of each byte first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")
