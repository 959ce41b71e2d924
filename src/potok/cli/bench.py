"""potok bench: load tests of servers, and of the engine alone."""

from __future__ import annotations

import gc
import random
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.status import Status
from rich.table import Table

from potok.bench import engine_report, goodput_report, http_report, modes_report, prefix_report
from potok.bench.cells import MODES
from potok.bench.command import bench_serve
from potok.bench.engine import EngineBenchOptions, run_engine_bench
from potok.bench.goodput_http import GoodputOptions, run_goodput
from potok.bench.http import HttpBenchOptions, run_http_bench
from potok.bench.modes import PARTS as PARTS_OF_MODES
from potok.bench.modes import ModesBenchOptions, run_modes_bench
from potok.bench.options import flag, numbers, whole_numbers, words
from potok.bench.prefix import PARTS, PrefixBenchOptions, run_prefix_bench
from potok.bench.record import keep
from potok.cli import options
from potok.config import CONTINUOUS, MAX_UTILIZATION, EngineConfig
from potok.errors import ClientError

#: All requests run at once as soon as they can: these loads ask for throughput, and nobody waits for a token.
NO_TARGET = 0.0

JsonFile = Annotated[Path | None, typer.Option(help="File for all figures; one named .jsonl gets a line more.")]


def register(app: typer.Typer) -> None:
    bench = typer.Typer(rich_markup_mode=None)
    bench.callback(help="Measure a server under load, the engine alone, or the one against the other.")(_bench)
    bench.command("serve")(bench_serve)
    bench.command("engine", help="Measure the engine without a server, against what the machine could do.")(engine)
    bench.command("http", help="Measure what HTTP costs: the same requests in process and over a server.")(http)
    bench.command("prefix", help="Measure what sharing KV memory saves, and what a small pool costs.")(prefix)
    bench.command("modes", help="Measure what each mode of batching gains, and what a prompt costs the others.")(modes)
    bench.command("goodput", help="Find the highest rate of arrivals at which everybody is served in time.")(goodput)
    app.add_typer(bench, name="bench")


