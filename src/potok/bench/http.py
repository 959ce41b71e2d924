"""What HTTP costs: the same requests through an engine in this process and over a server of its own, in turns.

Both engines have the same settings, and each sleeps while the other works. A turn is so many requests at once, all
greedy, each to its last token; tokens a second count from the first request to the last token, prompts included.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import uvloop

from potok.bench.client import Client, Server
from potok.bench.engine import run_burst
from potok.bench.machine import Machine, disturbances
from potok.bench.options import at_least
from potok.bench.own_server import OwnServer
from potok.bench.stream import Record
from potok.bench.workloads import prompt
from potok.config import EngineConfig
from potok.engine.build import build_engine
from potok.engine.serve import Engine
from potok.errors import ClientError, ServerError
from potok.protocol import Sampling, Submit
from potok.text.tokenizer import Tokenizer
from potok.weights.gguf import GGUFFile

WARM_UP_TOKENS = 4
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBenchOptions:
    """requests: streams at once. prompt_tokens, output_tokens: of each. rounds: turns of either side."""

    requests: int = 100
    prompt_tokens: int = 48
    output_tokens: int = 128
    rounds: int = 3
    seed: int = 0

    def check(self) -> None:
        """Raises ClientError naming the first option that makes no sense."""
        at_least(self, 1, "requests", "prompt_tokens", "output_tokens", "rounds")


@dataclass(frozen=True, slots=True)
class Request:
    """The same prompt for either side. ids: of `text`."""

    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class InProcessTurn:
    """engine_us: CPU per output token, in microseconds, of all threads; waiting for each other counts."""

    tokens_per_s: float
    engine_us: float


@dataclass(frozen=True, slots=True)
class HttpTurn:
    """engine_us, api_us, client_us: CPU of the two processes and of the clients, as in InProcessTurn."""

    tokens_per_s: float
    engine_us: float
    api_us: float
    client_us: float


@dataclass(frozen=True, slots=True)
class HttpBenchResult:
    """in_process, http: the turns of each side, round by round."""

    command: str
    date: str  # ISO 8601, UTC
    machine: Machine
    model: str
    options: HttpBenchOptions
    isa: str
    threads: int
    max_num_batched_tokens: int
    notes: list[str]
    in_process: list[InProcessTurn]
    http: list[HttpTurn]


def run_http_bench(
    config: EngineConfig, options: HttpBenchOptions, command: str, say: Callable[[str], None] = lambda line: None
) -> HttpBenchResult:
    """Raises ClientError or LoadError for what the caller can repair, ServerError when a request failed."""
    options.check()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    notes = disturbances()
    say("loading the model")
    engine = build_engine(config)
    _check_room(engine, options)
    requests = _Requests(config.model, options)
    say("starting the server")
    with OwnServer(_resolved(config, engine)) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        http = _Http(server, Client(Server.parse(server.url), TIMEOUT_S))
        in_process = _InProcess(engine)
        in_process.run(requests.next(2), WARM_UP_TOKENS)
        runner.run(http.run(requests.next(2), WARM_UP_TOKENS))
        turns: list[InProcessTurn] = []
        http_turns: list[HttpTurn] = []
        for round in range(options.rounds):
            same = requests.next(options.requests)
            for over_http in (False, True) if round % 2 == 0 else (True, False):  # nobody always comes first
                say(f"round {round + 1}: {'over HTTP' if over_http else 'in this process'}")
                if over_http:
                    http_turns.append(runner.run(http.run(same, options.output_tokens)))
                else:
                    turns.append(in_process.run(same, options.output_tokens))
        http.client.close()
    return HttpBenchResult(
        command=command,
        date=date,
        machine=Machine.read(),
        model=os.path.basename(config.model),
        options=options,
        isa=engine.info.isa,
        threads=engine.info.threads,
        max_num_batched_tokens=engine.info.max_num_batched_tokens,
        notes=[*notes, *engine.info.notes],
        in_process=turns,
        http=http_turns,
    )


class _Requests:
    """Prompts that no other has, as text and as the model's ids."""

    def __init__(self, model: str, options: HttpBenchOptions) -> None:
        self._tokenizer = Tokenizer.from_metadata(GGUFFile.open(model).metadata)
        self._options = options
        self._index = count()

    def next(self, number: int) -> list[Request]:
        texts = [prompt(self._options.seed, next(self._index), self._options.prompt_tokens) for _ in range(number)]
        return [Request(text, self._tokenizer.encode_prompt(text)) for text in texts]


class _InProcess:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = count(1)

    def run(self, requests: Sequence[Request], output_tokens: int) -> InProcessTurn:
        submits = [Submit(next(self._ids), request.ids, output_tokens, Sampling()) for request in requests]
        cpu = time.process_time()
        steps = run_burst(self._engine, submits)
        tokens = len(requests) * output_tokens
        return InProcessTurn(
            tokens_per_s=tokens / (steps[-1].ended - steps[0].started),
            engine_us=1e6 * (time.process_time() - cpu) / tokens,
        )


class _Http:
    def __init__(self, server: OwnServer, client: Client) -> None:
        self._server = server
        self.client = client

    async def run(self, requests: Sequence[Request], output_tokens: int) -> HttpTurn:
        await self.client.connect(len(requests))
        cpu = *self._server.cpu_seconds(), time.process_time()
        started = time.perf_counter()
        records = [Record(due=started) for _ in requests]
        await asyncio.gather(*map(self._one, requests, records, [output_tokens] * len(requests)))
        tokens = len(requests) * output_tokens
        after = *self._server.cpu_seconds(), time.process_time()
        api, engine, client = (1e6 * (b - a) / tokens for a, b in zip(cpu, after, strict=True))
        return HttpTurn(tokens / (max(record.end for record in records) - started), engine, api, client)

    async def _one(self, request: Request, record: Record, output_tokens: int) -> None:
        body = {
            "prompt": request.text,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        await self.client.stream("/v1/completions", body, record)
        if record.error is not None:
            raise ServerError(f"a request of the benchmark failed: {record.error}")
        counts, wanted = (record.prompt_tokens, record.output_tokens), (len(request.ids), output_tokens)
        if counts != wanted:
            raise ServerError(f"the server counted {counts} tokens of prompt and answer where {wanted} were asked for")


def _resolved(config: EngineConfig, engine: Engine) -> EngineConfig:
    """Settings that make another engine just like this one."""
    info = engine.info
    return replace(
        config,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        kv_cache_memory=info.kv_cache_bytes,
        kv_cache_tokens=0,
        threads=info.threads,
    )


def _check_room(engine: Engine, options: HttpBenchOptions) -> None:
    """Raises ClientError where the requests would not run all at once."""
    info = engine.info
    if options.requests > info.max_num_seqs:
        raise ClientError(
            f"--requests: at most {info.max_num_seqs} (--max-num-seqs) run at once, not {options.requests}.", "requests"
        )
    blocks = options.requests * -(-(options.prompt_tokens + options.output_tokens) // info.block_size)
    if blocks > info.num_blocks:
        raise ClientError(
            f"{options.requests} requests need {blocks} KV blocks, but there are {info.num_blocks}; raise "
            "--kv-cache-memory.",
            "requests",
        )
