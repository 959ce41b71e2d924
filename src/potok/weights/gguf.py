"""Reads a GGUF file: metadata as Python values, tensors as views of the mapped bytes. Nothing of a tensor is copied.

    "GGUF" | version u32 | tensor count u64 | key count u64
    keys:    name | type u32 | value            strings are: length u64 | UTF-8 bytes
    tensors: name | dimensions u32 | u64 each, innermost first | format u32 | offset u64
    padding to the alignment | tensor data, offsets count from here

A file comes from strangers: every count and length is compared with the bytes that are left before anything is made
from it, so a hostile file costs at most a few times its own size in memory and always ends in a LoadError.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from potok.errors import LoadError
from potok.weights.formats import FORMATS, Format

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_STRINGS = 1 << 22  # of one list; the largest vocabularies have 2^18 tokens
MAX_NAME_BYTES = 1 << 16  # of a key or tensor name
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

#: Scalar value types of the format: id -> struct code, which is also the numpy code. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_UINT32, _BOOL = 4, 7


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """shape: numpy order, rows first, the contiguous dimension K last. offset: bytes from the start of the file.

    data: uint8 [*shape[:-1], bytes of one row], a read-only view of the mapped file.
    """

    name: str
    type: Format
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """metadata: int, float, bool, str; list[str] for arrays of strings; numpy arrays for other arrays."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    size: int  # bytes
    _mapped: mmap.mmap

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Maps the file. Raises LoadError: one sentence naming the key or tensor and the byte offset."""
        path = Path(path)
        mapped = _map(path)
        reader = _Reader(path, mapped)
        version, num_tensors, num_keys = reader.header()
        metadata = reader.metadata(num_keys)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        tensors = reader.tensors(num_tensors, alignment)
        return cls(path, version, metadata, tensors, len(mapped), mapped)

    def release_memory(self) -> None:
        """Lets the system drop the file's bytes from this process; a later access reads them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)


