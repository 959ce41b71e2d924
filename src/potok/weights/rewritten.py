"""Formats without a packed form of their own: their rows are rewritten, value by value the same, as those of another.

The other one is a format of files where it holds such rows exactly: a half for each 32 elements, levels in 4 or 8 bits.
Else it is LEVELS: a float32 for each 16 elements, and levels in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from potok.weights.bits import F32, U8, Parts
from potok.weights.codebooks import iq3_s_scales
from potok.weights.formats import FORMATS, Format, parts

#: 2 x d float32, of 16 elements each | 32 signed bytes. In no file; the ids are those of csrc/formats/pack.h.
LEVELS = Format(-1, "LEVELS", 32, 40)
#: d half | 16 signed scales | 256 signed bytes
LEVELS_K = Format(-2, "LEVELS_K", 256, 274)

_BY_NAME = {format.name: format for format in FORMATS.values()}


def _bytes(values: F32, dtype: str) -> U8:
    """[n, g] -> [n, g, bytes of one]."""
    with np.errstate(invalid="ignore"):  # of NaN
        return values.astype(dtype)[..., None].view(np.uint8)


def _halves(p: Parts) -> U8:
    """The scales of each 32 elements: [n, groups of 32, 2]."""
    return np.repeat(_bytes(p.scales, "<f2"), p.levels.shape[2] // 32, axis=1)


def _as_q4_0(p: Parts) -> U8:
    nibbles = (p.levels.reshape(len(p.levels), -1, 32) + 8).view(np.uint8)
    return np.concatenate([_halves(p), nibbles[..., :16] | nibbles[..., 16:] << 4], axis=-1)


def _as_q8_0(p: Parts) -> U8:
    return np.concatenate([_halves(p), p.levels.view(np.uint8)], axis=-1)


def _as_levels(p: Parts) -> U8:
    rows = len(p.levels)
    scales = np.repeat(_bytes(p.scales, "<f4"), p.levels.shape[2] // 16, axis=1)
    return np.concatenate([scales.reshape(rows, -1, 8), p.levels.reshape(rows, -1, 32).view(np.uint8)], axis=-1)


_WRITERS: dict[str, Callable[[Parts], U8]] = {"Q4_0": _as_q4_0, "Q8_0": _as_q8_0, "LEVELS": _as_levels}

#: By the name of a format: what its rows are rewritten as.
REWRITTEN = {
    **dict.fromkeys(("Q1_0", "TQ1_0", "TQ2_0"), _BY_NAME["Q4_0"]),
    "Q8_1": _BY_NAME["Q8_0"],
    "IQ3_S": LEVELS_K,
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "MXFP4", "NVFP4", "Q8_K"), LEVELS),
}


def rewritten(format: Format, data: U8) -> tuple[Format, U8]:
    """The format that `format` is packed as, and the rows [n, row bytes] in it; as they are where it is the same."""
    target = REWRITTEN.get(format.name)
    if target is None:
        return format, data
    p = parts(format, data)
    if target is LEVELS_K:  # its two levels of scales, as they are
        qblocks = data.reshape(-1, format.qblock_bytes)
        scales = np.repeat(iq3_s_scales(qblocks), 2, axis=1)
        rows = np.concatenate([qblocks[:, :2], scales, p.levels.reshape(-1, 256).view(np.uint8)], axis=1)
    else:
        rows = _WRITERS[target.name](p)
    return target, rows.reshape(len(data), -1)
