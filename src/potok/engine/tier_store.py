"""The second tier's file: blocks of KV in slots of one size, moved by threads of its own while the engine computes.

Two files for each fingerprint (what makes KV comparable: potok.engine.fingerprint):

    kv-<fingerprint>.potok    payloads: slot i at i * stride, one block of KV as it lies in memory
    kv-<fingerprint>.index    headers: slot i at i * header bytes; all zeros: nothing is there

A write takes the header away, writes the payload, then the new header. No write is forced to the device: what a killed
process has written is in the system's page cache, and what a crash of the machine tears is found out. For nothing is
believed: a read checks the header's sum, which begins with the fingerprint, the digest, the tokens and the payload's
sum before it says that the block is there. What fails costs the entry, never a wrong block.

One process at a time: the index is locked. Files are for their owner only, since they hold what people wrote.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from potok.core.tier import Done, Kind, Transfer
from potok.errors import LoadError

MAGIC = b"ptkv"
FORMAT = 1
#: magic, format, bytes of the key, serial number, digest, sum of the payload; then the key, and the sum of all that.
HEAD = struct.Struct("<4sHHQ16sI")
SUM = struct.Struct("<I")
ALIGNMENT = 4096  # of payloads: the page size of the system's cache
HEADER_ALIGNMENT = 64
THREADS = 2
#: How long closing waits for writes that have begun.
CLOSE_SECONDS = 5.0
#: A process that was killed lets go of its files only when its memory is freed, which takes a while for many GB.
LOCK_SECONDS = 2.0


class Store(Protocol):
    """Moves blocks between KV memory and a second tier, beside the engine's steps."""

    def begin(self, transfers: Iterable[Transfer]) -> None: ...

    def end(self) -> list[Done]:
        """Transfers that have ended since the last call. Never waits."""
        ...

    def close(self) -> None: ...


class NoStore:
    """Where there is no second tier, nobody asks for a transfer."""

    def begin(self, transfers: Iterable[Transfer]) -> None:
        assert not transfers, "there is nowhere to write to"

    def end(self) -> list[Done]:
        return []

    def close(self) -> None:
        """Nothing to end."""


class Locked(Exception):
    """Another process uses the files."""


