"""Formats without a packed form of their own: their rows are rewritten, value by value the same, as those of another.

The other one is a format of files where it holds such rows exactly: a half for each 32 elements, levels in 4 or 8 bits.
Else it has 4 bits for a level, which choose from a list of 16: no other format has more levels than that but Q8_K,
which becomes float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from potok.weights.bits import F32, I8, U8, Parts
from potok.weights.codebooks import codebook_levels, iq3_s_scales
from potok.weights.formats import E2M1_LEVELS, FORMATS, Format, dequantize, parts

#: In no file; the ids are those of csrc/formats/pack.h. list: 16 signed bytes, the same in every row.
#: list | 2 x d float32, of 16 elements each | 16 bytes of nibbles
LISTED = Format(-1, "LISTED", 32, 40)
#: list | d half | 16 signed scales | 8 x 16 bytes of nibbles
LISTED_K = Format(-2, "LISTED_K", 256, 162)

_BY_NAME = {format.name: format for format in FORMATS.values()}
_F32 = _BY_NAME["F32"]


def _bytes(values: F32, dtype: str) -> U8:
    """[n, g] -> [n, g, bytes of one]."""
    with np.errstate(invalid="ignore"):  # of NaN
        return values.astype(dtype)[..., None].view(np.uint8)


def _halves(p: Parts) -> U8:
    """The scales of each 32 elements: [n, groups of 32, 2]."""
    return np.repeat(_bytes(p.scales, "<f2"), p.levels.shape[2] // 32, axis=1)


def _nibbles(values: U8) -> U8:
    """[n, any] below 16 -> [n, groups of 32, 16]."""
    values = values.reshape(len(values), -1, 32)
    packed: U8 = values[..., :16] | values[..., 16:] << np.uint8(4)
    return packed


def _as_q4_0(p: Parts) -> U8:
    return np.concatenate([_halves(p), _nibbles((p.levels.reshape(len(p.levels), -1) + 8).view(np.uint8))], axis=-1)


def _as_q8_0(p: Parts) -> U8:
    return np.concatenate([_halves(p), p.levels.view(np.uint8)], axis=-1)


_WRITERS: dict[str, Callable[[Parts], U8]] = {"Q4_0": _as_q4_0, "Q8_0": _as_q8_0}


@cache
def _list_of(name: str) -> tuple[U8, U8]:
    """All levels that a format has: the list [16], and by a level's byte its place there [256]."""
    levels: I8 = np.unique(E2M1_LEVELS) if name in ("MXFP4", "NVFP4") else codebook_levels(name)
    listed, place = np.zeros(16, np.uint8), np.zeros(256, np.uint8)
    listed[: len(levels)] = levels.view(np.uint8)
    place[levels.view(np.uint8)] = np.arange(len(levels))
    return listed, place


def _as_listed(name: str, p: Parts) -> U8:
    listed, place = _list_of(name)
    nibbles = _nibbles(place[p.levels.view(np.uint8)].reshape(len(p.levels), -1))
    lists = np.broadcast_to(listed, (*nibbles.shape[:2], 16))
    scales = np.repeat(_bytes(p.scales, "<f4"), p.levels.shape[2] // 16, axis=1)
    return np.concatenate([lists, scales.reshape(*nibbles.shape[:2], 8), nibbles], axis=-1)


def _iq3_s_as_listed_k(p: Parts, data: U8, format: Format) -> U8:
    """Its two levels of scales, as they are."""
    listed, place = _list_of(format.name)
    qblocks = data.reshape(-1, format.qblock_bytes)
    nibbles = _nibbles(place[p.levels.view(np.uint8)].reshape(len(qblocks), -1)).reshape(len(qblocks), -1)
    lists = np.broadcast_to(listed, (len(qblocks), 16))
    scales = np.repeat(iq3_s_scales(qblocks), 2, axis=1)
    return np.concatenate([lists, qblocks[:, :2], scales, nibbles], axis=1)


#: By the name of a format: what its rows are rewritten as.
REWRITTEN = {
    **dict.fromkeys(("Q1_0", "TQ1_0", "TQ2_0"), _BY_NAME["Q4_0"]),
    "Q8_1": _BY_NAME["Q8_0"],
    "Q8_K": _F32,
    "IQ3_S": LISTED_K,
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "MXFP4", "NVFP4"), LISTED),
}


def rewritten(format: Format, data: U8) -> tuple[Format, U8]:
    """The format that `format` is packed as, and the rows [n, row bytes] in it; as they are where it is the same."""
    target = REWRITTEN.get(format.name)
    if target is None:
        return format, data
    if target is _F32:
        return target, dequantize(format, data).view(np.uint8)
    p = parts(format, data)
    if target is LISTED:
        rows = _as_listed(format.name, p)
    elif target is LISTED_K:
        rows = _iq3_s_as_listed_k(p, data, format)
    else:
        rows = _WRITERS[target.name](p)
    return target, rows.reshape(len(data), -1)
