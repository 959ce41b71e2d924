"""Tensor formats of GGUF files: sizes of all of them, and exact float32 values of those that potok computes with.

A format cuts a row into qblocks of `qblock_elements` values stored in `qblock_bytes` bytes. A decoder takes n qblocks,
uint8 [n, qblock_bytes], and stands under a drawing of their bytes; "half" is IEEE float16, everything is little endian.
Arithmetic is float32, rounded once per operation in the order written: every reader of a file gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from potok.errors import LoadError

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


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

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` values; elements is a multiple of qblock_elements."""
        return elements // self.qblock_elements * self.qblock_bytes


class Parts(NamedTuple):
    """Quantised values as what they are made of: value = scale * level (+ minimum), rounded after each operation.

    levels: int8 [n, g, e], g groups of e values each. scales: float32 [n, g]. minimums: float32 [n, g], or None.
    """

    levels: npt.NDArray[np.int8]
    scales: F32
    minimums: F32 | None = None


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


def _half(qblocks: U8, at: int) -> F32:
    """The half at byte `at` of every qblock, as float32 [n, 1]."""
    return _f16(qblocks[:, at : at + 2])


def _fields(packed: U8, bits: int) -> U8:
    """Cuts bytes into fields of `bits` bits: [..., b] -> [..., 8 / bits, b], the lowest bits of all bytes first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields: U8 = np.bitwise_and(packed[..., None, :] >> shifts, 2**bits - 1, dtype=np.uint8)
    return fields


def _nibbles(packed: U8) -> U8:
    """[..., b] -> [..., 2b]: all low nibbles, then all high ones."""
    return _fields(packed, 4).reshape(*packed.shape[:-1], -1)


def _bits32(qblocks: U8, at: int) -> U8:
    """The 32-bit word at byte `at` as its bits, lowest first: [n, 32] of 0 or 1."""
    return np.unpackbits(qblocks[:, at : at + 4], axis=-1, bitorder="little")


def _f32(q: U8) -> F32:
    return np.ascontiguousarray(q).view("<f4").astype(np.float32)


def _f16(q: U8) -> F32:
    return np.ascontiguousarray(q).view("<f2").astype(np.float32)


def _bf16(q: U8) -> F32:
    high = np.ascontiguousarray(q).view("<u2").astype(np.uint32)
    return (high << np.uint32(16)).view(np.float32)


def _signed(levels: npt.NDArray[Any], zero_point: int) -> npt.NDArray[np.int8]:
    return (levels.astype(np.int16) - zero_point).astype(np.int8)


def _single(levels: npt.NDArray[Any], scale: F32, minimum: F32 | None = None) -> Parts:
    """Parts of a format whose qblock is one group: levels [n, 32], scale and minimum [n, 1]."""
    return Parts(levels[:, None, :].astype(np.int8), scale, minimum)


# d half | 16 bytes of nibbles
def _q4_0(q: U8) -> Parts:
    return _single(_signed(_nibbles(q[:, 2:18]), 8), _half(q, 0))


# d half | m half | 16 bytes of nibbles
def _q4_1(q: U8) -> Parts:
    return _single(_nibbles(q[:, 4:20]), _half(q, 0), _half(q, 2))


# d half | fifth bits, 32 | 16 bytes of nibbles
def _q5_0(q: U8) -> Parts:
    return _single(_signed(_nibbles(q[:, 6:22]) | _bits32(q, 2) << 4, 16), _half(q, 0))


# d half | m half | fifth bits, 32 | 16 bytes of nibbles
def _q5_1(q: U8) -> Parts:
    return _single(_nibbles(q[:, 8:24]) | _bits32(q, 4) << 4, _half(q, 0), _half(q, 2))


# d half | 32 signed bytes
def _q8_0(q: U8) -> Parts:
    return _single(q[:, 2:34].view(np.int8), _half(q, 0))


def _planes(packed: U8, bits: int) -> U8:
    """Fields of K formats: [n, 32 * s] -> [n, s * 8 / bits, 32], for every 32 bytes all their lowest fields first."""
    return _fields(packed.reshape(len(packed), -1, 32), bits).reshape(len(packed), -1, 32)


# 16 x (scale nibble, minimum nibble) | 64 bytes of 2-bit levels | d half | dmin half; groups of 16
def _q2_k(q: U8) -> Parts:
    scales = q[:, :16]
    d = _half(q, 80) * (scales & 15).astype(np.float32)
    m = _half(q, 82) * (scales >> 4).astype(np.float32)
    return Parts(_planes(q[:, 16:80], 2).reshape(-1, 16, 16).astype(np.int8), d, -m)


# 32 bytes of third bits | 64 bytes of 2-bit levels | 12 bytes of scales | d half; groups of 16
def _q3_k(q: U8) -> Parts:
    low = _nibbles(q[:, 96:104])
    high = _fields(q[:, 104:108], 2).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32) - np.float32(32)
    levels = _planes(q[:, 32:96], 2) | _planes(q[:, :32], 1) << 2
    return Parts(_signed(levels, 4).reshape(-1, 16, 16), _half(q, 108) * scales)


def _scales_and_minimums(packed: U8) -> tuple[F32, F32]:
    """12 bytes that hold 8 six-bit scales and 8 six-bit minimums -> two arrays [n, 8]."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1)
    minimums = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _with_minimums(q: U8, levels: npt.NDArray[Any]) -> Parts:
    """d half | dmin half | 12 bytes of scales and minimums | ...; levels: [n, 8, 32]."""
    scales, minimums = _scales_and_minimums(q[:, 4:16])
    return Parts(levels.astype(np.int8), _half(q, 0) * scales, -(_half(q, 2) * minimums))


