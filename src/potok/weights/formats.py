"""Tensor formats of GGUF files: sizes of all of them, and exact float32 values of those that potok computes with.

A format cuts a row into qblocks of `qblock_elements` values stored in `qblock_bytes` bytes; decoders of qblocks are
written as bits.py says. Formats whose levels stand in codebooks: codebooks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from potok.errors import LoadError
from potok.weights import codebooks
from potok.weights.bits import (
    F32,
    U8,
    Parts,
    bf16,
    each_bit,
    f16,
    f32,
    fields,
    half,
    in_place,
    nibbles,
    planes,
    signed,
    single,
)


@dataclass(frozen=True, slots=True)
class Format:
    id: int
    name: str
    qblock_elements: int
    qblock_bytes: int

    @property
    def has_values(self) -> bool:
        """Whether `dequantize` knows the format; the others are only measured and listed."""
        return self.id in _FLOATS or self.id in _QUANTISED

    @property
    def has_codebook(self) -> bool:
        """Whether its values are known only where codebooks.installed()."""
        return self.name.startswith(("IQ1", "IQ2", "IQ3"))

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` values; elements is a multiple of qblock_elements."""
        return elements // self.qblock_elements * self.qblock_bytes


def parts(format: Format, data: U8) -> Parts:
    """Of uint8 [rows, row_bytes], in a quantised format: n = rows, and the groups of a whole row."""
    assert format.id in _QUANTISED, f"{format.name} has no parts"
    rows = len(data)
    with np.errstate(invalid="ignore", over="ignore"):
        levels, scales, minimums = _QUANTISED[format.id](np.ascontiguousarray(data).reshape(-1, format.qblock_bytes))
    return Parts(
        levels.reshape(rows, -1, levels.shape[-1]),
        scales.reshape(rows, -1),
        None if minimums is None else minimums.reshape(rows, -1),
    )


def dequantize(format: Format, data: U8) -> F32:
    """Values of `data`: uint8 [..., row_bytes] -> float32 [..., row_elements]. Row bytes hold whole qblocks."""
    if not format.has_values:
        raise LoadError(f"tensor format {format.name} is not supported: use one of {supported_formats()}.")
    rows, row_bytes = data.shape[:-1], data.shape[-1]
    qblocks = np.ascontiguousarray(data).reshape(-1, format.qblock_bytes)
    # A damaged scale may be inf or NaN; its products are then NaN by definition, not a warning.
    with np.errstate(invalid="ignore", over="ignore"):
        if format.id in _FLOATS:
            values = _FLOATS[format.id](qblocks)
        else:
            levels, scales, minimums = _QUANTISED[format.id](qblocks)
            values = scales[:, :, None] * levels.astype(np.float32)
            if minimums is not None:
                values += minimums[:, :, None]
    return values.reshape(*rows, row_bytes // format.qblock_bytes * format.qblock_elements)


def supported_formats() -> str:
    return ", ".join(format.name for format in FORMATS.values() if format.has_values)


# d half | 16 bytes of nibbles
def _q4_0(q: U8) -> Parts:
    return single(signed(nibbles(q[:, 2:18]), 8), half(q, 0))


# d half | m half | 16 bytes of nibbles
def _q4_1(q: U8) -> Parts:
    return single(nibbles(q[:, 4:20]), half(q, 0), half(q, 2))


# d half | fifth bits, 32 | 16 bytes of nibbles
def _q5_0(q: U8) -> Parts:
    return single(signed(nibbles(q[:, 6:22]) | each_bit(q[:, 2:6]) << 4, 16), half(q, 0))


# d half | m half | fifth bits, 32 | 16 bytes of nibbles
def _q5_1(q: U8) -> Parts:
    return single(nibbles(q[:, 8:24]) | each_bit(q[:, 4:8]) << 4, half(q, 0), half(q, 2))


# d half | 32 signed bytes
def _q8_0(q: U8) -> Parts:
    return single(q[:, 2:34].view(np.int8), half(q, 0))


# 16 x (scale nibble, minimum nibble) | 64 bytes of 2-bit levels | d half | dmin half; groups of 16
def _q2_k(q: U8) -> Parts:
    scales = q[:, :16]
    d = half(q, 80) * (scales & 15).astype(np.float32)
    m = half(q, 82) * (scales >> 4).astype(np.float32)
    return Parts(planes(q[:, 16:80], 2).reshape(-1, 16, 16).astype(np.int8), d, -m)


# 32 bytes of third bits | 64 bytes of 2-bit levels | 12 bytes of scales | d half; groups of 16
def _q3_k(q: U8) -> Parts:
    low = nibbles(q[:, 96:104])
    high = fields(q[:, 104:108], 2).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32) - np.float32(32)
    levels = planes(q[:, 32:96], 2) | planes(q[:, :32], 1) << 2
    return Parts(signed(levels, 4).reshape(-1, 16, 16), half(q, 108) * scales)


