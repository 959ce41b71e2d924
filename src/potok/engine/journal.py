"""The journal: a file with every call to the scheduler, in order, and a digest of what came of each.

    potok journal 1
    <sum> {"version":...,"started":...,"redacted":...,"settings":...}
    <sum> [["schedule",81234567],"5f0c...",[[17,18],[1,64]]]
    ...

Lines of JSON, so that a person can read what happened. Each has the CRC-32 of itself and all lines before it, so that
nothing is changed, lost or moved unnoticed. Whole lines only: what a killed process was about to write is missing at
the end, and never more than the last second.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import stat
import zlib
from array import array
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from hashlib import blake2b
from typing import BinaryIO, NamedTuple, Protocol, cast

import msgspec

from potok import __version__
from potok.core.batch import Batch
from potok.engine.calls import Call, Outcome
from potok.engine.scheduling import SchedulerSettings
from potok.errors import LoadError

MAGIC = b"potok journal 1\n"
#: Lines are written together, when there are so many bytes of them or so much time has passed on the engine's clock.
BUFFER_BYTES = 1 << 16
FLUSH_US = 1_000_000
DIGEST_BYTES = 8
SUM_CHARS = 8


class Version(msgspec.Struct, frozen=True):
    """The part of a header that every version has."""

    version: str


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """version: of potok. started: UTC. redacted: every token id stands for another."""

    version: str
    started: datetime
    redacted: bool
    settings: SchedulerSettings


class Shares(NamedTuple):
    """Who takes part in a step: requests, and the number of tokens of each."""

    ids: list[int]
    counts: list[int]

    @classmethod
    def of(cls, batch: Batch) -> Shares:
        return cls([s.id for s in batch.segments], [len(s.tokens) for s in batch.segments])


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One call.

    came: what came of it: a digest, "" for nothing, or "raised ..." where the call met a bug.
    shares: of a batch; None: the same as of the batch before.
    """

    call: Call
    came: str
    shares: Shares | None = None


class Damaged(Exception):
    """A line that is not what was written there, or that does not follow the one before it."""


def outcome_of(outcome: Outcome) -> str:
    """Two outcomes that differ in anything have different digests."""
    if not outcome:
        return ""
    told = _told(outcome) if isinstance(outcome, Batch) else outcome
    return blake2b(msgspec.msgpack.encode(told), digest_size=DIGEST_BYTES).hexdigest()


def _told(batch: Batch) -> tuple[object, ...]:
    """All of a batch. By hand, since this is most of what a journal costs: a third of the time of a hook for arrays."""
    segments = cast("Iterable[tuple[int, int, array[int], array[int], bool, range]]", batch.segments)
    told = [
        (id, start, tokens.tobytes(), blocks.tobytes(), sample, rate.start, rate.stop)
        for id, start, tokens, blocks, sample, rate in segments
    ]
    return batch.step, told, batch.copies


def raised(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error}"


class File(Protocol):
    """An unbuffered binary file."""

    def write(self, data: memoryview, /) -> int | None: ...

    def close(self) -> None: ...


class Journal:
    """Writes records. A write that fails ends the journal, and nothing else: it says so once, and the engine goes on.

    No write is forced to the device: what a killed process has written is in the system's memory.
    """

    def __init__(self, file: File, header: Header) -> None:
        self._file: File | None = file
        self._lines = bytearray(MAGIC)
        self._encoder = msgspec.json.Encoder()
        self._sum = 0
        self._flushed_us = 0
        self._shares = Shares([], [])
        self._add(header)
        self.flush()

    def write(self, call: Call, outcome: Outcome) -> None:
        if self._file is None:
            return
        shares = None
        if isinstance(outcome, Batch):
            now = Shares.of(outcome)
            if now != self._shares:
                shares = self._shares = now
        self._add(Record(call, outcome_of(outcome), shares))

    def write_raised(self, call: Call, error: Exception) -> None:
        self._add(Record(call, raised(error)))

    def tick(self, now_us: int) -> None:
        """now_us: of the engine's clock, about as often as it makes a step."""
        if len(self._lines) >= BUFFER_BYTES or now_us - self._flushed_us >= FLUSH_US:
            self._flushed_us = now_us
            self.flush()

    def flush(self) -> None:
        if self._file is None:
            return
        left = memoryview(bytes(self._lines))
        self._lines.clear()
        try:
            while left:
                n = self._file.write(left)
                if not n:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                left = left[n:]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, line: Header | Record) -> None:
        if self._file is None:
            return
        text = self._encoder.encode(line)
        self._sum = zlib.crc32(text, self._sum)
        self._lines += b"%08x %b\n" % (self._sum, text)

    def _give_up(self, error: OSError) -> None:
        logging.getLogger(__name__).warning(
            "the journal cannot be written: %s; it ends here, and the engine goes on without", error.strerror
        )
        file, self._file = self._file, None
        assert file is not None
        try:
            file.close()
        except OSError:  # said already
            return


