"""The second tier's files: what was written comes back to the byte, or not at all."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tier_kit import KEY_BYTES, PAYLOAD, STRIDE, Kit, digest

from potok.core.tier import Kind
from potok.engine.tier_store import HEAD, NoStore
from potok.engine.tier_store import Locked as InUse
from potok.errors import LoadError

HEADER = 128


def files(folder: Path, fingerprint: str = "abc") -> tuple[Path, Path]:
    """Index, payloads."""
    return folder / f"kv-{fingerprint}.index", folder / f"kv-{fingerprint}.potok"


def patch(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def test_blocks_come_back_in_this_process_and_in_the_next(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    for i in range(5):
        assert kit.write(i, 7 - i).ok
    assert all(kit.read(i, 7 - i).ok for i in range(5))
    assert not kit.read(1, 7).ok and not kit.read(1, 0).ok, "another's slot, and an empty one"
    kit.store.close()
    again = Kit(tmp_path)
    assert again.store.found == [(digest(i), 7 - i) for i in range(5)], "written longest ago first"
    assert all(again.read(i, 7 - i).ok for i in range(5))
    again.store.close()
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in files(tmp_path))


def test_many_at_a_time(tmp_path: Path) -> None:
    kit = Kit(tmp_path, slots=64, blocks=128)
    kit.memory[:64] = np.random.default_rng(1).integers(0, 256, (64, PAYLOAD), np.uint8)
    kit.wait([kit.begin(Kind.WRITE, i, i, i) for i in range(64)])
    done = kit.wait([kit.begin(Kind.READ, i, i, 64 + i) for i in range(64)])
    assert all(d.ok for d in done)
    assert np.array_equal(kit.memory[:64], kit.memory[64:])
    kit.store.close()


def test_a_slot_is_used_again(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    kit.write(1, 3)
    kit.write(2, 3)
    assert kit.read(2, 3).ok and not kit.read(1, 3).ok
    kit.write(2, 5)
    kit.store.close()
    again = Kit(tmp_path)
    assert again.store.found == [(digest(2), 5)], "of two with the same name the younger"
    again.write(3, 0)
    again.store.close()
    assert Kit(tmp_path).store.found == [(digest(2), 5), (digest(3), 0)], "serial numbers go on"


@pytest.mark.parametrize(
    "at", [0, 4, 6, 8, 16, 24, 31, 32, HEAD.size, HEAD.size + KEY_BYTES - 1, HEAD.size + KEY_BYTES]
)
def test_a_flipped_bit_in_a_header(tmp_path: Path, at: int) -> None:
    kit = Kit(tmp_path)
    kit.write(1, 0)
    kit.write(2, 1)
    index, _ = files(tmp_path)
    byte = index.read_bytes()[HEADER + at]
    patch(index, HEADER + at, bytes([byte ^ 4]))
    assert not kit.read(2, 1).ok and kit.read(1, 0).ok
    kit.store.close()
    again = Kit(tmp_path)
    assert (digest(1), 0) in again.store.found and again.read(1, 0).ok and not again.read(2, 1).ok
    again.store.close()


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, PAYLOAD - 1])
def test_a_flipped_bit_in_a_payload(tmp_path: Path, at: int) -> None:
    kit = Kit(tmp_path)
    kit.write(1, 0)
    kit.write(2, 1)
    _, payloads = files(tmp_path)
    byte = payloads.read_bytes()[STRIDE + at]
    patch(payloads, STRIDE + at, bytes([byte ^ 64]))
    assert not kit.read(2, 1).ok and kit.read(1, 0).ok
    kit.store.close()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("left", [0, 1, 60, 100, 5000])
def test_a_file_that_was_cut_off(tmp_path: Path, which: int, left: int) -> None:
    kit = Kit(tmp_path)
    kit.write(1, 0)
    kit.write(2, 1)
    kit.store.close()
    unit = (HEADER, STRIDE)[which]
    os.truncate(files(tmp_path)[which], min(unit + left, 2 * unit - 60) if which == 0 else unit + left)
    again = Kit(tmp_path)
    assert again.read(1, 0).ok and not again.read(2, 1).ok
    assert again.write(2, 1).ok and again.read(2, 1).ok
    again.store.close()


def test_garbage_instead_of_an_index(tmp_path: Path) -> None:
    index, payloads = files(tmp_path)
    index.write_bytes(os.urandom(1000))
    payloads.write_bytes(os.urandom(STRIDE * 3 + 17))
    kit = Kit(tmp_path)
    assert kit.store.found == []
    assert kit.write(1, 0).ok and kit.read(1, 0).ok
    kit.store.close()


def test_another_fingerprint_finds_nothing_even_in_a_renamed_file(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    kit.write(1, 0)
    kit.store.close()
    other = Kit(tmp_path, fingerprint="other")
    assert other.store.found == []
    other.store.close()
    for mine, theirs in zip(files(tmp_path), files(tmp_path, "other"), strict=True):
        mine.rename(theirs)
    renamed = Kit(tmp_path, fingerprint="other")
    assert not renamed.read(1, 0).ok
    renamed.store.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    with pytest.raises(InUse):
        Kit(tmp_path, lock_seconds=0)
    closing = threading.Timer(0.1, kit.store.close)
    closing.start()
    kit = Kit(tmp_path)
    closing.join()
    Kit(tmp_path, fingerprint="other").store.close()
    kit.write(1, 0)
    kit.store.close()
    again = Kit(tmp_path)
    assert again.read(1, 0).ok
    again.store.close()


def test_less_space_than_the_last_time(tmp_path: Path) -> None:
    kit = Kit(tmp_path, slots=8)
    for i in range(8):
        kit.write(i, i)
    kit.store.close()
    small = Kit(tmp_path, slots=3)
    assert small.store.found == [(digest(i), i) for i in range(3)]
    assert files(tmp_path)[1].stat().st_size <= 3 * STRIDE
    small.store.close()
    with pytest.raises(LoadError, match="--swap-space"):
        Kit(tmp_path, slots=0)


def test_a_folder_is_made_and_one_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    Kit(tmp_path / "a" / "b").store.close()
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(LoadError, match="--prefix-cache-dir") as caught:
            Kit(folder)
        assert str(folder) in str(caught.value)


def test_the_folder_may_vanish_while_the_store_is_open(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    kit.write(1, 0)
    for path in files(tmp_path):
        path.unlink()
    assert kit.read(1, 0).ok and kit.write(2, 1).ok and kit.read(2, 1).ok
    kit.store.close()


def test_a_full_disk_costs_entries_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Python ignores SIGXFSZ, so a write past the limit is an OSError, as one to a full disk is."""
    kit = Kit(tmp_path)
    kit.write(1, 0)
    kit.write(2, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * STRIDE + 5000, hard))
    try:
        failed = [kit.write(i, i).ok for i in range(2, 8)]
        assert not any(failed)
        assert kit.write(9, 1).ok and kit.read(9, 1).ok and kit.read(1, 0).ok
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(caplog.records) == 1 and "cannot write" in caplog.text
    assert not kit.read(2, 2).ok, "half a payload"
    assert kit.write(2, 2).ok and kit.read(2, 2).ok
    kit.store.close()
    assert {slot for _, slot in Kit(tmp_path).store.found} == {0, 1, 2}


