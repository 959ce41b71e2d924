"""The journal: what it holds is enough to see every batch again, anywhere, and nothing in it changes unnoticed."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import json
import logging
import os
import re
import signal
import struct
import subprocess
import sys
import time
import zlib
from array import array
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import journal_kit
import pytest
from journal_kit import NAMESPACE, SALT, TIER, Afternoon, record, replayed, settings

from potok import __version__
from potok.config import EngineConfig
from potok.core.batch import Batch, Copy, Segment
from potok.core.radix import Domain
from potok.core.request import Request
from potok.core.scheduler import Scheduler
from potok.core.tier import Done
from potok.engine import calls, resolve
from potok.engine.journal import BUFFER_BYTES, FLUSH_US, MAGIC, Header, Journal, create, outcome_of
from potok.engine.recorded import RecordedScheduler
from potok.engine.redacted import Mask, RedactedScheduler
from potok.engine.scheduling import SchedulerSettings, build_scheduler
from potok.errors import LoadError

READ_ONLY = {"wake_at", "place_us", "top_prefixes"}

MIXES = {
    "longest prefix": {"policy": "longest_prefix", "tier": TIER},
    "priority": {"policy": "priority"},
    "fair": {"policy": "fair", "target_us": 0},
    "static": {"policy": "shortest", "batching": "static"},
    "dynamic": {"batching": "dynamic", "padding_rows": False, "max_tokens_per_batch": 100, "tier": TIER},
    "delayed": {"batching": "continuous", "delay_factor": 1.5},
    "one by one": {"batching": "off", "prefix_caching": False},
}


def lines_of(path: Path) -> list[bytes]:
    """The header and all records, without their sums."""
    return [line[9:-1] for line in path.read_bytes().splitlines(keepends=True)[1:]]


def summed(lines: list[bytes]) -> bytes:
    """A journal of these lines, as whole as if they had been written so."""
    data, total = MAGIC, 0
    for line in lines:
        total = zlib.crc32(line, total)
        data += b"%08x %b\n" % (total, line)
    return data


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("journal") / "j"
    record(path, Afternoon(200), settings(tier=TIER))
    return path


# -- the same again ---------------------------------------------------------------------------------------------------


def test_five_thousand_requests_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "j"
    record(path, Afternoon(5000), settings(policy="longest_prefix", num_blocks=140, tier=TIER))
    command = [sys.executable, "-c", "from potok.cli import main; main()", "replay", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONHASHSEED": "4711"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith("\nidentical")
    told = {line.split()[0]: [int(word) for word in re.findall(r"\d+", line)] for line in done.stdout.splitlines()}
    (calls, steps, *_), (requests, refused, cancels, preemptions) = told["replayed"], told["requests"]
    assert calls > 9000 and steps > 1000 and requests >= 5000 and refused > 10 and cancels > 100 and preemptions > 20
    assert b'"transferred"' in path.read_bytes() and b",false," in path.read_bytes(), "reads and writes that failed"


@pytest.mark.parametrize("redacted", [False, True])
@pytest.mark.parametrize("changes", MIXES.values(), ids=MIXES)
def test_every_mode_and_policy(tmp_path: Path, changes: dict, redacted: bool) -> None:
    record(tmp_path / "j", Afternoon(300), settings(**changes), redacted=redacted)
    again = replayed((tmp_path / "j").read_bytes())
    assert not again.difference
    assert again.requests >= 300 and again.steps > 50


@pytest.mark.parametrize("changes", MIXES.values(), ids=MIXES)
def test_recording_changes_nothing(tmp_path: Path, changes: dict) -> None:
    asked = settings(**changes)
    plain = Afternoon(200).play(build_scheduler(asked, Scheduler))
    assert record(tmp_path / "j", Afternoon(200), asked) == plain
    # Of prompts that share a part of a block one is copied from, another if their ids are sorted otherwise; and what
    # is copied from counts as needed for a step. So decisions may differ, though never what a model would answer.
    asked = settings(**{**changes, "prefix_caching": False, "tier": None})
    plain = Afternoon(200).play(build_scheduler(asked, Scheduler))
    assert record(tmp_path / "r", Afternoon(200), asked, redacted=True) == plain


def test_a_bug_is_recorded_and_met_again(tmp_path: Path) -> None:
    journal, _ = create(str(tmp_path / "j"), settings(), redacted=False)
    scheduler = build_scheduler(settings(), RecordedScheduler)
    scheduler.record_to(journal)
    for id in (1, 2):
        scheduler.submit(Request(id, array("i", (1, 2)), 2, 3))
    with pytest.raises(AssertionError):
        scheduler.submit(Request(2, array("i", (1, 2)), 2, 3))
    with pytest.raises(KeyError):
        scheduler.transferred([Done(1, True, 1)])
    journal.close()
    assert [json.loads(line)[1] for line in lines_of(tmp_path / "j")[3:]] == [
        "raised AssertionError: request 2 is live already",
        "raised KeyError: 1",
    ]
    again = replayed((tmp_path / "j").read_bytes())
    assert not again.difference and again.calls == 4


# -- nothing is forgotten ---------------------------------------------------------------------------------------------


def test_every_call_that_changes_something_is_recorded() -> None:
    public = {name for name, it in vars(Scheduler).items() if inspect.isfunction(it) and not name.startswith("_")}
    assert public - READ_ONLY == public & vars(RecordedScheduler).keys()


def test_every_field_of_a_request_is_recorded() -> None:
    names = [field.name for field in dataclasses.fields(Request)]
    assert list(calls.Submit.__struct_fields__) == names[: names.index("phase")]


def test_every_argument_of_a_scheduler_is_recorded() -> None:
    given: set[str] = set()

    class Watched(Scheduler):
        def __init__(self, *args: object, **kwargs: object) -> None:
            given.update(inspect.signature(Scheduler).bind(*args, **kwargs).arguments)
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    build_scheduler(settings(tier=TIER), Watched)
    assert given == inspect.signature(Scheduler).parameters.keys() - {"checked"}
    assert not SchedulerSettings.__struct_defaults__, "a setting with a default can be forgotten"


# -- what was changed -------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_noticed(journal: Path) -> None:
    data, rng = journal.read_bytes(), Random(1)
    for _ in range(40):
        at = rng.randrange(len(data))
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        try:
            again = replayed(bytes(flipped))
        except LoadError:
            assert at < 1000, "only the head says what the file is"
            continue
        assert again.difference or (again.torn and at == len(data) - 1)
        if again.difference:
            line = data.count(b"\n", 0, at) + 1
            assert again.difference[0].startswith(f"line {line} ")


@pytest.mark.parametrize("kind", ["submit", "cancel", "schedule", "transferred", "take_transfers", "commit"])
def test_a_line_that_is_gone_or_moved_is_noticed(journal: Path, kind: str) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if i > len(lines) // 2 and f'[["{kind}"'.encode() in line)
    for changed in (lines[:at] + lines[at + 1 :], [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]):
        again = replayed(b"".join(changed))
        assert again.difference[0].startswith(f"line {at + 1} is damaged, or something before it is missing")
        assert again.calls == at - 2, "everything before it has been replayed"


def test_the_first_difference_is_shown_with_the_state_around_it(journal: Path) -> None:
    """Changes with sums that fit, as if another scheduler had decided."""
    lines = lines_of(journal)
    commits = [i for i, line in enumerate(lines) if line.startswith(b'[["commit"')]
    middle = len(commits) // 2
    for step, at in enumerate(commits[middle : middle + 10], middle + 1):  # noqa: B007
        call, came, *rest = json.loads(lines[at])
        call[1][-1] = (call[1][-1] + 1) % 100
        changed = json.dumps([call, came, *rest]).encode()
        again = replayed(summed([*lines[:at], changed, *lines[at + 1 :]]))
        if again.difference:
            break  # else that row's request had been cancelled, or the row only rated: nobody takes its id
    assert again.difference[0].startswith(f"line {at + 2}, step {step}: Commit(sampled_ids=[")
    assert again.difference[1] == f"  expected: {came}"
    assert again.calls == at - 1 and again.steps == step

    again = replayed(summed(lines[:at] + lines[at + 1 :]))
    assert "raised AssertionError: " in again.difference[2], "something that cannot be while a step is in flight"
    state = next(line for line in again.difference if " running, " in line)
    assert "waiting; 200 blocks of 4 tokens: " in state and "  running: request " in "\n".join(again.difference)

    submits = [i for i, line in enumerate(lines) if line.startswith(b'[["submit"')]
    again = replayed(summed(lines[: submits[0]] + lines[submits[0] + 1 :]))
    assert any("expected" in line and "found no part" in line for line in again.difference)


def test_anything_that_a_batch_says_is_in_its_digest() -> None:
    segment = Segment(1, 8, array("i", (5, 6)), array("i", (0, 1, 2)), True, range(9, 10))
    batch = Batch(3, (segment, segment._replace(id=2)), (Copy(4, 2),))
    values = {"id": 7, "start": 9, "tokens": array("i", (5, 7)), "blocks": array("i", (0, 2, 1)), "sample": False}
    others = [segment._replace(**{name: value}) for name, value in values.items()]
    others += [segment._replace(rate=range(*ends)) for ends in ((8, 10), (9, 11), (0, 0))]
    assert {name for name in Segment._fields for other in others if getattr(other, name) != getattr(segment, name)} == {
        *Segment._fields
    }
    changed = [batch._replace(segments=(other, batch.segments[1])) for other in others]
    changed += [batch._replace(segments=batch.segments[:1]), Batch(4, batch.segments, batch.copies)]
    changed += [batch._replace(copies=copies) for copies in ((), (Copy(2, 4),))]
    assert Batch._fields == ("step", "segments", "copies")
    assert len({outcome_of(each) for each in (batch, *changed)}) == len(changed) + 1
    assert outcome_of(Batch(3, (segment, segment._replace(id=2)), (Copy(4, 2),))) == outcome_of(batch)


def test_who_takes_part_is_written_when_it_changes(tmp_path: Path) -> None:
    journal, _ = create(str(tmp_path / "j"), settings(), redacted=False)
    scheduler = build_scheduler(settings(), RecordedScheduler)
    scheduler.record_to(journal)
    for id in (1, 2):
        scheduler.submit(Request(id, array("i", (id,)), 1, 8))
    for now in range(4):
        if now == 2:
            scheduler.cancel(1)
        batch = scheduler.schedule(now)
        assert batch is not None
        scheduler.commit(batch, [5] * batch.num_sampled, 9)
    journal.close()
    lines = lines_of(tmp_path / "j")
    steps = [i for i, line in enumerate(lines) if line.startswith(b'[["schedule"')]
    assert [json.loads(lines[i])[2] for i in steps] == [[[1, 2], [1, 1]], None, [[2], [1]], None]
    lines[steps[1]] = json.dumps([["schedule", 1], "0" * 16, None]).encode()
    again = replayed(summed(lines))
    assert any("the same tokens of the same requests" in line for line in again.difference)
    assert "    request 2: 1 from 1, ids [5], blocks [1]" in again.difference


def test_segments_that_differ_are_named(tmp_path: Path) -> None:
    record(tmp_path / "j", Afternoon(50), settings())
    lines = lines_of(tmp_path / "j")
    at = next(i for i, line in enumerate(lines) if line.startswith(b'[["schedule"') and line.count(b",") > 6)
    call, came, (ids, counts) = json.loads(lines[at])

    def difference(shares: object, came: str = "0" * 16) -> list[str]:
        return replayed(summed([*lines[:at], json.dumps([call, came, shares]).encode(), *lines[at + 1 :]])).difference

    told = difference([ids, [counts[0] + 1, *counts[1:]]])
    assert f"  request {ids[0]}: expected {counts[0] + 1} tokens, found {counts[0]} tokens" in told
    assert "  the same segments in another order" in difference([ids[::-1], counts[::-1]])
    told = difference([ids, counts])
    assert any("the same tokens of the same requests" in line for line in told)
    assert any(line.startswith(f"    request {ids[0]}: {counts[0]} from ") for line in told)
    assert not difference([ids, counts], came), "unchanged"


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_torn_end_is_left_out(journal: Path) -> None:
    data, rng = journal.read_bytes(), Random(2)
    whole = replayed(data)
    head = data.index(b"\n", len(MAGIC)) + 1
    for _ in range(12):
        cut = rng.randrange(head, len(data))
        again = replayed(data[:cut])
        assert not again.difference
        assert again.torn == cut - (data.rindex(b"\n", 0, cut) + 1)
        assert again.calls == data.count(b"\n", head, cut) <= whole.calls


def test_a_killed_writer_leaves_all_but_the_last_second(tmp_path: Path) -> None:
    path = tmp_path / "j"
    writer = subprocess.Popen([sys.executable, journal_kit.__file__, str(path)])
    deadline = time.monotonic() + 30
    while not path.exists() or path.stat().st_size < 3 * BUFFER_BYTES:
        assert time.monotonic() < deadline and writer.poll() is None
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    again = replayed(path.read_bytes())
    assert not again.difference and again.steps > 50


def test_what_is_recorded_is_written_within_a_second_and_not_at_each_call(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal, _ = create(str(path), settings(), redacted=False)
    scheduler = build_scheduler(settings(), RecordedScheduler)
    scheduler.record_to(journal)
    scheduler.schedule(5_000_000)
    at_first = path.stat().st_size
    for i in range(1, 20):
        scheduler.schedule(5_000_000 + i * FLUSH_US // 20)
        assert path.stat().st_size == at_first
    scheduler.schedule(5_000_000 + FLUSH_US)
    assert replayed(path.read_bytes()).calls == 21
    scheduler.cancel(1)
    journal.close()
    journal.close()
    assert replayed(path.read_bytes()).calls == 22


class Full:
    """A device with so much room, which takes what it can."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.data = b""
        self.closed = 0

    def write(self, data: memoryview, /) -> int:
        taken = bytes(data[: min(self.room, 1000)])
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(taken)
        self.data += taken
        return len(taken)

    def close(self) -> None:
        self.closed += 1
        raise OSError(errno.EIO, "not even that")


