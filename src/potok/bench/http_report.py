"""Shows what `potok bench http` measured to a person."""

from __future__ import annotations

from rich.table import Table

from potok.bench.http import HttpBenchResult, HttpTurn, InProcessTurn
from potok.bench.tables import percent, sheet

HEADINGS = (
    *("\nround", "in process\ntok/s", "engine\nCPU us", "over HTTP\ntok/s", "engine\nCPU us", "API\nCPU us"),
    *("clients\nCPU us", "\nratio"),
)


def table(result: HttpBenchResult) -> Table:
    """One row a round, then the best turn of each side. CPU per output token."""
    options = result.options
    view = sheet(
        f"{result.model}: {options.requests} requests at once, {options.prompt_tokens} tokens in, "
        f"{options.output_tokens} out",
        *HEADINGS,
    )
    for i, (own, http) in enumerate(zip(result.in_process, result.http, strict=True), start=1):
        view.add_row(f"{i}", *_cells(own, http))
    view.add_section()
    view.add_row("best", *_cells(max(result.in_process, key=_rate), max(result.http, key=_rate)))
    return view


def _rate(turn: InProcessTurn | HttpTurn) -> float:
    return turn.tokens_per_s


def _cells(own: InProcessTurn, http: HttpTurn) -> tuple[str, ...]:
    return (
        f"{own.tokens_per_s:.1f}",
        f"{own.engine_us:.0f}",
        f"{http.tokens_per_s:.1f}",
        f"{http.engine_us:.0f}",
        f"{http.api_us:.0f}",
        f"{http.client_us:.0f}",
        percent(http.tokens_per_s / own.tokens_per_s),
    )


def footer(result: HttpBenchResult) -> list[str]:
    """What the figures mean and what they were measured with."""
    return [
        "Output tokens a second, from the first request to the last token; CPU per output token, where threads that "
        "wait for each other inside a step count.",
        f"The API process and the clients share the cores with the engine's {result.threads} threads.",
        f"{result.date}  {result.machine.line()}; {result.isa}, at most {result.max_num_batched_tokens} tokens a step",
        result.command,
        *result.notes,
    ]
