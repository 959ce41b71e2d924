"""`potok bench serve`: options in, a table (and a JSON file) out."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from potok.bench.figures import Load
from potok.bench.options import BenchOptions, numbers, whole_numbers
from potok.bench.record import keep
from potok.bench.report import footer, table
from potok.bench.serve import BenchResult, Progress, run_bench
from potok.errors import ClientError, PotokError


def bench_serve(
    *,
    url: Annotated[str, typer.Option(help="Where the server is; any OpenAI-compatible one.")] = "http://127.0.0.1:8000",
    clients: Annotated[str, typer.Option(help="Numbers of concurrent clients, one load each.")] = "1,8,32,100",
    requests_per_client: Annotated[int, typer.Option(help="Requests that each client sends, one after another.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt.")] = 48,
    output_tokens: Annotated[int, typer.Option(help="Length of each answer.")] = 128,
    shared_prefix_tokens: Annotated[int, typer.Option(help="How many prompt tokens are the same in all.")] = 0,
    rate: Annotated[
        str, typer.Option(help="Requests a second, arriving at random (Poisson), instead of --clients; 2 or 1,2,4.")
    ] = "",
    duration: Annotated[float, typer.Option(help="Seconds of arrivals at each --rate.")] = 60.0,
    ttft_ms: Annotated[float, typer.Option(help="Goodput: longest time to the first token.")] = 2000.0,
    gap_ms: Annotated[float, typer.Option(help="Goodput: largest 95th percentile of a request's gaps.")] = 150.0,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    model: Annotated[str | None, typer.Option(help="Model to ask for.", show_default="the first one served")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token; never stored.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of prompts and arrivals.", show_default="drawn, so that no cache knows them")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = 600.0,
    json: Annotated[Path | None, typer.Option(help="File for all figures; one named .jsonl gets a line more.")] = None,
) -> None:
    """Measure a server under load: throughput, time to first token, gaps between tokens, errors.

    Ends with 1 when any request failed, with 2 when the measurement could not begin.
    """
    console = Console(stderr=True, highlight=False)
    try:
        options = BenchOptions(
            url=url,
            clients=whole_numbers("clients", clients),
            requests_per_client=requests_per_client,
            rate=numbers("rate", rate),
            duration=duration,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            shared_prefix_tokens=shared_prefix_tokens,
            endpoint=endpoint,
            ttft_ms=ttft_ms,
            gap_ms=gap_ms,
            model=model,
            api_key=api_key,
            seed=random.SystemRandom().randrange(10**6) if seed is None else seed,
            timeout=timeout,
        )
        if json is not None and not json.resolve().parent.is_dir():
            raise ClientError(f"--json: there is no folder {json.resolve().parent}.", "json")
        with _runner() as runner, _Bars(console) as bars:
            result = runner.run(run_bench(options, bars.show))
    except PotokError as error:
        console.print(f"potok: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    _show(result)
    try:
        if json is not None:
            keep(result, json)
    except OSError as error:
        console.print(f"potok: --json: cannot write {json}: {error.strerror}.", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if any(load.figures.errors for load in result.loads):
        raise typer.Exit(1)


def _show(result: BenchResult) -> None:
    out = Console(highlight=False)
    out.print(table(result))
    for line in footer(result):
        out.print(line, markup=False, soft_wrap=True)


def _runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


class _Bars:
    """A progress bar for the running load, drawn when there is news: drawing takes CPU from the measured server."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"))
        rates = (TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
        self._bars = ProgressBar(*columns, *rates, console=console, auto_refresh=False, disable=not console.is_terminal)
        self._load: Load | None = None
        self._task = TaskID(0)

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, progress: Progress) -> None:
        if progress.load != self._load:
            if self._load is not None:
                self._bars.update(self._task, visible=False)
            self._load = progress.load
            self._task = self._bars.add_task(progress.load.name, total=progress.requests, tokens=0)
        self._bars.update(self._task, completed=progress.requests_done, tokens=progress.tokens, refresh=True)
