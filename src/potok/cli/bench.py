"""potok bench: load tests."""

from __future__ import annotations

import typer

from potok.bench.command import bench_serve


def register(app: typer.Typer) -> None:
    bench = typer.Typer(rich_markup_mode=None)
    bench.callback(help="Measure a server under load.")(_bench)
    bench.command("serve")(bench_serve)
    app.add_typer(bench, name="bench")


def _bench() -> None:
    """Keeps `serve` a subcommand: with a single command and no callback, typer would drop its name."""
