"""Formats whose levels stand in codebooks: an index gives 4 or 8 levels at once (IQ1, IQ2, IQ3).

The codebooks come with the package `gguf`, which is asked for them when the first tensor needs one (potok[iq]).
Decoders are written as those of formats.py; all scales are halves times small whole numbers, over a power of two, so
products with levels are exact until the one rounding of the value.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from potok.weights.bits import F32, I8, U8, Parts, each_bit, half, in_place, u16

INSTALL = "pip install 'potok[iq]'"


def installed() -> bool:
    return find_spec("gguf") is not None


@cache
def _codebook(format: str) -> I8:
    """[indices, 4 or 8]."""
    from gguf import quants  # noqa: PLC0415 - optional, and slow to import

    owner: Any = getattr(quants, format)
    owner.init_grid()
    levels: I8 = owner.grid[0, 0].astype(np.int8)
    levels.flags.writeable = False
    return levels


def codebook_levels(format: str) -> I8:
    """Every level that a value of the format may have, in ascending order: at most 16."""
    codebook = np.unique(_codebook(format))
    signed = [8 * codebook - 1, 8 * codebook + 1] if format.startswith("IQ1") else [codebook, -codebook]
    levels: I8 = np.unique(np.concatenate(signed))
    return levels


def _look_up(format: str, index: npt.NDArray[Any]) -> I8:
    """[n, m] -> [n, m, 4 or 8]."""
    levels: I8 = _codebook(format)[index]
    return levels


#: Seven sign bits, and an eighth that makes their number even.
_SEVEN = np.arange(128, dtype=np.uint8)
_EVEN = _SEVEN | (np.unpackbits(_SEVEN[:, None], axis=1).sum(axis=1, dtype=np.uint8) & 1) << 7
_EVEN.flags.writeable = False
#: By a byte: -1 where its bits are set, the lowest first, else 1.
_SIGNS = 1 - 2 * each_bit(np.arange(256, dtype=np.uint8)[:, None]).astype(np.int8)
_SIGNS.flags.writeable = False


def _with_signs(levels: I8, signs: U8) -> I8:
    """levels [n, m, 4 or 8] of the n rows in order; signs [n, bytes], a bit an element, set where it is negative."""
    signed: I8 = levels.reshape(*signs.shape, 8) * _SIGNS[signs]
    return signed


def _four_signs(words: npt.NDArray[np.uint32]) -> U8:
    """Of the lowest 28 bits of each word, 7 for 8 elements: [n, w] -> [n, 4w]."""
    sevens = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    signs: U8 = _EVEN[sevens.reshape(len(words), -1)]
    return signs


def _odd(scales: npt.NDArray[Any]) -> F32:
    """2 s + 1."""
    odd: F32 = (2 * scales.astype(np.float32) + 1).astype(np.float32)
    return odd


# d half | 8 x (4 indices | u32: 4 x 7 signs, 4 bits of scale); groups of 32, 8 elements an index
def iq2_xxs(q: U8) -> Parts:
    eights = q[:, 2:66].reshape(-1, 8, 8)
    words = np.ascontiguousarray(eights[:, :, 4:]).view("<u4")[:, :, 0]
    levels = _look_up("IQ2_XXS", eights[:, :, :4].reshape(-1, 32))
    scales = half(q, 0) * _odd(words >> 28) / np.float32(8)
    return Parts(_with_signs(levels, _four_signs(words)).reshape(-1, 8, 32), scales)


# d half | 32 x u16: 9 bits of index, 7 signs | 16 x nibble of scale; groups of 16
def iq2_xs(q: U8) -> Parts:
    words = u16(q[:, 2:66])
    levels = _with_signs(_look_up("IQ2_XS", words & 511), _EVEN[words >> 9])
    return Parts(levels.reshape(-1, 16, 16), half(q, 0) * _odd(in_place(q[:, 66:74], 4)) / np.float32(8))


# d half | 32 low bytes of indices | 32 bytes of signs | upper 2 bits of 32 indices | 16 x nibble of scale; groups of 16
def iq2_s(q: U8) -> Parts:
    index = q[:, 2:34] | in_place(q[:, 66:74], 2).astype(np.uint16) << 8
    levels = _with_signs(_look_up("IQ2_S", index), q[:, 34:66])
    return Parts(levels.reshape(-1, 16, 16), half(q, 0) * _odd(in_place(q[:, 74:82], 4)) / np.float32(8))


# d half | 64 indices | 8 x u32: 4 x 7 signs, 4 bits of scale; groups of 32, 4 elements an index
def iq3_xxs(q: U8) -> Parts:
    words = np.ascontiguousarray(q[:, 66:98]).view("<u4")
    levels = _with_signs(_look_up("IQ3_XXS", q[:, 2:66]), _four_signs(words))
    return Parts(levels.reshape(-1, 8, 32), half(q, 0) * _odd(words >> 28) / np.float32(4))


def iq3_s_scales(q: U8) -> U8:
    """What d is multiplied by in each group of 32: [n, 8]."""
    return 2 * in_place(q[:, 106:110], 4) + 1


# d half | 64 low bytes of indices | their ninth bits | 32 bytes of signs | 8 x nibble of scale; groups of 32
def iq3_s(q: U8) -> Parts:
    index = q[:, 2:66] | each_bit(q[:, 66:74]).astype(np.uint16) << 8
    levels = _with_signs(_look_up("IQ3_S", index), q[:, 74:106])
    return Parts(levels.reshape(-1, 8, 32), half(q, 0) * iq3_s_scales(q).astype(np.float32))


def _shifted(levels: I8, minus: npt.NDArray[Any]) -> I8:
    """8 level + 1, or - 1 where `minus`, [n, m]: an eighth is added to each of 8 levels [n, m, 8]."""
    return 8 * levels + np.where(minus, np.int8(-1), np.int8(1))[:, :, None]


# d half | 32 low bytes of indices | 8 x u16: 4 x 3 bits of index, 3 of scale, whether an eighth is taken off; groups
# of 32
def iq1_s(q: U8) -> Parts:
    words = u16(q[:, 34:50])
    upper = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 32)
    levels = _shifted(_look_up("IQ1_S", q[:, 2:34] | upper << 8), np.repeat(words >> 15 == 1, 4, axis=1))
    return Parts(levels.reshape(-1, 8, 32), half(q, 0) * _odd(words >> 12 & 7) / np.float32(8))


# 32 low bytes of indices | 32 nibbles: 3 bits of index, whether an eighth is taken off | 4 x u16: 4 x 3 bits of scale,
# 4 bits of d, a half; groups of 16
def iq1_m(q: U8) -> Parts:
    nibble = in_place(q[:, 32:48], 4)
    words = u16(q[:, 48:56])
    d = np.bitwise_or.reduce(words >> 12 << np.array([0, 4, 8, 12], np.uint16), axis=1, dtype=np.uint16)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 16)
    levels = _shifted(_look_up("IQ1_M", q[:, :32] | (nibble & 7).astype(np.uint16) << 8), nibble >> 3 == 1)
    return Parts(
        levels.reshape(-1, 16, 16), d.view(np.float16).astype(np.float32)[:, None] * _odd(scales) / np.float32(8)
    )
