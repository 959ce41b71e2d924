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

import msgspec

from potok.bench.client import Client, Server
from potok.bench.figures import Figures, Load, RequestFigures, Targets, summarise
from potok.bench.machine import Machine
from potok.bench.options import BenchOptions
from potok.bench.stream import Record
from potok.bench.workloads import poisson_arrivals, prompt
from potok.errors import ClientError

PROBE_OUTPUT_TOKENS = 4
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
        model = options.model or await _first_model(client)
        bench = _Bench(options, client, model, watch or (lambda progress: None))
        await bench.prepare()
        if options.rate:
            loads = [await bench.arrivals(rate) for rate in options.rate]
        else:
            loads = [await bench.closed_loop(clients) for clients in options.clients]
    finally:
        client.close()
    shown = replace(options, api_key=None)
    return BenchResult(options.command(), date, Machine.read(), model, shown, bench.notes, loads)


async def _first_model(client: Client) -> str:
    status, body = await client.get("/v1/models")
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        raise ClientError(f"/v1/models names no model (HTTP {status}); name it with --model.", "model") from None


class _Bench:
    """One run against one server: what was learned about it, and the loads."""

    def __init__(self, options: BenchOptions, client: Client, model: str, watch: Watcher) -> None:
        self.notes: list[str] = []
        self._options = options
        self._client = client
        self._model = model
        self._watch = watch
        self._path = "/v1/chat/completions" if options.endpoint == "chat" else "/v1/completions"
        #: Better measurements, but a server may not know them: each is dropped when the server refuses it by name.
        self._optional: dict[str, Any] = {
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        self._num_words = options.prompt_tokens
        self._next_index = 0

    async def prepare(self) -> None:
        """Learns with a few short requests which fields the server takes, and how many words make the prompt."""
        wanted = self._options.prompt_tokens
        counted = await self._probe()
        if counted is None:
            self.notes.append(
                "The server reports no usage: a text delta is taken for a token, a word for a prompt token."
            )
            return
        if counted != wanted:
            least = self._options.shared_prefix_tokens + 1
            self._num_words = max(least, self._num_words + wanted - counted)
            counted = await self._probe()
        if counted != wanted:
            self.notes.append(f"Prompts are {counted} tokens by the server's count, where {wanted} were asked for.")

    async def closed_loop(self, clients: int) -> LoadResult:
        each = self._options.requests_per_client
        first = self._next_index
        self._next_index += clients * each

        async def one_client(number: int, records: list[Record]) -> None:
            for turn in range(each):
                body = self._body(first + turn * clients + number)
                records.append(Record(due=time.perf_counter()))
                await self._client.stream(self._path, body, records[-1])

        async def everybody(records: list[Record]) -> None:
            await asyncio.gather(*(one_client(number, records) for number in range(clients)))

        await self._client.connect(clients)
        return await self._measure(Load(clients=clients), clients * each, everybody)

    async def arrivals(self, rate: float) -> LoadResult:
        duration = self._options.duration
        times = poisson_arrivals(self._options.seed, rate, duration)
        if not times:
            raise ClientError(
                f"--rate {rate:g} for {duration:g} s brought no request; lengthen --duration.", "duration"
            )
        bodies = [self._body(self._next_index + i) for i in range(len(times))]
        self._next_index += len(times)

        async def everybody(records: list[Record]) -> None:
            start = time.perf_counter()
            async with asyncio.TaskGroup() as running:
                for body, at in zip(bodies, times, strict=True):
                    await asyncio.sleep(start + at - time.perf_counter())
                    records.append(Record(due=start + at))
                    running.create_task(self._client.stream(self._path, body, records[-1]))

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

    async def _probe(self) -> int | None:
        """Prompt tokens that the server counts for a prompt of this length, or None when it does not say."""
        while True:
            body = self._body(self._next_index) | {"max_tokens": PROBE_OUTPUT_TOKENS}
            self._next_index += 1
            record = Record(due=time.perf_counter())
            await self._client.stream(self._path, body, record)
            if record.error is None:
                return record.prompt_tokens
            self._drop_refused_field(record.error)

    def _drop_refused_field(self, error: str) -> None:
        refused = [name for name in self._optional if name in error] if error.startswith("HTTP 4") else []
        if not refused:
            raise ClientError(f"The server did not answer a first short request: {error}.", "url")
        for name in refused:
            del self._optional[name]
            self.notes.append(f"The server does not take {name}, so it was left out.")

    def _body(self, index: int) -> dict[str, Any]:
        options = self._options
        text = prompt(options.seed, index, self._num_words, options.shared_prefix_tokens)
        shape = {"messages": [{"role": "user", "content": text}]} if options.endpoint == "chat" else {"prompt": text}
        return {"model": self._model, "max_tokens": options.output_tokens, "stream": True} | shape | self._optional


def _progress(load: Load, requests: int, records: list[Record]) -> Progress:
    return Progress(load, sum(r.end > 0 for r in records), requests, sum(len(r.times) for r in records))
