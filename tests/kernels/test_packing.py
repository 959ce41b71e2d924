"""Packed weights give back the values of the file, bit by bit, whatever bytes it holds."""

from __future__ import annotations

import numpy as np
import pytest
from make_model import BY_NAME

from potok._native import Replay, supported_isas
from potok.backends.native.weights import PACKED
from potok.weights.formats import FORMATS, dequantize
from potok.weights.rewritten import rewritten


def packed(replay: Replay, name: str, rows: np.ndarray, k: int) -> int:
    """The index of the weight [n, k], packed 16 rows at a time."""
    target, packable = rewritten(BY_NAME[name], rows)
    index = replay.add_weight(target.id, 0, len(rows), k)
    for first in range(0, len(rows), 16):
        replay.pack_rows(index, target.id, first, packable[first : first + 16])
    return index


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    numbers = ~np.isnan(want)  # the payload of a NaN means nothing
    assert (np.isnan(got) == ~numbers).all()
    assert (got.view(np.uint32) == want.view(np.uint32))[numbers].all()


@pytest.mark.parametrize("name", sorted(PACKED))
@pytest.mark.parametrize("isa", supported_isas())
def test_round_trip(isa: str, name: str) -> None:
    rng = np.random.default_rng(0)
    for n, k in [(16, 256), (1, 512), (37, 768)]:
        rows = rng.integers(0, 256, (n, BY_NAME[name].nbytes(k)), dtype=np.uint8)
        replay = Replay(isa, 2)
        unpacked = replay.unpack(packed(replay, name, rows, k), np.empty((n, k), np.float32))
        assert_same_bits(unpacked, dequantize(BY_NAME[name], rows))


def special_scales(name: str, qblocks: np.ndarray) -> None:
    """Scales that are infinite, NaN, subnormal or zero of either sign, into the first qblocks [any, bytes]."""
    halves = np.array([0x7C00, 0xFC00, 0x7E00, 0x7C01, 0x0001, 0x8001, 0x03FF, 0x0000, 0x8000, 0x7BFF], "<u2")
    floats = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1, 0x80000001, 0x7FFFFF, 0, 1 << 31], "<u4")
    if name == "IQ1_M":
        words = qblocks[: len(halves), 48:56].copy().view("<u2")
        words = words & 0xFFF | (halves[:, None] >> np.array([0, 4, 8, 12], np.uint16)) << 12
        qblocks[: len(halves), 48:56] = words.view(np.uint8)
    elif name == "MXFP4":
        qblocks[:6, 0] = 0, 1, 2, 127, 254, 255
    elif name == "NVFP4":
        qblocks[:2, :4] = (0, 1, 7, 8), (0x7F, 0x80, 0xFF, 0x7E)
    elif name in ("F32", "Q8_K"):
        qblocks[: len(floats), :4] = floats[:, None].view(np.uint8)
    elif name == "BF16":
        qblocks[:4] = np.array([0x7F80, 0xFF80, 0x7FC0, 1], "<u2")[:, None].view(np.uint8)
    else:
        at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}.get(name, 0)
        qblocks[: len(halves), at : at + 2] = halves[:, None].view(np.uint8)


@pytest.mark.parametrize("name", sorted(PACKED))
@pytest.mark.parametrize("isa", supported_isas())
def test_round_trip_of_scales_that_are_no_usual_numbers(isa: str, name: str) -> None:
    n, k = 16, 512
    rows = np.random.default_rng(1).integers(0, 256, (n, BY_NAME[name].nbytes(k)), dtype=np.uint8)
    special_scales(name, rows.reshape(-1, BY_NAME[name].qblock_bytes))
    replay = Replay(isa, 1)
    unpacked = replay.unpack(packed(replay, name, rows, k), np.empty((n, k), np.float32))
    assert_same_bits(unpacked, dequantize(BY_NAME[name], rows))


def test_every_format_with_values_is_packed() -> None:
    assert PACKED.keys() == {format.name for format in FORMATS.values() if format.has_values}


def test_rows_that_are_not_those_of_the_weight_are_refused() -> None:
    replay = Replay("scalar", 1)
    index = replay.add_weight(BY_NAME["Q8_0"].id, 0, 20, 64)
    rows = np.zeros((16, BY_NAME["Q8_0"].nbytes(64)), np.uint8)
    for source, first, part in (("Q4_0", 0, rows), ("Q8_0", 0, rows[:, :34]), ("Q8_0", 8, rows), ("Q8_0", 16, rows)):
        with pytest.raises(ValueError, match="rows"):
            replay.pack_rows(index, BY_NAME[source].id, first, np.ascontiguousarray(part))
    with pytest.raises(ValueError, match="no packed form"):
        replay.add_weight(BY_NAME["I8"].id, 0, 16, 64)
    with pytest.raises(ValueError, match="no multiple"):
        replay.add_weight(BY_NAME["Q2_K"].id, 0, 16, 64)


@pytest.mark.parametrize("name", sorted(PACKED))
def test_the_stated_bits_are_what_it_takes(name: str) -> None:
    n, k = 64, 512
    replay = Replay("scalar", 1)
    packed(replay, name, np.zeros((n, BY_NAME[name].nbytes(k)), np.uint8), k)
    assert replay.packed_bytes - n * k * PACKED[name] / 8 in (0, n / 16 * 32)  # lists of levels
