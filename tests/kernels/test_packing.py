"""Packed weights give back the values of the file, bit by bit, whatever bytes it holds."""

from __future__ import annotations

import numpy as np
import pytest
from make_model import BY_NAME

from potok._native import Replay, supported_isas
from potok.backends.native.weights import PACKED
from potok.weights.formats import dequantize


@pytest.mark.parametrize("name", sorted(PACKED))
@pytest.mark.parametrize("isa", supported_isas())
def test_round_trip(isa: str, name: str) -> None:
    rng = np.random.default_rng(0)
    for n, k in [(16, 256), (1, 512), (37, 768)]:
        rows = rng.integers(0, 256, (n, BY_NAME[name].nbytes(k)), dtype=np.uint8)
        replay = Replay(isa, 2)
        unpacked = replay.unpack(replay.add_weight(BY_NAME[name].id, 0, k, rows), np.empty((n, k), np.float32))
        np.testing.assert_array_equal(unpacked, dequantize(BY_NAME[name], rows))


@pytest.mark.parametrize("name", sorted(PACKED))
def test_the_stated_bits_are_what_it_takes(name: str) -> None:
    n, k = 64, 512
    replay = Replay("scalar", 1)
    replay.add_weight(BY_NAME[name].id, 0, k, np.zeros((n, BY_NAME[name].nbytes(k)), np.uint8))
    assert replay.packed_bytes * 8 == n * k * PACKED[name]