class TierStore:
    """kv_block: gives the memory of a block, writable, all blocks alike. key_bytes: of a block's tokens."""

    def __init__(
        self,
        folder: str,
        fingerprint: str,
        *,
        num_bytes: int,
        key_bytes: int,
        kv_block: Callable[[int], memoryview],
        lock_seconds: float = LOCK_SECONDS,
    ) -> None:
        """num_bytes: of payloads at most. Raises LoadError when the folder cannot be used, and Locked.

        lock_seconds: how long to wait for another process to let go of the files.
        """
        self.payload_bytes = len(kv_block(0))
        self._stride = -(-self.payload_bytes // ALIGNMENT) * ALIGNMENT
        self._header_bytes = -(-(HEAD.size + key_bytes + SUM.size) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
        self._key_bytes = key_bytes
        self._kv_block = kv_block
        self._seed = zlib.crc32(fingerprint.encode())
        self.num_slots = num_bytes // self._stride
        if self.num_slots < 1:
            raise LoadError(
                f"swap_space is {num_bytes} bytes, but a KV block takes {self._stride} bytes; raise --swap-space."
            )
        name = Path(folder) / f"kv-{fingerprint}"
        try:
            os.makedirs(folder, exist_ok=True)
            self._index = os.open(f"{name}.index", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _lock(self._index, lock_seconds)
                _shorten(self._index, self.num_slots * self._header_bytes)
                self.found = self._scan()
                self._payloads = os.open(f"{name}.potok", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                _shorten(self._payloads, self.num_slots * self._stride)
            except BaseException:
                os.close(self._index)
                raise
        except OSError as error:
            raise LoadError(
                f"prefixes cannot be kept in {folder!r} ({error.strerror}); "
                "give --prefix-cache-dir a folder that this process may write to."
            ) from None
        self._failing = False
        self._jobs: dict[Kind, deque[Transfer]] = {Kind.READ: deque(), Kind.WRITE: deque()}
        self._done: deque[Done] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"potok-tier-{i}", daemon=True) for i in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, transfers: Iterable[Transfer]) -> None:
        """Transfers end in any order; reads go before writes."""
        with self._wake:
            for transfer in transfers:
                self._jobs[transfer.kind].append(transfer)
                self._wake.notify()

    def end(self) -> list[Done]:
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Ends what has been begun and lets others have the files. Reads that wait are dropped: nobody is left."""
        with self._wake:
            self._closing = True
            self._jobs[Kind.READ].clear()
            self._wake.notify_all()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # else the device hangs, and so would the files
            os.close(self._payloads)
            os.close(self._index)

    # -- what is there --------------------------------------------------------------------------------------------

    def _scan(self) -> list[tuple[bytes, int]]:
        """Digests and slots, written longest ago first. Sums are left to the reads: a million headers take no second.

        Of two slots with the same digest the younger counts.
        """
        size = self._header_bytes
        raw = np.zeros(os.fstat(self._index).st_size, np.uint8)
        _read(self._index, raw.data, 0)
        headers = raw[: len(raw) // size * size].reshape(-1, size)
        fields = headers[:, : HEAD.size].copy().view(_HEAD_TYPE).reshape(-1)
        there = np.flatnonzero(
            (fields["magic"] == MAGIC) & (fields["format"] == FORMAT) & (fields["key_bytes"] == self._key_bytes)
        )
        there = there[np.argsort(fields["serial"][there], kind="stable")]
        self._serial = int(fields["serial"][there[-1]]) + 1 if len(there) else 1
        digests = fields["digest"][there].tobytes()
        found = {digests[16 * i : 16 * i + 16]: slot for i, slot in enumerate(there.tolist())}
        return list(found.items())

    # -- on the threads -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._wake:
                while not any(self._jobs.values()) and not self._closing:
                    self._wake.wait()
                jobs = self._jobs[Kind.READ] or self._jobs[Kind.WRITE]
                if not jobs:
                    return
                transfer = jobs.popleft()
                serial = self._serial
                self._serial += 1
            started = time.monotonic_ns()
            ok = False
            try:
                if transfer.kind is Kind.WRITE:
                    self._write_block(transfer, serial)
                    ok = True
                else:
                    ok = self._read_block(transfer)
                self._failing = False
            except OSError as error:
                self._say(transfer, error)
            self._done.append(Done(transfer.id, ok, (time.monotonic_ns() - started) // 1000))

    def _write_block(self, t: Transfer, serial: int) -> None:
        block = self._kv_block(t.block)
        head = HEAD.pack(MAGIC, FORMAT, len(t.key), serial, t.digest, zlib.crc32(block)) + t.key
        header = (head + SUM.pack(zlib.crc32(head, self._seed))).ljust(self._header_bytes, b"\0")
        at = t.slot * self._header_bytes
        _write(self._index, bytes(self._header_bytes), at)
        _write(self._payloads, block, t.slot * self._stride)
        _write(self._index, header, at)

    def _read_block(self, t: Transfer) -> bool:
        """Whether the block now holds what the transfer asks for."""
        header = bytearray(self._header_bytes)
        if not _read(self._index, header, t.slot * self._header_bytes):
            return False
        magic, form, key_bytes, _, digest, payload_sum = HEAD.unpack_from(header)
        head = bytes(header[: HEAD.size + self._key_bytes])
        if (magic, form, key_bytes) != (MAGIC, FORMAT, self._key_bytes):
            return False
        if SUM.unpack_from(header, len(head))[0] != zlib.crc32(head, self._seed):
            return False
        if digest != t.digest or head[HEAD.size :] != t.key:
            return False
        block = self._kv_block(t.block)
        return _read(self._payloads, block, t.slot * self._stride) and zlib.crc32(block) == payload_sum

    def _say(self, t: Transfer, error: OSError) -> None:
        """One line for failures in a row, however many."""
        if not self._failing:
            verb = "read" if t.kind is Kind.READ else "write"
            logging.getLogger(__name__).warning(
                "the second tier of the prefix cache cannot %s: %s; prompts are computed instead", verb, error.strerror
            )
        self._failing = True


_HEAD_TYPE = np.dtype(
    [
        ("magic", "S4"),
        ("format", "<u2"),
        ("key_bytes", "<u2"),
        ("serial", "<u8"),
        ("digest", "V16"),
        ("payload_sum", "<u4"),
    ]
)


def _lock(file: int, seconds: float) -> None:
    """Until the file is closed, or the process ends."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Locked from None
        time.sleep(0.02)


def _shorten(file: int, size: int) -> None:
    """Frees what was used when more space was allowed."""
    if os.fstat(file).st_size > size:
        os.ftruncate(file, size)


def _read(file: int, into: bytearray | memoryview, at: int) -> bool:
    """Fills `into`; False when the file ends before. Raises OSError."""
    left = memoryview(into)
    while left:
        n = os.preadv(file, [left], at)
        if n == 0:
            return False
        left, at = left[n:], at + n
    return True


def _write(file: int, data: bytes | memoryview, at: int) -> None:
    """Raises OSError, also when nothing more can be written."""
    left = memoryview(data)
    while left:
        n = os.pwritev(file, [left], at)
        if n == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left, at = left[n:], at + n
