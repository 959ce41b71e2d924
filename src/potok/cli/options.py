"""Options that several subcommands share, and the settings made of them. Names are those of vLLM where it has them."""

from __future__ import annotations

import re
from math import inf, nan
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

import typer

from potok.config import BATCHING_MODES, CAPACITY_POLICIES, SCHEDULE_POLICIES, EngineConfig
from potok.errors import LoadError
from potok.weights.default_model import find_default_model

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "500MB" or "1073741824"."""
    match = _SIZE.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise typer.BadParameter(f"{text!r} is not a size: give bytes, or a number with KB, MB, GB, KiB, MiB or GiB.")
    size = int(float(match[1]) * factor)
    if size == 0:
        raise typer.BadParameter("a size must be more than 0 bytes.")
    return size


def _block_size(value: int) -> int:
    if value not in (16, 32, 64):
        raise typer.BadParameter(f"must be 16, 32 or 64, not {value}.")
    return value


def _kv_cache_dtype(value: str) -> str:
    if value not in ("f16", "f32", "int8"):
        raise typer.BadParameter(f"must be f16, f32 or int8, not {value}.")
    return value


def _capacity_policy(value: str) -> str:
    if value not in CAPACITY_POLICIES:
        raise typer.BadParameter(f"must be {' or '.join(CAPACITY_POLICIES)}, not {value}.")
    return value


def _schedule_policy(value: str) -> str:
    if value not in SCHEDULE_POLICIES:
        raise typer.BadParameter(f"must be one of {', '.join(SCHEDULE_POLICIES)}, not {value}.")
    return value


def _batching(value: str) -> str:
    if value not in BATCHING_MODES:
        raise typer.BadParameter(f"must be one of {', '.join(BATCHING_MODES)}, not {value}.")
    return value


def parse_target(text: str | float) -> float:
    """Milliseconds; "off" is 0."""
    if text == "off":
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not 1 <= value < inf:
        raise typer.BadParameter(f"must be a number of milliseconds from 1, or off, not {text}.")
    return value


def _activation_bits(value: int) -> int:
    if value not in (8, 16):
        raise typer.BadParameter(f"must be 8 or 16, not {value}.")
    return value


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL.gguf", help="GGUF file of the llama or qwen2 family.", show_default="the default model"
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("-m", "--model", metavar="MODEL.gguf", help="GGUF file; the default model if none is given."),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs", min=1, help="Requests that run at once.", show_default="as many as this machine gains from"
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        min=1,
        help="Tokens that one step computes at most, prompts and answers together.",
        show_default="from what this machine computes",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len", min=1, help="Tokens of one request, prompt and answer.", show_default="the model's context"
    ),
]
KvCacheMemory = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-memory",
        parser=parse_size,
        metavar="SIZE",
        help="Memory for keys and values of running requests: 2GiB, 500MB or bytes.",
        show_default="from the free memory",
    ),
]
KvCacheTokens = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-tokens",
        min=1,
        help="The same in tokens, instead of --kv-cache-memory.",
        show_default="from the free memory",
    ),
]
EnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Share the keys and values of requests that begin with the same tokens.",
    ),
]
CapacityPolicy = Annotated[
    str,
    typer.Option(
        "--capacity-policy",
        callback=_capacity_policy,
        help="max_utilization begins requests while there is room and may have to begin one again; "
        "guaranteed_no_evict begins only what can run to its end.",
    ),
]
SchedulePolicy = Annotated[
    str,
    typer.Option(
        "--schedule-policy",
        callback=_schedule_policy,
        help="Who joins first: fcfs, the oldest; priority, who has the lowest number in its body, with ageing; "
        "longest_prefix, who has most in the prefix cache, within bounds; shortest, who has least to compute; "
        "fair, whose API key was given the fewest tokens.",
    ),
]
Batching = Annotated[
    str,
    typer.Option(
        "--batching",
        callback=_batching,
        help="When requests may join those that run: continuous, at every step; static, never: all that wait form a "
        "batch, which runs until its longest member ends; dynamic, the same once a batch has been gathered; off, one "
        "request at a time.",
    ),
]
PaddingRows = Annotated[
    bool,
    typer.Option(
        "--padding-rows/--no-padding-rows",
        help="static, dynamic: go on computing members that have ended, as padding does, or skip them.",
    ),
]
MaxWaitMs = Annotated[
    float,
    typer.Option("--max-wait-ms", min=0, max=60_000, help="dynamic: a batch is gathered for so long at most."),
]
MaxTokensPerBatch = Annotated[
    int | None,
    typer.Option(
        "--max-tokens-per-batch",
        min=1,
        help="dynamic: or until its prompts have so many tokens.",
        show_default="no limit",
    ),
]
SchedulerDelayFactor = Annotated[
    float,
    typer.Option(
        "--scheduler-delay-factor",
        min=0,
        help="continuous: while others run, prompts wait for up to so many times the last step that computed any, so "
        "that more of them share one.",
    ),
]
TargetItlMs = Annotated[
    Any,
    typer.Option(
        "--target-itl-ms",
        parser=parse_target,
        metavar="MS|off",
        help="Gap between two tokens of an answer to keep while prompts are computed.",
    ),
]
Journal = Annotated[
    str,
    typer.Option(
        "--journal", metavar="FILE", help="Record what the scheduler is told, for potok replay.", show_default="none"
    ),
]
JournalRedact = Annotated[
    bool, typer.Option("--journal-redact", help="Replace the token ids in the journal, each by another.")
]
BlockSize = Annotated[
    int, typer.Option("--block-size", callback=_block_size, help="Tokens per KV block: 16, 32 or 64.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Compute threads.", show_default="the cores this process may use"),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        callback=_kv_cache_dtype,
        help="Element type of keys and values: f16; int8 at half the memory; f32 at twice.",
    ),
]
ActivationBits = Annotated[
    int,
    typer.Option(
        "--activation-bits",
        callback=_activation_bits,
        help="8 is fast; 16 follows the model's weights more closely at lower speed.",
    ),
]
PrefixCacheDir = Annotated[
    str,
    typer.Option(
        "--prefix-cache-dir",
        metavar="PATH",
        help="Folder where computed prefixes are kept, for when memory runs short and for the next start.",
        show_default="none",
    ),
]
SwapSpace = Annotated[
    float, typer.Option("--swap-space", metavar="GiB", help="Room for them there; used with --prefix-cache-dir.")
]


class Given(TypedDict, total=False):
    """Flags that name fields of EngineConfig; None where the user gave none."""

    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    kv_cache_memory: int | None
    kv_cache_tokens: int | None
    enable_prefix_caching: bool
    capacity_policy: str
    schedule_policy: str
    kv_cache_dtype: str
    block_size: int
    threads: int | None
    activation_bits: int
    prefix_cache_dir: str
    swap_space: float
    batching: str
    padding_rows: bool
    max_wait_ms: float
    max_tokens_per_batch: int | None
    scheduler_delay_factor: float
    target_itl_ms: float
    journal: str
    journal_redact: bool


def model_path(argument: str | None, option: str | None = None) -> Path:
    """The model file to use. Raises LoadError when there is none."""
    if argument is not None and option is not None and argument != option:
        raise typer.BadParameter(f"two models are given, {argument} and {option}; give one.")
    given = argument or option
    if given is None:
        return find_default_model()
    path = Path(given)
    if not path.is_file():
        raise LoadError(f"the model file {given} does not exist; give the path of a GGUF file.")
    return path


def engine_config(path: Path, **given: Unpack[Given]) -> EngineConfig:
    """Settings as given; what was not given is left for the engine to derive."""
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return EngineConfig(model=str(path), **fields)