def _map(path: Path) -> mmap.mmap:
    try:
        # Opening a pipe would wait for a writer, so look before opening.
        if not stat.S_ISREG(path.stat().st_mode):
            raise LoadError(f"{path} is not a file: give the path of a GGUF file.")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise LoadError(f"{path} is empty: it is not a GGUF file.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:  # ValueError: a null character in the path
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise LoadError(f"{path} cannot be opened: {reason}.") from e


class _Entry(NamedTuple):
    """A tensor whose data has no place yet: that is known after the last entry. offset: from the start of the data."""

    format: Format
    shape: tuple[int, ...]
    offset: int
    offset_at: int  # byte of the file where the offset stands


class _Reader:
    """A cursor over the mapped bytes. `subject` says what is being read, for the sentence of an error."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path = path
        self._mapped = mapped
        self._size = len(mapped)
        self._at = 0
        self._subject = "the header"

    def _fail(self, problem: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        raise LoadError(f"{self._path.name}: {self._subject} at byte {at}: {problem}.")

    def _need(self, nbytes: int, what: str) -> None:
        left = self._size - self._at
        if nbytes > left:
            self._fail(f"{what} needs {nbytes} bytes but {left} are left in the file")

    def _scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self._need(size, what)
        (value,) = struct.unpack_from("<" + code, self._mapped, self._at)
        self._at += size
        return value

    def _count(self, what: str, entry_bytes: int, limit: int) -> int:
        """A count of entries that take at least entry_bytes each; it must fit into the rest of the file."""
        at = self._at
        count: int = self._scalar("Q", f"the {what}")
        if count > limit or count * entry_bytes > self._size - self._at:
            self._fail(f"the {what} is {count}, more than the {self._size - self._at} bytes left can hold", at)
        return count

    def header(self) -> tuple[int, int, int]:
        """-> version, number of tensors, number of keys."""
        if self._mapped[:4] != b"GGUF":
            self._fail(f"the file does not begin with 'GGUF' but with {self._mapped[:4]!r}: it is not a GGUF file")
        self._at = 4
        version: int = self._scalar("I", "the version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (2, 3):
                self._fail("the file is big-endian: only little-endian files are supported", 4)
            self._fail(f"GGUF version {version} is not supported: use a file of version 2 or 3", 4)
        # Least bytes of a tensor: name 8, dimensions 4, format 4, offset 8; of a key: name 8, type 4, value 1.
        num_tensors = self._count("tensor count", 24, MAX_TENSORS)
        num_keys = self._count("key count", 13, MAX_KEYS)
        return version, num_tensors, num_keys

    def _string(self, what: str, limit: int | None = None) -> str:
        at = self._at
        length: int = self._scalar("Q", f"the length of {what}")
        if limit is not None and length > limit:
            self._fail(f"{what} is {length} bytes long, more than {limit}", at)
        self._need(length, what)
        try:
            text = self._mapped[self._at : self._at + length].decode()
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8")
        self._at += length
        return text

    def _strings(self, count: int) -> list[str]:
        """`count` strings; the loop that decides how long opening a file takes."""
        mapped, size, at = self._mapped, self._size, self._at
        length_at = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                begin = at + 8
                if begin > size:
                    self._fail(f"the length of string {len(texts)} lies beyond the end of the file", at)
                end = begin + length_at(mapped, at)[0]
                if end > size:
                    self._fail(f"string {len(texts)} is {end - begin} bytes long but {size - begin} are left", at)
                texts.append(mapped[begin:end].decode())
                at = end
        except UnicodeDecodeError:
            self._fail(f"string {len(texts)} is not UTF-8", at)
        self._at = at
        return texts

    def _array(self) -> Any:
        at = self._at
        kind = self._scalar("I", "the type of the array")
        if kind == _STRING:
            return self._strings(self._count("number of strings", 8, MAX_STRINGS))
        if kind not in _SCALARS:
            self._fail(f"arrays of value type {kind} are not supported", at)
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        count = self._count("number of values", dtype.itemsize, self._size)
        raw = np.frombuffer(self._mapped, np.uint8, count * dtype.itemsize, self._at)
        if kind == _BOOL and count and raw.max() > 1:
            self._fail("a boolean is neither 0 nor 1")
        self._at += raw.nbytes
        return np.frombuffer(raw.tobytes(), dtype)  # a copy, because the mapped bytes are not aligned

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string("the text")
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            self._fail(f"value type {kind} is unknown", self._at - 4)
        if kind == _BOOL and self._at < self._size and self._mapped[self._at] > 1:
            self._fail("a boolean is neither 0 nor 1")
        return self._scalar(_SCALARS[kind], "the value")

    def metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for i in range(count):
            self._subject = f"key {i}"
            at = self._at
            key = self._string("its name", MAX_NAME_BYTES)
            self._subject = f"key {key!r:.80}"
            if key in metadata:
                self._fail("the key stands twice in the file", at)
            kind = self._scalar("I", "the value type")
            value_at = self._at
            value = metadata[key] = self._value(kind)
            if key == "general.alignment" and (kind != _UINT32 or value == 0 or value & (value - 1)):
                self._fail(f"the alignment must be a 32-bit power of two, not {value!r:.40}", value_at)
        return metadata

    def _dimensions(self) -> tuple[int, ...]:
        """-> shape in numpy order."""
        at = self._at
        num = self._scalar("I", "the number of dimensions")
        if not 1 <= num <= MAX_DIMENSIONS:
            self._fail(f"it has {num} dimensions, not 1 to {MAX_DIMENSIONS}", at)
        dims = tuple(self._scalar("Q", "a dimension") for _ in range(num))
        if 0 in dims:
            self._fail(f"dimension {dims.index(0)} is 0", at)
        return dims[::-1]

    def tensors(self, count: int, alignment: int) -> dict[str, Tensor]:
        entries: dict[str, _Entry] = {}
        for i in range(count):
            self._subject = f"tensor {i}"
            at = self._at
            name = self._string("its name", MAX_NAME_BYTES)
            self._subject = f"tensor {name!r:.80}"
            if name in entries:
                self._fail("the tensor stands twice in the file", at)
            entries[name] = self._entry(alignment)
        data_start = -(-self._at // alignment) * alignment
        return {name: self._place(name, entry, data_start) for name, entry in entries.items()}

    def _entry(self, alignment: int) -> _Entry:
        at = self._at
        shape = self._dimensions()
        format_at = self._at
        id = self._scalar("I", "the format")
        format = FORMATS.get(id)
        if format is None:
            self._fail(f"format {id} is unknown", format_at)
        multiple = format.qblock_elements
        if shape[-1] % multiple:
            self._fail(f"rows of {format.name} hold a multiple of {multiple} elements, not {shape[-1]}", at)
        offset_at = self._at
        offset = self._scalar("Q", "the data offset")
        if offset % alignment:
            self._fail(f"its data offset {offset} is not a multiple of the alignment {alignment}", offset_at)
        return _Entry(format, shape, offset, offset_at)

    def _place(self, name: str, entry: _Entry, data_start: int) -> Tensor:
        nbytes = entry.format.nbytes(math.prod(entry.shape))
        start = data_start + entry.offset
        if start + nbytes > self._size:
            self._subject = f"tensor {name!r:.80}"
            self._fail(
                f"its {nbytes} bytes of data begin at byte {start} but the file ends at {self._size}", entry.offset_at
            )
        data = np.frombuffer(self._mapped, np.uint8, nbytes, start)
        return Tensor(name, entry.format, entry.shape, data.reshape(*entry.shape[:-1], -1), start)
