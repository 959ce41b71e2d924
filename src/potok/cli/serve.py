"""potok serve: one model over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from potok.cli import options
from potok.cli.api_keys import parse_keys
from potok.config import MAX_UTILIZATION, ServerConfig
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
    )
    server_config = ServerConfig(
        host=host,
        port=port,
        served_model_name=served_model_name,
        drain_seconds=drain_seconds,
        api_keys=parse_keys(api_key or ()),
    )
    return run(engine_config, server_config)
