"""Values of every format against the `gguf` package, to the bit, on random bytes (damaged scales included)."""

import struct

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as oracle

from potok.errors import LoadError
from potok.weights.formats import FORMATS, Format, dequantize

WITH_VALUES = [format for format in FORMATS.values() if format.has_values]


#: Formats that the package cannot read: one qblock at a time. In files only Q1_0 is usual.
WITHOUT_ORACLE = {
    "Q8_1": lambda q: [struct.unpack_from("<e", q)[0] * level for level in struct.unpack_from("<32b", q, 4)],
    "Q8_K": lambda q: [
        np.float32(struct.unpack_from("<f", q)[0]) * level for level in struct.unpack_from("<256b", q, 4)
    ],
    "Q1_0": lambda q: [struct.unpack_from("<e", q)[0] * (1 if q[2 + i // 8] >> i % 8 & 1 else -1) for i in range(128)],
}


def by_name(format: Format) -> str:
    return format.name


def expected(format: Format, data: np.ndarray) -> np.ndarray:
    kind = gguf.GGMLQuantizationType(format.id)
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return data.view("<f4" if format.name == "F32" else "<f2").astype(np.float32)
    if format.name in WITHOUT_ORACLE:
        qblocks = data.reshape(-1, format.qblock_bytes)
        with np.errstate(all="ignore"):
            values = [WITHOUT_ORACLE[format.name](bytes(q)) for q in qblocks]
        return np.array(values, np.float32).reshape(len(data), -1)
    with np.errstate(all="ignore"):
        return oracle(data, kind)


def test_sizes_and_names_are_those_of_the_gguf_package() -> None:
    theirs = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert theirs[9] == ("Q8_1", 32, 40)  # as when its scale and sum were floats; ggml has had halves since 2023
    theirs[9] = ("Q8_1", 32, 36)
    ours = {f.id: (f.name, f.qblock_elements, f.qblock_bytes) for f in FORMATS.values()}
    assert ours == theirs


@pytest.mark.parametrize("format", WITH_VALUES, ids=by_name)
def test_random_bytes_decode_to_the_same_bits(format: Format) -> None:
    rng = np.random.default_rng(format.id)
    data = rng.integers(0, 256, (200, 3 * format.qblock_bytes), dtype=np.uint8)
    got = dequantize(format, data)
    assert got.dtype == np.float32
    assert got.shape == (200, 3 * format.qblock_elements)
    want = expected(format, data)
    numbers = ~np.isnan(want)  # the sign of a NaN means nothing
    assert (np.isnan(got) == ~numbers).all()
    assert (got.view(np.uint32) == want.view(np.uint32))[numbers].all()


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x7F, 0x80, 0x7C])
@pytest.mark.parametrize("format", WITH_VALUES, ids=by_name)
def test_extreme_bytes_decode_to_the_same_values(format: Format, fill: int) -> None:
    data = np.full((1, format.qblock_bytes), fill, np.uint8)  # 0x7c7c and 0xffff are NaN as half
    np.testing.assert_array_equal(dequantize(format, data), expected(format, data))


@pytest.mark.parametrize("shape", [(5,), (0, 5), (2, 3, 5)])
def test_leading_dimensions_are_kept(shape: tuple[int, ...]) -> None:
    format = next(f for f in WITH_VALUES if f.name == "Q8_0")
    data = np.zeros((*shape[:-1], shape[-1] * format.qblock_bytes), np.uint8)
    assert dequantize(format, data).shape == (*shape[:-1], shape[-1] * 32)


def test_a_view_with_gaps_is_read_as_it_stands() -> None:
    format = next(f for f in WITH_VALUES if f.name == "Q4_1")
    wide = np.random.default_rng(1).integers(0, 256, (8, 2 * format.qblock_bytes), dtype=np.uint8)
    view = wide[::2, : format.qblock_bytes]
    np.testing.assert_array_equal(dequantize(format, view), dequantize(format, view.copy()))


def test_a_format_without_values_is_refused_by_name() -> None:
    format = next(f for f in FORMATS.values() if f.name == "I16")
    with pytest.raises(LoadError, match="I16 is not supported: use one of F32, F16, "):
        dequantize(format, np.zeros((1, format.qblock_bytes), np.uint8))
