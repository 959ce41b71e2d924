"""Shows the figures to a person."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from potok.bench.figures import Figures, Spread
from potok.bench.serve import BenchResult
from potok.bench.tables import milliseconds, percent, sheet


def _time(spread: Spread | None, name: str) -> str:
    if spread is None:
        return "-"
    return milliseconds(getattr(spread, name))


def _cpu(figures: Figures) -> str:
    cost = figures.client_cpu_us_per_token
    return "-" if cost is None else f"{cost:.0f}"


Columns = tuple[tuple[str, Callable[[Figures], str]], ...]

_ENDS: Columns = (
    ("CPU us\n/token", _cpu),
    ("\nerrors", lambda f: f"{f.requests - f.answered}/{f.requests}"),
)
CLIENT_COLUMNS: Columns = (
    ("\nclients", lambda f: f"{f.load.clients}"),
    ("output\ntok/s", lambda f: f"{f.output_tokens_per_s:.1f}"),
    ("total\ntok/s", lambda f: f"{f.total_tokens_per_s:.1f}"),
    ("TTFT\np50", lambda f: _time(f.ttft, "p50")),
    ("\np99", lambda f: _time(f.ttft, "p99")),
    ("gap\np50", lambda f: _time(f.gap, "p50")),
    ("\np99", lambda f: _time(f.gap, "p99")),
    ("\nmax", lambda f: _time(f.gap, "max")),
    ("e2e\np50", lambda f: _time(f.e2e, "p50")),
    *_ENDS,
)
RATE_COLUMNS: Columns = (
    ("\nreq/s", lambda f: f"{f.load.rate:g}"),
    ("output\ntok/s", lambda f: f"{f.output_tokens_per_s:.1f}"),
    ("TTFT\np50", lambda f: _time(f.ttft, "p50")),
    ("\np95", lambda f: _time(f.ttft, "p95")),
    ("\np99", lambda f: _time(f.ttft, "p99")),
    ("gap\np50", lambda f: _time(f.gap, "p50")),
    ("\np95", lambda f: _time(f.gap, "p95")),
    ("\nmax", lambda f: _time(f.gap, "max")),
    ("in\ntarget", lambda f: percent((f.good or 0) / f.requests)),
    ("good\nreq/s", lambda f: f"{f.goodput_per_s or 0:.2f}"),
    *_ENDS,
)


def table(result: BenchResult) -> Table:
    """One row a load, within 80 columns. Times in milliseconds; TTFT: to the first token; e2e: of the whole answer."""
    options = result.options
    shared = f" (the first {options.shared_prefix_tokens} shared)" if options.shared_prefix_tokens else ""
    columns = RATE_COLUMNS if options.rate else CLIENT_COLUMNS
    view = sheet(
        f"{result.model}: {options.prompt_tokens} tokens in{shared}, {options.output_tokens} out; times in ms",
        *(heading for heading, _ in columns),
        between=1,
    )
    for load in result.loads:
        view.add_row(*(cell(load.figures) for _, cell in columns))
    return view


def footer(result: BenchResult) -> list[str]:
    """What the figures were measured with and on, then everything that a reader of the table must not miss."""
    options = result.options
    lines = ["CPU us/token is this client's own cost, drawn from the same machine if the server runs here."]
    if options.rate:
        lines.append(
            f"In target: first token within {options.ttft_ms:g} ms and 95 % of the request's gaps within "
            f"{options.gap_ms:g} ms."
        )
    return [*lines, f"{result.date}  {result.machine.line()}", result.command, *remarks(result)]


def remarks(result: BenchResult) -> list[str]:
    """Errors by kind, and everything else that qualifies the figures, one sentence each."""
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