def test_a_full_disk_ends_the_journal_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    device = Full(100_000)
    header = Header(version=__version__, started=datetime.now(UTC), redacted=False, settings=settings())
    scheduler = build_scheduler(settings(), RecordedScheduler)
    scheduler.record_to(Journal(device, header))
    with caplog.at_level(logging.WARNING):
        answers = Afternoon(600).play(scheduler)
    assert answers == Afternoon(600).play(build_scheduler(settings(), Scheduler))
    assert ["No space left on device" in r.message for r in caplog.records] == [True], "said once"
    assert len(device.data) == 100_000 and device.closed == 1
    again = replayed(device.data)
    assert not again.difference and again.torn and again.steps > 20


# -- places -----------------------------------------------------------------------------------------------------------


def test_an_older_journal_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "j"
    older = []
    for seed in range(3):
        record(path, Afternoon(20, seed), settings())
        older.append(path.read_bytes())
    assert [(tmp_path / name).read_bytes() for name in ("j.1", "j.2", "j")] == older
    assert len(list(tmp_path.iterdir())) == 3
    assert (path.stat().st_mode & 0o777) == 0o600, "it holds what people wrote"
    (tmp_path / "empty").touch()
    record(tmp_path / "empty", Afternoon(5), settings())
    assert not (tmp_path / "empty.1").exists()


