"""Drives an OpenAI-compatible server with streaming requests and measures what its clients would feel.

Two kinds of load. With `clients`, each of so many clients sends its next request when the last is answered. With
`rate`, requests arrive as independent people would send them (Poisson), whether the server keeps up or not.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from potok.bench.asker import Asker, Wording
from potok.bench.client import Client, Server
from potok.bench.figures import Figures, Load, RequestFigures, Targets, summarise
from potok.bench.machine import Machine
from potok.bench.options import BenchOptions
from potok.bench.stream import Record
from potok.bench.workloads import poisson_arrivals
from potok.errors import ClientError

SECONDS_BETWEEN_PROGRESS = 1.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    figures: Figures
    requests: list[RequestFigures]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Everything that was measured, and with what. The API key is left out of `options`."""

    command: str
    date: str  # ISO 8601, UTC
    machine: Machine
    model: str
    options: BenchOptions
    notes: list[str]
    loads: list[LoadResult]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is."""

    load: Load
    requests_done: int
    requests: int
    tokens: int


Watcher = Callable[[Progress], None]


async def run_bench(options: BenchOptions, watch: Watcher | None = None) -> BenchResult:
    """Runs the loads of `options` one after the other.

    Raises ClientError when the options or the server cannot be used at all; a request that fails while a load runs
    is counted in the errors of that load instead. `watch` is told of progress once a second.
    """
    options.check()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    client = Client(Server.parse(options.url, options.api_key), options.timeout)
    try:
        asker = Asker(client, options.endpoint, options.model, Wording(options.seed, options.shared_prefix_tokens))
        await asker.prepare(options.prompt_tokens)
        bench = _Bench(options, client, asker, watch or (lambda progress: None))
        if options.rate:
            loads = [await bench.arrivals(rate) for rate in options.rate]
        else:
            loads = [await bench.closed_loop(clients) for clients in options.clients]
    finally:
        client.close()
    shown = replace(options, api_key=None)
    return BenchResult(options.command(), date, Machine.read(), asker.model, shown, asker.notes, loads)


class _Bench:
    """The loads of one run against one server."""

    def __init__(self, options: BenchOptions, client: Client, asker: Asker, watch: Watcher) -> None:
        self._options = options
        self._client = client
        self._asker = asker
        self._watch = watch

    async def closed_loop(self, clients: int) -> LoadResult:
        each = self._options.requests_per_client

        async def one_client(records: list[Record]) -> None:
            for _ in range(each):
                body = self._body()
                records.append(Record(due=time.perf_counter()))
                await self._asker.ask(body, records[-1])

        async def everybody(records: list[Record]) -> None:
            await asyncio.gather(*(one_client(records) for _ in range(clients)))

        await self._client.connect(clients)
        return await self._measure(Load(clients=clients), clients * each, everybody)

    async def arrivals(self, rate: float) -> LoadResult:
        duration = self._options.duration
        times = poisson_arrivals(self._options.seed, rate, duration)
        if not times:
            raise ClientError(
                f"--rate {rate:g} for {duration:g} s brought no request; lengthen --duration.", "duration"
            )
        bodies = [self._body() for _ in times]

        async def everybody(records: list[Record]) -> None:
            start = time.perf_counter()
            async with asyncio.TaskGroup() as running:
                for body, at in zip(bodies, times, strict=True):
                    await asyncio.sleep(start + at - time.perf_counter())
                    records.append(Record(due=start + at))
                    running.create_task(self._asker.ask(body, records[-1]))

        load = Load(rate=rate, duration_s=duration)
        return await self._measure(load, len(times), everybody)

    async def _measure(self, load: Load, requests: int, work: Callable[[list[Record]], Awaitable[None]]) -> LoadResult:
        records: list[Record] = []
        reporting = asyncio.create_task(self._report(load, requests, records))
        cpu_before = time.process_time()
        try:
            await work(records)
        finally:
            reporting.cancel()
        cpu_s = time.process_time() - cpu_before
        self._watch(_progress(load, requests, records))
        targets = Targets(self._options.ttft_ms, self._options.gap_ms)
        figures = summarise(load, records, self._options.output_tokens, cpu_s, targets)
        start = min(r.due for r in records)
        return LoadResult(figures, [RequestFigures.of(r, start) for r in records])

    async def _report(self, load: Load, requests: int, records: list[Record]) -> None:
        while True:
            self._watch(_progress(load, requests, records))
            await asyncio.sleep(SECONDS_BETWEEN_PROGRESS)

    def _body(self) -> dict[str, Any]:
        return self._asker.body(self._options.prompt_tokens, self._options.output_tokens)


def _progress(load: Load, requests: int, records: list[Record]) -> Progress:
    return Progress(load, sum(r.end > 0 for r in records), requests, sum(len(r.times) for r in records))
