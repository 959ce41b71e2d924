"""From a file into the executor: rewritten a few rows at a time, and what that costs is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_model import make_model

from potok._native import Replay
from potok.backends.native import weights
from potok.backends.native.weights import PACKED, WeightLoader
from potok.model.precision import Activation, activation_of
from potok.weights.formats import dequantize
from potok.weights.gguf import GGUFFile

NAME = "token_embd.weight"  # 501 rows: the last panel is not full


@pytest.mark.parametrize("format", ["IQ2_XS", "IQ3_S", "TQ2_0", "MXFP4", "Q2_K"])
@pytest.mark.parametrize("elements", [1, 48 * 256, 1 << 22])
def test_parts_of_a_tensor_make_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, elements: int
) -> None:
    monkeypatch.setattr(weights, "_ELEMENTS", elements)
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama-256", format))
    tensor, replay = file.tensors[NAME], Replay("scalar", 2)
    index = WeightLoader(replay, file, 8, activation_of).weight(NAME)
    values = replay.unpack(index, np.empty(tensor.shape, np.float32))
    np.testing.assert_array_equal(values, dequantize(tensor.type, tensor.data))
    assert replay.packed_bytes - 512 * 256 * PACKED[format] / 8 in (0, 512 / 16 * 32)  # lists of levels


def test_floats_instead_of_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_ELEMENTS", 48 * 256)
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama-256", "IQ2_XS"))
    tensor, replay = file.tensors[NAME], Replay("scalar", 2)
    loader = WeightLoader(replay, file, 8, lambda name, format, bits: Activation.F32)
    values = replay.unpack(loader.weight(NAME), np.empty(tensor.shape, np.float32))
    np.testing.assert_array_equal(values, dequantize(tensor.type, tensor.data))
    assert replay.packed_bytes == 512 * 256 * 4
    assert loader.notes() == ()


def test_what_grows_is_noted(tmp_path: Path) -> None:
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama-256", "IQ2_XS"))
    loader = WeightLoader(Replay("scalar", 1), file, 8, activation_of)
    for name in (NAME, "blk.0.ffn_up.weight"):
        loader.weight(name)
    before, after = (501 + 256) * 256 * 74 / 256 / 2**20, (501 + 256) * 256 * 6 / 8 / 2**20
    assert loader.notes() == (f"wider levels for 2 IQ2_XS tensors: {before:.1f} MiB became {after:.1f} MiB",)


def test_nothing_is_noted_of_formats_that_stay(tmp_path: Path) -> None:
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama-256", "Q2_K"))
    loader = WeightLoader(Replay("scalar", 1), file, 8, activation_of)
    loader.weight(NAME)
    assert loader.notes() == ()