@pytest.mark.parametrize("kind", ["something else", "folder", "pipe", "no folder", "under a file"])
def test_a_place_that_cannot_be_used_ends_the_start(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "j"
    match kind:
        case "something else":
            path.write_bytes(b"GGUF and so on")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "no folder":
            path = tmp_path / "nowhere" / "j"
        case "under a file":
            path.write_bytes(b"x")
            path = path / "j"
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(LoadError, match="--journal") as caught:
        create(str(path), settings(), redacted=False)
    assert repr(str(path)) in str(caught.value)
    assert not path.is_file() or path.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"journal_redact": True}, "journal_redact"),
        ({"journal": "j", "journal_redact": True, "prefix_cache_dir": "kv"}, "prefix_cache_dir"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict, names: str) -> None:
    with pytest.raises(LoadError, match=names):
        resolve.check(EngineConfig(model="m", **changes), 1000)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no journal"),
        (b"GGUF" * 100, "no journal"),
        (b"potok journal 2\nxyz", "another format"),
        (MAGIC, "without anything"),
        (MAGIC + b"0123", "without anything"),
        (MAGIC + b"00000000 {}\n", "line 2 is damaged"),
        (summed([b'{"version":"0.0.9"}']), "potok 0.0.9"),
        (summed([b'{"version":"0.1.0"}']), "another build"),
        (summed([b'["version"]']), "another build"),
    ],
)
def test_what_is_no_journal_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(LoadError, match=says):
        replayed(data)


