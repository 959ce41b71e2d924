"""potok serve: one model over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from potok.cli import options
from potok.cli.api_keys import parse_keys
from potok.config import CONTINUOUS, MAX_UTILIZATION, ServerConfig
from potok.server.run import run


def register(app: typer.Typer) -> None:
    app.command(help="Serve a model over HTTP to OpenAI-compatible clients.")(serve)


def serve(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KvCacheMemory = None,
    kv_cache_tokens: options.KvCacheTokens = None,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    capacity_policy: options.CapacityPolicy = MAX_UTILIZATION,
    schedule_policy: options.SchedulePolicy = "fcfs",
    block_size: options.BlockSize = 32,
    threads: options.Threads = None,
    served_model_name: Annotated[
        str, typer.Option(help="Name that clients use for the model.", show_default="the file's name")
    ] = "",
    drain_seconds: Annotated[
        float, typer.Option(min=0, max=86400, help="How long running requests may go on after SIGTERM.")
    ] = 30.0,
    kv_cache_dtype: options.KvCacheDtype = "f16",
    activation_bits: options.ActivationBits = 8,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=KEY",
            envvar="POTOK_API_KEYS",
            help="Let in only who sends this key; give one for each user. Those of different names share no KV. "
            "On a machine with other users set the variable instead (keys separated by spaces): they can see flags.",
        ),
    ] = None,
    prefix_cache_dir: options.PrefixCacheDir = "",
    swap_space: options.SwapSpace = 4.0,
    batching: options.Batching = CONTINUOUS,
    padding_rows: options.PaddingRows = True,
    max_wait_ms: options.MaxWaitMs = 20.0,
    max_tokens_per_batch: options.MaxTokensPerBatch = None,
    scheduler_delay_factor: options.SchedulerDelayFactor = 0.0,
    target_itl_ms: options.TargetItlMs = "100",
    max_waiting: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Requests that may wait; more are answered 429 at once.")
    ] = 1024,
    max_waiting_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that their prompts may have together.", show_default="no limit"),
    ] = None,
    key_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests of one API key that may be open at once, running or waiting. Callers without keys count as "
            "one.",
            show_default="no limit",
        ),
    ] = None,
    key_tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of prompts and answers that one API key may have, as a steady rate; unused ones keep for a "
            "minute.",
            show_default="no limit",
        ),
    ] = None,
    journal: options.Journal = "",
    journal_redact: options.JournalRedact = False,
) -> int:
    engine_config = options.engine_config(
        options.model_path(model, model_option),
        max_num_seqs=max_num_seqs,
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
        prefix_cache_dir=prefix_cache_dir,
        swap_space=swap_space,
        batching=batching,
        padding_rows=padding_rows,
        max_wait_ms=max_wait_ms,
        max_tokens_per_batch=max_tokens_per_batch,
        scheduler_delay_factor=scheduler_delay_factor,
        target_itl_ms=target_itl_ms,
        journal=journal,
        journal_redact=journal_redact,
    )
    server_config = ServerConfig(
        host=host,
        port=port,
        served_model_name=served_model_name,
        drain_seconds=drain_seconds,
        api_keys=parse_keys(api_key or ()),
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens or 0,
        key_requests=key_requests or 0,
        key_tokens_per_minute=key_tokens_per_minute or 0,
    )
    return run(engine_config, server_config)
