"""Shows what `potok bench http` measured to a person."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from potok.bench.http import HttpBenchResult, HttpTurn, InProcessTurn

HEADINGS = (
    *("\nround", "in process\ntok/s", "engine\nCPU us", "over HTTP\ntok/s", "engine\nCPU us", "API\nCPU us"),
    *("clients\nCPU us", "\nratio"),
)


def table(result: HttpBenchResult) -> Table:
    """One row a round, then the best turn of each side. CPU per output token."""
    options = result.options
    view = Table(
        title=f"{result.model}: {options.requests} requests at once, {options.prompt_tokens} tokens in, "
        f"{options.output_tokens} out",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for heading in HEADINGS:
        view.add_column(heading, justify="right", no_wrap=True)
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
        f"{100 * http.tokens_per_s / own.tokens_per_s:.0f} %",
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