# -- redaction --------------------------------------------------------------------------------------------------------


def test_a_redacted_journal_tells_no_ids_and_no_names(tmp_path: Path) -> None:
    afternoon, asked = Afternoon(300), settings(num_blocks=5000)  # room enough for both to decide alike
    record(tmp_path / "plain", afternoon, asked)
    record(tmp_path / "redacted", afternoon, asked, redacted=True)
    plain, redacted = (tmp_path / "plain").read_bytes(), (tmp_path / "redacted").read_bytes()
    assert not replayed(redacted).difference
    prompts = [tokens for name, _, tokens, *_ in submitted(plain) if len(tokens) >= 4]
    assert len(prompts) > 200
    for tokens in prompts:
        for at in range(len(tokens) - 3):
            part = tokens[at : at + 4]
            text, number = ",".join(map(str, part)).encode(), struct.pack("<4i", *part)
            assert text in plain
            assert text not in redacted and number not in redacted
    for name in (SALT, NAMESPACE, "bob"):
        assert name.encode() in plain
        assert name.encode() not in redacted
    stops = {stop for _, _, _, _, _, stop_ids, *_ in submitted(redacted) for stop in stop_ids}
    assert len(stops) > 100, "the common one, and one for each request"
    # What is left is the shape: the same requests have the same lengths, and are equal where they were equal.
    hidden = [call[2] for call in submitted(redacted)]
    shown = [call[2] for call in submitted(plain)]
    mask = {a: b for x, y in zip(shown, hidden, strict=True) for a, b in zip(x, y, strict=True)}
    assert len(set(mask.values())) == len(mask) > 1000
    assert all([mask[token] for token in x] == y for x, y in zip(shown, hidden, strict=True))


