"""Shows the figures to a person (a table) and keeps them for a program (JSON)."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.table import Table

from potok.bench.figures import Figures, Spread
from potok.bench.serve import BenchResult


def table(result: BenchResult) -> Table:
    """One row a load. Times in milliseconds, TTFT = time to first token, e2e = whole answer."""
    options = result.options
    shared = f" (first {options.shared_prefix_tokens} shared)" if options.shared_prefix_tokens else ""
    view = Table(
        title=f"{result.model}: {options.prompt_tokens} prompt tokens{shared}, {options.output_tokens} output tokens",
        caption="\n".join([result.machine.line(), f"{result.date}  {result.command}"]),
        title_justify="left",
        caption_justify="left",
    )
    view.add_column("requests/s" if options.rate else "clients", justify="right")
    columns = ["output\ntok/s", "total\ntok/s", "TTFT ms\np50", "\np99", "gap ms\np50", "\np99", "\nmax", "e2e ms\np50"]
    if options.rate:
        columns += ["within\ntargets", "goodput\nreq/s"]
    for name in [*columns, "client CPU\nus/token", "answered", "errors"]:
        view.add_column(name, justify="right")
    for load in result.loads:
        view.add_row(*_row(load.figures))
    return view


def remarks(result: BenchResult) -> list[str]:
    """Sentences about everything that a reader of the table must not miss."""
    lines = list(result.notes)
    for load in result.loads:
        figures = load.figures
        name = figures.load.name
        lines += [f"{name}: {count} x {error}" for error, count in figures.errors.items()]
        if figures.uncounted:
            lines.append(f"{name}: {figures.uncounted} answers came without usage; their text deltas were counted.")
        if figures.deltas != figures.output_tokens:
            lines.append(
                f"{name}: the server counted {figures.output_tokens} output tokens, the clients {figures.deltas} "
                "deltas with text; rates use the server's count."
            )
        if figures.ended_early:
            lines.append(f"{name}: {figures.ended_early} answers ended before {result.options.output_tokens} tokens.")
    return lines


def write_json(result: BenchResult, path: Path) -> None:
    """All figures, of every request too, as one JSON document."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def _row(figures: Figures) -> list[str]:
    cells = [
        f"{figures.load.clients or figures.load.rate:g}",
        f"{figures.output_tokens_per_s:.1f}",
        f"{figures.total_tokens_per_s:.1f}",
        *_times(figures.ttft, "p50", "p99"),
        *_times(figures.gap, "p50", "p99", "max"),
        *_times(figures.e2e, "p50"),
    ]
    if figures.good is not None and figures.goodput_per_s is not None:
        cells += [f"{100 * figures.good / figures.requests:.1f} %", f"{figures.goodput_per_s:.2f}"]
    cpu = figures.client_cpu_us_per_token
    answered = f"{figures.answered}/{figures.requests}"
    return [*cells, "-" if cpu is None else f"{cpu:.0f}", answered, str(figures.requests - figures.answered)]


def _times(spread: Spread | None, *names: str) -> list[str]:
    values = [None if spread is None else getattr(spread, name) for name in names]
    return ["-" if v is None else f"{v:.1f}" if v < 100 else f"{v:.0f}" for v in values]
