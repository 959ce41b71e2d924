"""potok replay: the scheduling of a journal, made again without the model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from potok.engine.journal import Header, JournalReader
from potok.engine.replay import Replayed, replay
from potok.errors import LoadError

EXIT_DIFFERENT = 1
#: How often the bar is moved, in calls.
BAR_EVERY = 1000


def register(app: typer.Typer) -> None:
    app.command("replay", help="Make the scheduling of a journal again, without the model, and compare every batch.")(
        run
    )


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `potok serve --journal FILE` has written.")],
) -> int:
    try:
        with file.open("rb") as opened:
            reader = JournalReader(opened, str(file))
            replayed = _replay(reader, opened)
    except OSError as error:
        raise LoadError(f"{file} cannot be read: {error.strerror}.") from None
    # Into a file or a pipe, long lines are not folded.
    out = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000)
    out.print(_table(reader.header, replayed))
    if replayed.torn:
        out.print(f"the file ends within a line, as when its writer was killed: {replayed.torn} bytes left out")
    if not replayed.difference:
        out.print("identical")
        return 0
    out.print("different")
    for line in replayed.difference:
        out.print(line)
    return EXIT_DIFFERENT


def _replay(reader: JournalReader, file: BinaryIO) -> Replayed:
    console = Console(stderr=True)
    size = os.fstat(file.fileno()).st_size
    columns = (TextColumn("replaying"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=size)
        calls = 0

        def on_call() -> None:
            nonlocal calls
            calls += 1
            if calls % BAR_EVERY == 0:
                progress.update(bar, completed=reader.num_bytes)

        return replay(reader, on_call)


def _table(header: Header, replayed: Replayed) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    ids = "replaced" if header.redacted else "as they were"
    table.add_row(
        "written by", f"potok {header.version}, begun {header.started:%Y-%m-%d %H:%M:%S} UTC; token ids {ids}"
    )
    for name, value in _settings(header).items():
        table.add_row(name, str(value))
    r = replayed
    table.add_row("replayed", f"{r.calls} calls, {r.steps} steps, {r.seconds:.1f} s of the engine's time")
    table.add_row(
        "requests", f"{r.requests}, of them {r.refused} refused; {r.cancels} cancels, {r.preemptions} preemptions"
    )
    return table


def _settings(header: Header) -> dict[str, object]:
    """What the scheduler was built from, one line a setting."""
    settings = msgspec.to_builtins(header.settings)
    tier = settings.pop("tier")
    if tier is not None:
        tier["found"] = len(tier["found"])
    told = {**settings.pop("limits"), **settings}
    return {**told, "tier": "none" if tier is None else ", ".join(f"{name} {value}" for name, value in tier.items())}