def submitted(data: bytes) -> list[list]:
    lines = [json.loads(line[9:]) for line in data.splitlines()[2:]]
    return [call for call, *_ in lines if call[0] == "submit"]


def test_a_mask_is_a_permutation_drawn_anew() -> None:
    one, other = Mask(5000), Mask(5000)
    assert sorted(one.hidden) == sorted(one.shown) == list(range(5000))
    assert one.hidden != other.hidden
    assert sum(i == hidden for i, hidden in enumerate(one.hidden)) < 20, "few stay where they were"
    assert all(one.shown[one.hidden[id]] == id for id in range(5000))
    assert one.hide_namespace("alice") != other.hide_namespace("alice")
    assert one.hide_namespace("") == ""


def test_what_the_cache_holds_is_told_as_it_was_said(tmp_path: Path) -> None:
    journal, _ = create(str(tmp_path / "j"), settings(), redacted=True)
    scheduler = build_scheduler(settings(), RedactedScheduler)
    scheduler.hide_with(Mask(journal_kit.VOCAB))
    scheduler.record_to(journal)
    plain = build_scheduler(settings(), Scheduler)
    domains = [Domain(namespace=name, salt=salt) for name in ("", NAMESPACE) for salt in ("", SALT)]
    for each in (plain, scheduler):
        for id, domain in enumerate(domains):
            each.submit(Request(id, array("i", range(id, id + 90)), 90, 1, domain=domain))
        while (batch := each.schedule(0)) is not None:
            each.commit(batch, [7] * batch.num_sampled, 1)
    journal.close()
    for namespace, count in ((None, 4), ("", 2), (NAMESPACE, 2), ("nobody", 0)):
        told, expected = (
            sorted((p.head, p.num_tokens, p.domain.namespace, bool(p.domain.salt)) for p in found)
            for found in (scheduler.top_prefixes(9, namespace), plain.top_prefixes(9, namespace))
        )
        assert told == expected and len(told) == count
