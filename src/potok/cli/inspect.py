"""potok inspect: what a model file holds."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.table import Table

from potok.backends.native.weights import PACKED
from potok.cli import options
from potok.weights.describe import describe
from potok.weights.gguf import GGUFFile


def register(app: typer.Typer) -> None:
    app.command(help="Print what a model file holds, and the memory that it needs.")(inspect)


def inspect(model: options.ModelArgument = None) -> None:
    facts = describe(GGUFFile.open(options.model_path(model)), PACKED)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in facts.rows():
        table.add_row(label, value)
    # Into a file or a pipe, long paths are not folded.
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000).print(table)