def test_killed_in_the_middle_of_writing(tmp_path: Path) -> None:
    for attempt in range(3):
        program = [sys.executable, str(Path(__file__).with_name("tier_kit.py")), str(tmp_path)]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(5 + attempt):
                last = int(process.stdout.readline())
            process.kill()
        kit = Kit(tmp_path)
        slots = dict(kit.store.found)
        good = 0
        for name in range(last + 100):
            if digest(name) in slots:
                good += kit.read(name, slots[digest(name)]).ok
        assert good == len(slots) >= 8 - 4, "at most the writes under way are lost, and nothing is torn"
        kit.store.close()


def test_closing_ends_what_has_begun(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    kit.memory[0] = 7
    for i in range(8):
        kit.begin(Kind.WRITE, i, i, 0)
    kit.store.close()
    assert len(Kit(tmp_path).store.found) == 8


def test_a_million_headers_are_read_at_once(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    kit.write(1, 0)
    kit.store.close()
    index, _ = files(tmp_path)
    header = np.frombuffer(index.read_bytes()[:HEADER], np.uint8)
    num = 200_000
    headers = np.tile(header, (num, 1))
    headers[:, 16:24] = np.arange(num, dtype=np.uint64).view(np.uint8).reshape(num, 8)  # of the digests
    index.write_bytes(headers.tobytes())
    started = time.thread_time()
    kit = Kit(tmp_path, slots=num)
    assert time.thread_time() - started < 2, "0.1 s by itself"
    assert len(kit.store.found) == num
    kit.store.close()


def test_without_a_tier_nothing_is_moved() -> None:
    store = NoStore()
    store.begin([])
    assert store.end() == []
    store.close()