def _scales_and_minimums(packed: U8) -> tuple[F32, F32]:
    """12 bytes that hold 8 six-bit scales and 8 six-bit minimums -> two arrays [n, 8]."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1)
    minimums = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _with_minimums(q: U8, levels: npt.NDArray[Any]) -> Parts:
    """d half | dmin half | 12 bytes of scales and minimums | ...; levels: [n, 8, 32]."""
    scales, minimums = _scales_and_minimums(q[:, 4:16])
    return Parts(levels.astype(np.int8), half(q, 0) * scales, -(half(q, 2) * minimums))


# ... | 128 bytes of nibbles; groups of 32
def _q4_k(q: U8) -> Parts:
    return _with_minimums(q, planes(q[:, 16:144], 4))


# ... | 32 bytes of fifth bits | 128 bytes of nibbles; groups of 32
def _q5_k(q: U8) -> Parts:
    return _with_minimums(q, planes(q[:, 48:176], 4) | planes(q[:, 16:48], 1) << 4)


# 128 bytes of nibbles | 64 bytes of upper 2 bits | 16 signed scales | d half; groups of 16
def _q6_k(q: U8) -> Parts:
    low = nibbles(q[:, :128].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    levels = low | planes(q[:, 128:192], 2).reshape(-1, 16, 16) << 4
    d = half(q, 208) * q[:, 192:208].view(np.int8).astype(np.float32)
    return Parts(signed(levels, 32), d)


_IQ4_LEVELS = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
_IQ4_LEVELS.flags.writeable = False


# d half | 16 bytes of nibbles
def _iq4_nl(q: U8) -> Parts:
    return single(_IQ4_LEVELS[nibbles(q[:, 2:18])], half(q, 0))


# d half | upper 2 bits of 8 scales | lower nibbles of 8 scales | 8 x 16 bytes of nibbles; groups of 32
def _iq4_xs(q: U8) -> Parts:
    low = in_place(q[:, 4:8], 4)
    high = in_place(q[:, 2:4], 2)
    d = half(q, 0) * ((low | high << 4).astype(np.float32) - np.float32(32))
    return Parts(_IQ4_LEVELS[nibbles(q[:, 8:136].reshape(-1, 8, 16))], d)


# d half | d * sum of the levels, half | 32 signed bytes
def _q8_1(q: U8) -> Parts:
    return single(q[:, 4:36].view(np.int8), half(q, 0))


# d float32 | 256 signed bytes | sums of 16 levels; one group
def _q8_k(q: U8) -> Parts:
    return single(q[:, 4:260].view(np.int8), f32(q[:, :4]))


# d half | a bit an element, set where it is d and not -d; one group
def _q1_0(q: U8) -> Parts:
    return single(2 * each_bit(q[:, 2:18]).astype(np.int8) - 1, half(q, 0))


def _digits(packed: U8, count: int) -> U8:
    """Numbers in base 3, `count` digits a byte: [n, b] -> [n, count * b], the first digits of all bytes first.

    A byte is the fraction 0.ddddd times 256, rounded up: times 3, its next digit is what passes 256.
    """
    moved = packed[:, None, :] * np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    digits: U8 = (moved.astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return digits.reshape(len(packed), -1)


# 32 bytes of five digits | 16 bytes of five | 4 bytes of four | d half; one group
def _tq1_0(q: U8) -> Parts:
    digits = np.concatenate([_digits(q[:, :32], 5), _digits(q[:, 32:48], 5), _digits(q[:, 48:52], 4)], axis=1)
    return single(signed(digits, 1), half(q, 52))


# 64 bytes of 2-bit levels | d half; one group
def _tq2_0(q: U8) -> Parts:
    return single(signed(planes(q[:, :64], 2).reshape(-1, 256), 1), half(q, 64))


#: Of four bits: sign, exponent of 2 bits, fraction of one; twice the value, which is whole.
E2M1_LEVELS = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
E2M1_LEVELS.flags.writeable = False


# exponent byte | 16 bytes of nibbles; the scale is 2^(exponent - 127), halved, of 255 too, which elsewhere means NaN
def _mxfp4(q: U8) -> Parts:
    return single(E2M1_LEVELS[nibbles(q[:, 1:17])], np.ldexp(np.float32(1), q[:, :1].astype(np.int32) - 128))


def _e4m3(q: U8) -> F32:
    """Floats of 4 bits of exponent and 3 of fraction, without a sign; all ones, which would be NaN, are 0."""
    exponent, fraction = (q >> 3 & 15).astype(np.int32), (q & 7).astype(np.float32)
    values = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(np.float32(8) + fraction, exponent - 10))
    return np.where(q == 0x7F, np.float32(0), values)


# 4 scales | 4 x 8 bytes of nibbles; groups of 16; scales are halved
def _nvfp4(q: U8) -> Parts:
    return Parts(E2M1_LEVELS[nibbles(q[:, 4:].reshape(-1, 4, 8))], _e4m3(q[:, :4]) / np.float32(2))


_FLOATS: dict[int, Callable[[U8], F32]] = {0: f32, 1: f16, 30: bf16}
_TABLE: tuple[tuple[int, str, int, int, Callable[[U8], Parts] | None], ...] = (
    (0, "F32", 1, 4, None),
    (1, "F16", 1, 2, None),
    (2, "Q4_0", 32, 18, _q4_0),
    (3, "Q4_1", 32, 20, _q4_1),
    (6, "Q5_0", 32, 22, _q5_0),
    (7, "Q5_1", 32, 24, _q5_1),
    (8, "Q8_0", 32, 34, _q8_0),
    (9, "Q8_1", 32, 36, _q8_1),
    (10, "Q2_K", 256, 84, _q2_k),
    (11, "Q3_K", 256, 110, _q3_k),
    (12, "Q4_K", 256, 144, _q4_k),
    (13, "Q5_K", 256, 176, _q5_k),
    (14, "Q6_K", 256, 210, _q6_k),
    (15, "Q8_K", 256, 292, _q8_k),
    (16, "IQ2_XXS", 256, 66, codebooks.iq2_xxs),
    (17, "IQ2_XS", 256, 74, codebooks.iq2_xs),
    (18, "IQ3_XXS", 256, 98, codebooks.iq3_xxs),
    (19, "IQ1_S", 256, 50, codebooks.iq1_s),
    (20, "IQ4_NL", 32, 18, _iq4_nl),
    (21, "IQ3_S", 256, 110, codebooks.iq3_s),
    (22, "IQ2_S", 256, 82, codebooks.iq2_s),
    (23, "IQ4_XS", 256, 136, _iq4_xs),
    (24, "I8", 1, 1, None),
    (25, "I16", 1, 2, None),
    (26, "I32", 1, 4, None),
    (27, "I64", 1, 8, None),
    (28, "F64", 1, 8, None),
    (29, "IQ1_M", 256, 56, codebooks.iq1_m),
    (30, "BF16", 1, 2, None),
    (34, "TQ1_0", 256, 54, _tq1_0),
    (35, "TQ2_0", 256, 66, _tq2_0),
    (39, "MXFP4", 32, 17, _mxfp4),
    (40, "NVFP4", 64, 36, _nvfp4),
    (41, "Q1_0", 128, 18, _q1_0),
)
#: By the id that stands in the file. Read only.
FORMATS: dict[int, Format] = {row[0]: Format(*row[:4]) for row in _TABLE}
_QUANTISED: dict[int, Callable[[U8], Parts]] = {row[0]: row[4] for row in _TABLE if row[4] is not None}
