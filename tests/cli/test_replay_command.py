"""potok replay as a user meets it: what it prints, and with which code it ends."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

import pytest

from potok import __version__
from potok.cli import execute
from potok.core.request import Request
from potok.core.scheduler import Limits
from potok.engine.journal import create
from potok.engine.recorded import RecordedScheduler
from potok.engine.scheduling import SchedulerSettings, TierSettings, build_scheduler


def settings(token_us: float = 10.0) -> SchedulerSettings:
    return SchedulerSettings(
        limits=Limits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, block_size=4),
        num_blocks=16,
        prefix_caching=True,
        policy="shortest",
        batching="continuous",
        padding_rows=True,
        max_wait_us=0,
        max_tokens_per_batch=0,
        delay_factor=0.0,
        target_us=0,
        token_us=token_us,
        tier=TierSettings(num_slots=8, found=[(b"d" * 16, 3)], read_us=1.0, token_us=1.0),
    )


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Three requests, one of them impossible, and a cancel."""
    path = tmp_path / "j"
    journal, _ = create(str(path), settings(), redacted=False)
    scheduler = build_scheduler(settings(), RecordedScheduler)
    scheduler.record_to(journal)
    for id, length in ((1, 20), (2, 5), (3, 100)):
        scheduler.submit(Request(id, array("i", range(length)), length, 9))
    scheduler.cancel(77)
    now = 1_000_000
    while (batch := scheduler.schedule(now)) is not None:
        scheduler.commit(batch, [5] * batch.num_sampled, 1000)
        now += 500_000
    journal.close()
    return path


def test_identical(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["replay", str(journal)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].startswith(f"written by potok {__version__}, begun 20")
    for line in (
        "max_num_seqs 2",
        "num_blocks 16",
        "policy shortest",
        "token_us 10.0",
        "tier num_slots 8, found 1, read_us 1.0, token_us 1.0",
        "replayed 25 calls, 10 steps, 5.0 s of the engine's time",
        "requests 3, of them 1 refused; 1 cancels, 0 preemptions",
    ):
        assert line in lines
    assert lines[-1] == "identical"


def test_a_torn_end_is_told(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal.write_bytes(journal.read_bytes()[:-5])
    assert execute(["replay", str(journal)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "bytes left out" in lines[-2] and lines[-1] == "identical"


def test_different(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = journal.read_bytes()
    journal.write_bytes(data.replace(b'"schedule",1500000', b'"schedule",1500001'))
    assert execute(["replay", str(journal)]) == 1
    out = capsys.readouterr().out
    assert "different\nline " in out and " is damaged, or something before it is missing" in out
    assert "2 running, 0 waiting; 16 blocks of 4 tokens: " in out and "identical" not in out


@pytest.mark.parametrize("kind", ["missing", "folder", "other file", "other version"])
def test_what_cannot_be_replayed_is_one_line(
    tmp_path: Path, journal: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "x"
    match kind:
        case "folder":
            path.mkdir()
        case "other file":
            path = Path(sys.executable)
        case "other version":
            path.write_bytes(journal.read_bytes().replace(b"potok journal 1", b"potok journal 9", 1))
    assert execute(["replay", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("potok: ") and str(path) in err and err.count("\n") == 1