def engine(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    requests: Annotated[str, typer.Option(help="Requests at once, one load each.")] = "1,2,4,8,16,32,100",
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt.")] = 48,
    output_tokens: Annotated[int, typer.Option(help="Length of each answer.")] = 128,
    long_prompt_tokens: Annotated[int, typer.Option(help="Prompts alone: their length.")] = 512,
    rounds: Annotated[int, typer.Option(help="How often each load runs; the median counts.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    threads: options.Threads = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KvCacheMemory = None,
    kv_cache_tokens: options.KvCacheTokens = None,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    capacity_policy: options.CapacityPolicy = MAX_UTILIZATION,
    schedule_policy: options.SchedulePolicy = "fcfs",
    block_size: options.BlockSize = 32,
    kv_cache_dtype: options.KvCacheDtype = "f16",
    activation_bits: options.ActivationBits = 8,
    json: JsonFile = None,
) -> None:
    wanted = whole_numbers("requests", requests)
    _check_folder(json)
    config = options.engine_config(
        options.model_path(model, model_option),
        max_num_seqs=max_num_seqs or max((*wanted, 1)),
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        kv_cache_tokens=kv_cache_tokens,
        enable_prefix_caching=enable_prefix_caching,
        capacity_policy=capacity_policy,
        schedule_policy=schedule_policy,
        block_size=block_size,
        threads=threads,
        kv_cache_dtype=kv_cache_dtype,
        activation_bits=activation_bits,
        target_itl_ms=NO_TARGET,
    )
    bench_options = EngineBenchOptions(
        requests=wanted,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        long_prompt_tokens=long_prompt_tokens,
        rounds=rounds,
        seed=seed,
    )
    gc.freeze()  # as the engine process does: the collector need not look at code and tables
    with _status() as status:
        result = run_engine_bench(config, bench_options, _command(), status.update)
    _show(engine_report.table(result), engine_report.footer(result))
    _keep(result, json)


def http(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    requests: Annotated[int, typer.Option(help="Streams at once.")] = 100,
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt, in words.")] = 48,
    output_tokens: Annotated[int, typer.Option(help="Length of each answer.")] = 128,
    rounds: Annotated[int, typer.Option(help="Turns of either side; the best counts.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    threads: options.Threads = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    kv_cache_memory: options.KvCacheMemory = None,
    json: JsonFile = None,
) -> None:
    _check_folder(json)
    config = options.engine_config(
        options.model_path(model, model_option),
        max_num_seqs=max_num_seqs or max(requests, 1),
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory=kv_cache_memory,
        threads=threads,
        target_itl_ms=NO_TARGET,
    )
    bench_options = HttpBenchOptions(
        requests=requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens, rounds=rounds, seed=seed
    )
    gc.freeze()
    with _status() as status:
        result = run_http_bench(config, bench_options, _command(), status.update)
    _show(http_report.table(result), http_report.footer(result))
    _keep(result, json)


def prefix(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    parts: Annotated[str, typer.Option(help="What to measure.")] = ",".join(PARTS),
    requests: Annotated[int, typer.Option(help="Requests behind one system prompt.")] = 1000,
    requests_off: Annotated[int, typer.Option(help="Of them, those that are sent without the cache, too.")] = 100,
    clients: Annotated[int, typer.Option(help="Clients that ask them.")] = 8,
    system_tokens: Annotated[int, typer.Option(help="Length of the system prompt.")] = 256,
    users: Annotated[int, typer.Option(help="Users of the dialogues.")] = 50,
    turns: Annotated[int, typer.Option(help="Turns of each user.")] = 8,
    pressure_clients: Annotated[int, typer.Option(help="Clients, of which the pool holds a third.")] = 24,
    pressure_requests: Annotated[int, typer.Option(help="Requests of these clients together.")] = 48,
    seed: Annotated[int, typer.Option(help="Of the prompts, and of who asks when.")] = 0,
    threads: options.Threads = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KvCacheMemory = None,
    block_size: options.BlockSize = 32,
    kv_cache_dtype: options.KvCacheDtype = "f16",
    json: JsonFile = None,
) -> None:
    _check_folder(json)
    config = options.engine_config(
        options.model_path(model, model_option),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        block_size=block_size,
        threads=threads,
        kv_cache_dtype=kv_cache_dtype,
    )
    bench_options = PrefixBenchOptions(
        parts=words(parts),
        requests=requests,
        requests_off=requests_off,
        clients=clients,
        system_tokens=system_tokens,
        users=users,
        turns=turns,
        pressure_clients=pressure_clients,
        pressure_requests=pressure_requests,
        seed=seed,
    )
    gc.freeze()
    with _status() as status:
        result = run_prefix_bench(config, bench_options, _command(), status.update)
    _show(Group(*prefix_report.tables(result)), prefix_report.footer(result))
    _keep(result, json)


def modes(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    parts: Annotated[str, typer.Option(help=f"What to measure: some of {','.join(PARTS_OF_MODES)}.")] = "clients,mixed",
    modes: Annotated[str, typer.Option(help="Modes of batching.")] = ",".join(MODES),
    clients: Annotated[str, typer.Option(help="Numbers of clients.")] = "1,10,50,100",
    requests_per_client: Annotated[int, typer.Option(help="Requests that each sends, one after another.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt.")] = 48,
    output_tokens: Annotated[int, typer.Option(help="Length of each answer.")] = 64,
    mixed_clients: Annotated[int, typer.Option(help="Clients of the parts mixed and prompt_heavy.")] = 100,
    mixed_requests: Annotated[int, typer.Option(help="Requests of these clients together.")] = 100,
    requests_off: Annotated[int, typer.Option(help="Of all requests, those that are sent with batching off.")] = 30,
    batch_size: Annotated[int, typer.Option(help="Members of a static or dynamic batch at most.")] = 32,
    max_wait_ms: Annotated[float, typer.Option(help="How long a dynamic batch is gathered.")] = 20.0,
    streams: Annotated[int, typer.Option(help="Streams that a long prompt joins.")] = 8,
    long_prompt_tokens: Annotated[int, typer.Option(help="Length of that prompt; half of it is tried, too.")] = 6000,
    targets_ms: Annotated[str, typer.Option(help="Targets for the gaps of the streams.")] = "100,60",
    fair_rounds: Annotated[int, typer.Option(help="How often two tenants meet.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the prompts and lengths.")] = 0,
    threads: options.Threads = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KvCacheMemory = None,
    block_size: options.BlockSize = 32,
    kv_cache_dtype: options.KvCacheDtype = "f16",
    json: JsonFile = None,
) -> None:
    _check_folder(json)
    config = options.engine_config(
        options.model_path(model, model_option),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        block_size=block_size,
        threads=threads,
        kv_cache_dtype=kv_cache_dtype,
    )
    bench_options = ModesBenchOptions(
        parts=words(parts),
        modes=words(modes),
        clients=whole_numbers("clients", clients),
        requests_per_client=requests_per_client,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        mixed_clients=mixed_clients,
        mixed_requests=mixed_requests,
        requests_off=requests_off,
        batch_size=batch_size,
        max_wait_ms=max_wait_ms,
        streams=streams,
        long_prompt_tokens=long_prompt_tokens,
        targets_ms=numbers("targets_ms", targets_ms),
        fair_rounds=fair_rounds,
        seed=seed,
    )
    gc.freeze()
    with _status() as status:
        result = run_modes_bench(config, bench_options, _command(), status.update)
    _show(Group(*modes_report.tables(result)), modes_report.footer(result))
    _keep(result, json)


def goodput(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="GGUF file for a server of its own, or with --url the model to ask for.",
            show_default="the default model, or the first one served",
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(help="Any OpenAI-compatible server.", show_default="a server of its own, for the time")
    ] = "",
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of each prompt.", show_default="mixed, 20 to 200")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of each answer.", show_default="mixed, 16 to 1024")
    ] = None,
    ttft_ms: Annotated[float, typer.Option(help="Limit for 95 % of the times to first token.")] = 2000.0,
    gap_ms: Annotated[float, typer.Option(help="Limit for 95 % of the gaps between tokens.")] = 150.0,
    start_rate: Annotated[float, typer.Option(help="Requests a second that are tried first.")] = 1.0,
    resolution: Annotated[float, typer.Option(help="How close the answer must be, as a part of it.")] = 0.1,
    rounds: Annotated[int, typer.Option(help="Rounds at each rate, of which most must pass.")] = 1,
    duration: Annotated[float, typer.Option(help="Seconds of each round that count.")] = 60.0,
    warm_up: Annotated[float, typer.Option(help="Seconds before them that do not.")] = 60.0,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token; never stored.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of prompts and arrivals.", show_default="drawn, so that no cache knows them")
    ] = None,
    threads: options.Threads = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    kv_cache_memory: options.KvCacheMemory = None,
    schedule_policy: options.SchedulePolicy = "fcfs",
    batching: options.Batching = CONTINUOUS,
    target_itl_ms: options.TargetItlMs = 100.0,
    json: JsonFile = None,
) -> None:
    _check_folder(json)
    own: options.Given = {
        "threads": threads,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_memory": kv_cache_memory,
        "schedule_policy": schedule_policy,
        "batching": batching,
        "target_itl_ms": target_itl_ms,
    }
    defaults = EngineConfig.__dataclass_fields__
    given = [name for name, value in own.items() if value is not None and value != defaults[name].default]
    if url and given:
        raise ClientError(f"{flag(given[0])} is for a server of our own; leave it out, or leave out --url.", given[0])
    config = None if url else options.engine_config(options.model_path(model), **own)
    drawn = random.SystemRandom().randrange(10**6) if seed is None else seed
    bench_options = GoodputOptions(
        url=url,
        prompt_tokens=prompt_tokens or 0,
        output_tokens=output_tokens or 0,
        ttft_ms=ttft_ms,
        gap_ms=gap_ms,
        start_rate=start_rate,
        resolution=resolution,
        rounds=rounds,
        duration=duration,
        warm_up=warm_up,
        endpoint=endpoint,
        model=model if url else None,
        api_key=api_key,
        seed=drawn,
    )
    command = _command(without=api_key) + (f" --seed {drawn}" if seed is None else "")
    with _status() as status:
        result = run_goodput(bench_options, config, command, status.update)
    _show(goodput_report.table(result), goodput_report.footer(result))
    _keep(result, json)


def _bench() -> None:
    """Options that stand before the subcommand: none."""


def _command(without: str | None = None) -> str:
    """The command line, a secret masked."""
    words = sys.argv[1:] if not without else [word.replace(without, "...") for word in sys.argv[1:]]
    return shlex.join(["potok", *words])


def _status() -> Status:
    return Console(stderr=True, highlight=False, markup=False).status("")


def _show(table: Table | Group, footer: list[str]) -> None:
    out = Console(highlight=False)
    out.print(table)
    for line in footer:
        out.print(line, markup=False, soft_wrap=True)


def _check_folder(json: Path | None) -> None:
    if json is not None and not json.resolve().parent.is_dir():
        raise ClientError(f"--json: there is no folder {json.resolve().parent}.", "json")


def _keep(result: object, json: Path | None) -> None:
    if json is None:
        return
    try:
        keep(result, json)
    except OSError as error:
        raise ClientError(f"--json: cannot write {json}: {error.strerror}.", "json") from None
