"""potok bench: load tests of servers, and of the engine alone."""

from __future__ import annotations

import gc
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from potok.bench.command import bench_serve
from potok.bench.engine import EngineBenchOptions, run_engine_bench
from potok.bench.engine_report import footer, table
from potok.bench.record import keep
from potok.cli import options
from potok.errors import ClientError


def register(app: typer.Typer) -> None:
    bench = typer.Typer(rich_markup_mode=None)
    bench.callback(help="Measure a server under load, or the engine alone.")(_bench)
    bench.command("serve")(bench_serve)
    bench.command("engine", help="Measure the engine without a server, against what the machine could do.")(engine)
    app.add_typer(bench, name="bench")


def engine(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    requests: Annotated[str, typer.Option(help="Requests at once, one load each.")] = "1,2,4,8,16,32,100",
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt.")] = 48,
    output_tokens: Annotated[int, typer.Option(help="Length of each answer.")] = 128,
    long_prompt_tokens: Annotated[int, typer.Option(help="Prompts alone: their length.")] = 512,
    rounds: Annotated[int, typer.Option(help="How often each load runs; the best counts.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    threads: options.Threads = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KvCacheMemory = None,
    block_size: options.BlockSize = 32,
    kv_cache_dtype: options.KvCacheDtype = "f16",
    activation_bits: options.ActivationBits = 8,
    json: Annotated[Path | None, typer.Option(help="File for all figures; one named .jsonl gets a line more.")] = None,
) -> None:
    try:
        wanted = tuple(int(part) for part in requests.split(",") if part.strip())
    except ValueError:
        raise ClientError(
            f"--requests must be whole numbers separated by commas, not {requests!r}.", "requests"
        ) from None
    if json is not None and not json.resolve().parent.is_dir():
        raise ClientError(f"--json: there is no folder {json.resolve().parent}.", "json")
    config = options.engine_config(
        options.model_path(model, model_option),
        max_num_seqs=max_num_seqs or max((*wanted, 1)),
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        block_size=block_size,
        threads=threads,
        kv_cache_dtype=kv_cache_dtype,
        activation_bits=activation_bits,
    )
    bench_options = EngineBenchOptions(
        requests=wanted,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        long_prompt_tokens=long_prompt_tokens,
        rounds=rounds,
        seed=seed,
    )
    progress = Console(stderr=True, highlight=False, markup=False)
    gc.freeze()  # as the engine process does: the collector need not look at code and tables
    with progress.status("") as status:
        result = run_engine_bench(config, bench_options, shlex.join(["potok", *sys.argv[1:]]), status.update)
    out = Console(highlight=False)
    out.print(table(result))
    for line in footer(result):
        out.print(line, markup=False, soft_wrap=True)
    if json is not None:
        try:
            keep(result, json)
        except OSError as error:
            raise ClientError(f"--json: cannot write {json}: {error.strerror}.", "json") from None


def _bench() -> None:
    """Options that stand before the subcommand: none."""
