"""The GGUF reader: equal to the `gguf` package on good files, one sentence naming place and fault on broken ones."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_model import make_model

from potok.errors import LoadError
from potok.weights.default_model import find_default_model
from potok.weights.gguf import GGUFFile

U32, STRING, ARRAY = 4, 8, 9
F32 = 0


# --- files by hand ------------------------------------------------------------------------------------------------


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def tensor(name: str, dims: tuple[int, ...], format: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, format, offset)


def build(
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = bytes(256),
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    head = magic + version + struct.pack("<QQ", *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def error_of(tmp_path: Path, raw: bytes) -> str:
    path = tmp_path / "broken.gguf"
    path.write_bytes(raw)
    with pytest.raises(LoadError) as caught:
        GGUFFile.open(path)
    return str(caught.value)


# --- good files ---------------------------------------------------------------------------------------------------


def check_equal_to_oracle(path: Path) -> None:
    ours, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for name, field in fields.items():
        value = ours.metadata[name]
        expected = field.contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, name
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for expected in theirs.tensors:
        tensor = ours.tensors[expected.name]
        assert tensor.type.id == expected.tensor_type.value
        assert tensor.shape == tuple(expected.shape[::-1].tolist())
        assert tensor.offset == expected.data_offset
        assert tensor.data.shape[:-1] == tensor.shape[:-1]
        assert tensor.data.tobytes() == expected.data.tobytes()


def test_default_file_is_read_as_the_gguf_package_reads_it() -> None:
    check_equal_to_oracle(find_default_model())


@pytest.mark.parametrize("format", ["F32", "Q4_K_M"])
def test_synthetic_file_is_read_as_the_gguf_package_reads_it(tmp_path: Path, format: str) -> None:
    check_equal_to_oracle(make_model(tmp_path / "tiny.gguf", "tiny-llama-256", format))


def test_every_value_type(tmp_path: Path) -> None:
    scalars = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}
    values = {"B": 255, "b": -1, "H": 65535, "h": -2, "I": 2**32 - 1, "i": -3, "f": 1.5, "?": True, "Q": 2**64 - 1}
    values |= {"q": -(2**63), "d": 0.1}
    keys = [key(f"scalar.{c}", kind, struct.pack("<" + c, values[c])) for c, kind in scalars.items()]
    keys += [key(f"array.{c}", ARRAY, struct.pack("<IQ" + 2 * c, kind, 2, values[c], 0)) for c, kind in scalars.items()]
    keys.append(key("text", STRING, text("zwölf")))
    keys.append(key("texts", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("") + text("ß")))
    keys.append(key("no texts", ARRAY, struct.pack("<IQ", STRING, 0)))
    path = tmp_path / "types.gguf"
    path.write_bytes(build(keys, []))
    metadata = GGUFFile.open(path).metadata
    for c in scalars:
        assert metadata[f"scalar.{c}"] == values[c]
        assert type(metadata[f"scalar.{c}"]) is type(values[c])
        assert metadata[f"array.{c}"].dtype == np.dtype("<" + c)
        assert metadata[f"array.{c}"].tolist() == [values[c], 0]
    assert (metadata["text"], metadata["texts"], metadata["no texts"]) == ("zwölf", ["a", "", "ß"], [])


def test_alignment_moves_the_data(tmp_path: Path) -> None:
    data = np.arange(32, dtype="<f4").tobytes()
    head = build([u32("general.alignment", 64)], [tensor("a", (4, 2)), tensor("b", (3,), offset=64)], b"")
    path = tmp_path / "aligned.gguf"
    path.write_bytes(head + bytes(-len(head) % 64) + data)
    tensors = GGUFFile.open(path).tensors
    assert tensors["a"].data.view("<f4").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert tensors["b"].data.view("<f4").tolist() == [16, 17, 18]


def test_tensor_data_is_a_read_only_view_of_the_file(tmp_path: Path) -> None:
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama"))
    data = file.tensors["token_embd.weight"].data
    before = data.tobytes()
    assert not data.flags.writeable
    assert not data.flags.owndata
    file.release_memory()
    assert data.tobytes() == before


def test_opening_runs_few_lines_for_each_entry(lines_run: Callable[[Callable[[], object]], int]) -> None:
    """98,000 strings and as many numbers; the file opens in a tenth of a second."""
    metadata = GGUFFile.open(find_default_model()).metadata
    entries = sum(len(value) for value in metadata.values() if isinstance(value, list))
    assert lines_run(lambda: GGUFFile.open(find_default_model())) < 10 * entries


# --- broken files -------------------------------------------------------------------------------------------------

HUGE = 2**63
GOOD_KEY = u32("a.key", 1)
#: name -> (file, what its sentence says). The header ends at byte 24; text("a.key") and its type at 24 + 13 + 4 = 41.
BROKEN: dict[str, tuple[bytes, str]] = {
    "not a GGUF": (build([], [], magic=b"GGML"), "header at byte 0: the file does not begin with 'GGUF'"),
    "version 1": (build([], [], version=b"\1\0\0\0"), "header at byte 4: GGUF version 1 is not supported"),
    "big endian": (build([], [], version=b"\0\0\0\3"), "header at byte 4: the file is big-endian"),
    "tensor count": (build([], [], num_tensors=HUGE), f"header at byte 8: the tensor count is {HUGE}"),
    "key count": (build([], [], num_keys=HUGE), f"header at byte 16: the key count is {HUGE}"),
    "plausible key count": (build([], [], num_keys=21), "header at byte 16: the key count is 21"),
    "cut in the header": (build([], [])[:10], "header at byte 8: the tensor count needs 8 bytes but 2 are left"),
    "key name length": (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, HUGE) + bytes(64), "key 0 at byte 24: its name is"),
    "key name not UTF-8": (build([text(b"\xff\xfe") + bytes(9)], []), "key 0 at byte 32: its name is not UTF-8"),
    "key twice": (build([GOOD_KEY, GOOD_KEY], []), "key 'a.key' at byte 45: the key stands twice"),
    "unknown value type": (build([key("a.key", 13, bytes(8))], []), "key 'a.key' at byte 37: value type 13 is unknown"),
    "value beyond the end": (build([GOOD_KEY], [])[:43], "key 'a.key' at byte 41: the value needs 4 bytes but 2"),
    "text length": (
        build([key("a.key", STRING, struct.pack("<Q", HUGE))], []),
        f"key 'a.key' at byte 49: the text needs {HUGE} bytes",
    ),
    "text not UTF-8": (
        build([key("a.key", STRING, text(b"ab\xff"))], []),
        "key 'a.key' at byte 49: the text is not UTF-8",
    ),
    "boolean": (build([key("a.key", 7, b"\2")], []), "key 'a.key' at byte 41: a boolean is neither 0 nor 1"),
    "array of booleans": (
        build([key("a.key", ARRAY, struct.pack("<IQ3s", 7, 3, b"\0\1\2"))], []),
        "key 'a.key' at byte 53: a boolean is neither 0 nor 1",
    ),
    "array of arrays": (
        build([key("a.key", ARRAY, struct.pack("<IQ", ARRAY, 1))], []),
        "key 'a.key' at byte 41: arrays of value type 9 are not supported",
    ),
    "number count": (
        build([key("a.key", ARRAY, struct.pack("<IQ", U32, HUGE))], []),
        f"key 'a.key' at byte 45: the number of values is {HUGE}",
    ),
    "number count whose bytes overflow": (
        build([key("a.key", ARRAY, struct.pack("<IQ", 12, 2**61 + 1))], []),
        f"key 'a.key' at byte 45: the number of values is {2**61 + 1}",
    ),
    "string count": (
        build([key("a.key", ARRAY, struct.pack("<IQ", STRING, 2**40))], []),
        f"key 'a.key' at byte 45: the number of strings is {2**40}",
    ),
    "string in a list too long": (
        build([key("a.key", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + struct.pack("<Q", HUGE))], []),
        f"key 'a.key' at byte 62: string 1 is {HUGE} bytes long",
    ),
    "string in a list not UTF-8": (
        build([key("a.key", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text(b"\xc3"))], []),
        "key 'a.key' at byte 62: string 1 is not UTF-8",
    ),
    "list ends with the file": (
        build([key("a.key", ARRAY, struct.pack("<IQ", STRING, 3) + text("y" * 20))], [], b"")[:85],
        "key 'a.key' at byte 81: the length of string 1 lies beyond the end",
    ),
    "alignment 0": (build([u32("general.alignment", 0)], []), "key 'general.alignment' at byte 53: the alignment must"),
    "alignment 48": (build([u32("general.alignment", 48)], []), "power of two, not 48"),
    "alignment is text": (build([key("general.alignment", STRING, text("32"))], []), "power of two, not '32'"),
    "alignment beyond the file": (
        build([u32("general.alignment", 2**31)], [tensor("w", (4,))]),
        f"tensor 'w' at byte 82: its 16 bytes of data begin at byte {2**31} but the file ends",
    ),
    "tensor twice": (build([], [tensor("w", (4,))] * 2), "tensor 'w' at byte 57: the tensor stands twice"),
    "tensor name length": (build([], [struct.pack("<Q", 2**20)]), "tensor 0 at byte 24: its name is 1048576 bytes"),
    "no dimensions": (build([], [tensor("w", ())]), "tensor 'w' at byte 33: it has 0 dimensions"),
    "five dimensions": (build([], [tensor("w", (1,) * 5)]), "tensor 'w' at byte 33: it has 5 dimensions"),
    "dimension 0": (build([], [tensor("w", (4, 0))]), "tensor 'w' at byte 33: dimension 1 is 0"),
    "dimensions overflow": (build([], [tensor("w", (2**32, 2**32))]), f"its {2**66} bytes of data begin at byte"),
    "unknown format": (build([], [tensor("w", (4,), 4)]), "tensor 'w' at byte 45: format 4 is unknown"),
    "half a qblock": (
        build([], [tensor("w", (48,), 3)]),
        "tensor 'w' at byte 33: rows of Q4_1 hold a multiple of 32 elements, not 48",
    ),
    "unaligned data": (build([], [tensor("w", (4,), offset=8)]), "tensor 'w' at byte 49: its data offset 8 is not"),
    "data beyond the end": (build([], [tensor("w", (128,))]), "tensor 'w' at byte 49: its 512 bytes of data begin"),
    "offset beyond the end": (build([], [tensor("w", (4,), offset=2**64 - 32)]), "tensor 'w' at byte 49: its 16 bytes"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    raw, sentence = BROKEN[case]
    message = error_of(tmp_path, raw)
    assert sentence in message
    assert message.startswith("broken.gguf: ")
    assert message.endswith(".")
    assert "\n" not in message


def no_such_file(tmp_path: Path) -> Path:
    return tmp_path / "missing.gguf"


def folder(tmp_path: Path) -> Path:
    return tmp_path


def empty_file(tmp_path: Path) -> Path:
    (tmp_path / "empty.gguf").touch()
    return tmp_path / "empty.gguf"


def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def null_character(tmp_path: Path) -> Path:
    return tmp_path / "a\0b"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (no_such_file, "cannot be opened: No such file"),
        (folder, "is not a file"),
        (empty_file, "is empty"),
        (pipe, "is not a file"),
        (null_character, "cannot be opened"),
    ],
)
def test_a_path_that_is_no_file(tmp_path: Path, make: Callable[[Path], Path], sentence: str) -> None:
    with pytest.raises(LoadError, match=sentence):
        GGUFFile.open(make(tmp_path))


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The keys of a whole model and two small tensors, so that most damage hits the structure."""
    raw = make_model(tmp_path_factory.mktemp("small") / "tiny.gguf", "tiny-llama").read_bytes()
    keys = raw[24 : raw.index(text("token_embd.weight"))]
    tensors = [tensor("token_embd.weight", (32, 4), 3), tensor("output_norm.weight", (32,), offset=96)]
    return build([keys], tensors, num_keys=struct.unpack_from("<Q", raw, 16)[0])


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_damage_ends_in_a_model_or_a_load_error(
    small_file: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(small_file)
    places = st.one_of(st.integers(0, 400), st.integers(0, len(raw) - 1), st.integers(len(raw) - 500, len(raw) - 1))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(places)
        patch = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([2**63, 2**64 - 1, 2**32, 2**31, 0]).map(lambda v: struct.pack("<Q", v)),
            )
        )
        raw[at : at + len(patch)] = patch
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        file = GGUFFile.open(path)
        sum(int(t.data[..., -1].sum()) for t in file.tensors.values())  # every view lies inside the file
    except LoadError as e:
        assert str(e).count("\n") == 0
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        path.unlink()
    assert peak < 2_000_000 + 40 * len(raw)
