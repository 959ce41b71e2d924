"""How all tables of the benchmarks look."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table


def sheet(title: str, *headings: str, between: int = 2) -> Table:
    """Columns of figures, aligned on the right. between: spaces between columns, beside one."""
    view = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, between, 0, 0), pad_edge=False)
    for heading in headings:
        view.add_column(heading, justify="right", no_wrap=True)
    return view


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"