# ... | 128 bytes of nibbles; groups of 32
def _q4_k(q: U8) -> Parts:
    return _with_minimums(q, _planes(q[:, 16:144], 4))


# ... | 32 bytes of fifth bits | 128 bytes of nibbles; groups of 32
def _q5_k(q: U8) -> Parts:
    return _with_minimums(q, _planes(q[:, 48:176], 4) | _planes(q[:, 16:48], 1) << 4)


# 128 bytes of nibbles | 64 bytes of upper 2 bits | 16 signed scales | d half; groups of 16
def _q6_k(q: U8) -> Parts:
    nibbles = _nibbles(q[:, :128].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    levels = nibbles | _planes(q[:, 128:192], 2).reshape(-1, 16, 16) << 4
    d = _half(q, 208) * q[:, 192:208].view(np.int8).astype(np.float32)
    return Parts(_signed(levels, 32), d)


_IQ4_LEVELS = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
_IQ4_LEVELS.flags.writeable = False


# d half | 16 bytes of nibbles
def _iq4_nl(q: U8) -> Parts:
    return _single(_IQ4_LEVELS[_nibbles(q[:, 2:18])], _half(q, 0))


# d half | upper 2 bits of 8 scales | lower nibbles of 8 scales | 8 x 16 bytes of nibbles; groups of 32
def _iq4_xs(q: U8) -> Parts:
    low = _fields(q[:, 4:8], 4).swapaxes(1, 2).reshape(-1, 8)
    high = _fields(q[:, 2:4], 2).swapaxes(1, 2).reshape(-1, 8)
    d = _half(q, 0) * ((low | high << 4).astype(np.float32) - np.float32(32))
    return Parts(_IQ4_LEVELS[_nibbles(q[:, 8:136].reshape(-1, 8, 16))], d)


_FLOATS: dict[int, Callable[[U8], F32]] = {0: _f32, 1: _f16, 30: _bf16}
_TABLE: tuple[tuple[int, str, int, int, Callable[[U8], Parts] | None], ...] = (
    (0, "F32", 1, 4, None),
    (1, "F16", 1, 2, None),
    (2, "Q4_0", 32, 18, _q4_0),
    (3, "Q4_1", 32, 20, _q4_1),
    (6, "Q5_0", 32, 22, _q5_0),
    (7, "Q5_1", 32, 24, _q5_1),
    (8, "Q8_0", 32, 34, _q8_0),
    (9, "Q8_1", 32, 40, None),
    (10, "Q2_K", 256, 84, _q2_k),
    (11, "Q3_K", 256, 110, _q3_k),
    (12, "Q4_K", 256, 144, _q4_k),
    (13, "Q5_K", 256, 176, _q5_k),
    (14, "Q6_K", 256, 210, _q6_k),
    (15, "Q8_K", 256, 292, None),
    (16, "IQ2_XXS", 256, 66, None),
    (17, "IQ2_XS", 256, 74, None),
    (18, "IQ3_XXS", 256, 98, None),
    (19, "IQ1_S", 256, 50, None),
    (20, "IQ4_NL", 32, 18, _iq4_nl),
    (21, "IQ3_S", 256, 110, None),
    (22, "IQ2_S", 256, 82, None),
    (23, "IQ4_XS", 256, 136, _iq4_xs),
    (24, "I8", 1, 1, None),
    (25, "I16", 1, 2, None),
    (26, "I32", 1, 4, None),
    (27, "I64", 1, 8, None),
    (28, "F64", 1, 8, None),
    (29, "IQ1_M", 256, 56, None),
    (30, "BF16", 1, 2, None),
    (34, "TQ1_0", 256, 54, None),
    (35, "TQ2_0", 256, 66, None),
    (39, "MXFP4", 32, 17, None),
    (40, "NVFP4", 64, 36, None),
    (41, "Q1_0", 128, 18, None),
)
#: By the id that stands in the file. Read only.
FORMATS: dict[int, Format] = {row[0]: Format(*row[:4]) for row in _TABLE}
_QUANTISED: dict[int, Callable[[U8], Parts]] = {row[0]: row[4] for row in _TABLE if row[4] is not None}