def create(path: str, settings: SchedulerSettings, redacted: bool) -> tuple[Journal, str]:
    """A new journal, and where the one that was there is now, or "". Raises LoadError."""
    check_place(path)
    try:
        older = _move_older(path)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)  # it holds what people wrote
    except OSError as error:
        raise _unusable(path, error.strerror) from None
    header = Header(version=__version__, started=datetime.now(UTC), redacted=redacted, settings=settings)
    return Journal(io.FileIO(file, "w"), header), older


def check_place(path: str) -> None:
    """Raises LoadError where no journal can be begun. Changes nothing."""
    try:
        there = os.stat(path)
        if not stat.S_ISREG(there.st_mode):
            raise _unusable(path, "it is no file")
        with open(path, "rb") as file:
            if there.st_size and file.read(len(MAGIC)) != MAGIC:
                raise _unusable(path, "it holds something else")
    except FileNotFoundError:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise _unusable(path, f"there is no folder {folder}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _unusable(path, "no file can be made there") from None
    except OSError as error:
        raise _unusable(path, error.strerror) from None


def _move_older(path: str) -> str:
    """A journal is what is left of a bad afternoon: a start never overwrites one."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return ""
    n = 1
    while os.path.exists(f"{path}.{n}"):
        n += 1
    os.rename(path, f"{path}.{n}")
    return f"{path}.{n}"


def _unusable(path: str, why: str | None) -> LoadError:
    return LoadError(
        f"the journal cannot be written to {path!r} ({why}); give --journal a new file in a folder that this process "
        "may write to."
    )


class JournalReader:
    """Reads a journal from its beginning, also one that is still being written."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Raises LoadError when it is no journal, or none that this version can read."""
        self._file = file
        self._sum = 0
        self.line = 1
        self.num_bytes = len(MAGIC)  # read so far, in whole lines
        self.torn = 0  # bytes at the end that are not a whole line, once all is read
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            if magic.startswith(MAGIC[:-2]):
                raise LoadError(f"{name} is a journal of another format than this version of potok writes.")
            raise LoadError(f"{name} is no journal: it does not begin with {MAGIC.decode().strip()!r}.")
        try:
            text = self._next()
        except Damaged as error:
            raise LoadError(f"{name} cannot be read: {error}.") from None
        if text is None:
            raise LoadError(f"{name} is a journal without anything in it.")
        try:
            version = msgspec.json.decode(text, type=Version).version
            if version != __version__:
                raise LoadError(
                    f"{name} was written by potok {version}, and this is {__version__}, which may decide otherwise; "
                    f"replay it with potok {version}."
                )
            self.header = msgspec.json.decode(text, type=Header)
        except msgspec.DecodeError as error:
            raise LoadError(f"{name} was written by another build of potok: {error}.") from None

    def records(self) -> Iterator[Record]:
        """Each with its `shares`. Raises Damaged."""
        decoder = msgspec.json.Decoder(Record)
        before = Shares([], [])
        while (text := self._next()) is not None:
            try:
                record = decoder.decode(text)
            except msgspec.DecodeError as error:
                raise Damaged(f"line {self.line} is no record: {error}") from None
            before = record.shares or before
            yield msgspec.structs.replace(record, shares=before)

    def _next(self) -> bytes | None:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            self.torn = len(line)
            return None
        self.line += 1
        self.num_bytes += len(line)
        text = line[SUM_CHARS + 1 : -1]
        self._sum = zlib.crc32(text, self._sum)
        if line[: SUM_CHARS + 1] != b"%08x " % self._sum:
            raise Damaged(f"line {self.line} is damaged, or something before it is missing: its sum does not fit")
        return text
