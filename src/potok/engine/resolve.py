"""Settings that were left open, from what the machine has and the model needs; each with its reason.

Pure: facts come as arguments. Every function returns what to use and a line for the start log, or raises LoadError with
a sentence that names the setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from potok.config import (
    BATCHING_MODES,
    CAPACITY_POLICIES,
    CONTINUOUS,
    DYNAMIC,
    GUARANTEED_NO_EVICT,
    SCHEDULE_POLICIES,
    STATIC,
    EngineConfig,
)
from potok.engine.machine import Machine
from potok.engine.probe import StepTime
from potok.errors import LoadError
from potok.model.precision import KV_DTYPES

BLOCK_SIZES = (16, 32, 64)
DEFAULT_MAX_NUM_SEQS = 128
MOST_SEQS = 256
SEQS_MULTIPLE = 8
#: Of the best throughput, what counts as reached.
KNEE = 0.95
#: Steps of decoding should take this part of the target, so that prompts and long contexts find the rest.
TARGET_PART = 0.75
#: A step without anybody who decodes takes two targets (potok.core.scheduler); once more for a slow start.
TARGETS_OF_A_STEP = 3
#: Of the memory that is left when the weights are loaded, the KV pool takes this part.
KV_SHARE = 0.5

DEFAULTS = EngineConfig(model="")

#: A step should take about this long: the pace at which running requests get tokens while prompts are computed.
STEP_SECONDS = 0.08
MIN_DERIVED_BUDGET = 32
MAX_DERIVED_BUDGET = 2048
BUDGET_MULTIPLE = 16


class Choice(NamedTuple):
    value: int
    note: str


@dataclass(frozen=True, slots=True)
class Pool:
    """KV memory, and what must fit into it."""

    num_blocks: int
    max_model_len: int
    notes: list[str]


def check(config: EngineConfig, context_length: int) -> None:
    """Refuses what no machine could make right. context_length: of the model file, in tokens."""
    derived = (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "kv_cache_memory",
        "kv_cache_tokens",
        "threads",
    )
    for name in derived:
        value = getattr(config, name)
        if value < 0:
            raise LoadError(f"{name} must be at least 1, not {value}; leave it out to have it derived.")
    if config.block_size not in BLOCK_SIZES:
        raise LoadError(f"block_size must be 16, 32 or 64 tokens, not {config.block_size}.")
    if config.kv_cache_dtype not in KV_DTYPES:
        raise LoadError(f"kv_cache_dtype must be one of {', '.join(KV_DTYPES)}, not {config.kv_cache_dtype}.")
    if config.activation_bits not in (8, 16):
        raise LoadError(f"activation_bits must be 8 or 16, not {config.activation_bits}.")
    if config.capacity_policy not in CAPACITY_POLICIES:
        raise LoadError(
            f"capacity_policy must be {' or '.join(CAPACITY_POLICIES)}, not {config.capacity_policy!r:.80}."
        )
    if config.schedule_policy not in SCHEDULE_POLICIES:
        raise LoadError(
            f"schedule_policy must be one of {', '.join(SCHEDULE_POLICIES)}, not {config.schedule_policy!r:.80}."
        )
    _check_batching(config)
    if config.journal_redact and not config.journal:
        raise LoadError("journal_redact is given, but no journal; give the file of one, or leave it out.")
    if config.kv_cache_memory and config.kv_cache_tokens:
        raise LoadError("kv_cache_memory and kv_cache_tokens ask for the same in two units; give one of them.")
    if config.prefix_cache_dir and not config.enable_prefix_caching:
        raise LoadError("prefix_cache_dir is given, but prefix caching is switched off; leave out one of them.")
    if not 0 < config.swap_space < inf:
        raise LoadError(f"swap_space must be more than 0 GiB, not {config.swap_space}.")
    if config.journal_redact and not config.journal:
        raise LoadError("journal_redact is given, but no journal; name a file with --journal.")
    if config.journal_redact and config.prefix_cache_dir:
        raise LoadError(
            "journal_redact hides token ids from the scheduler, but prefix_cache_dir names blocks on disk by them; "
            "leave out one of them."
        )
    if config.max_model_len == 1:
        raise LoadError("max_model_len must be at least 2: one token of prompt and one of output.")
    if config.max_model_len > context_length:
        raise LoadError(
            f"max_model_len is {config.max_model_len}, but the model's context is {context_length} tokens; lower it."
        )


#: Settings of EngineConfig that are of use in some batching modes only.
OF_MODES = {
    "padding_rows": (STATIC, DYNAMIC),
    "max_wait_ms": (DYNAMIC,),
    "max_tokens_per_batch": (DYNAMIC,),
    "scheduler_delay_factor": (CONTINUOUS,),
}


def _check_batching(config: EngineConfig) -> None:
    if config.batching not in BATCHING_MODES:
        raise LoadError(f"batching must be one of {', '.join(BATCHING_MODES)}, not {config.batching!r:.80}.")
    for name in ("max_wait_ms", "max_tokens_per_batch", "scheduler_delay_factor", "target_itl_ms"):
        value = getattr(config, name)
        if not 0 <= value < inf:
            raise LoadError(f"{name} must be at least 0, not {value}.")
    for name, modes in OF_MODES.items():
        value, default = getattr(config, name), getattr(DEFAULTS, name)
        if value != default and config.batching not in modes:
            raise LoadError(
                f"{name} is {value}, but it has a meaning only with batching {' or '.join(modes)}, and that is "
                f"{config.batching}; leave out one of them."
            )


def threads(asked: int, machine: Machine) -> Choice:
    allowed = machine.cores
    reason = f"{machine.cores} in the affinity mask"
    if machine.cpu_quota is not None and machine.cpu_quota < allowed:
        allowed = max(1, int(machine.cpu_quota))
        reason = f"the container's CPU quota is {machine.cpu_quota:g} cores"
    if not asked:
        return Choice(allowed, f"threads {allowed}: {reason}")
    if asked > allowed:
        return Choice(asked, f"threads {asked}: as asked, although {reason}; more threads than cores are slow")
    return Choice(asked, f"threads {asked}: as asked")


def check_weights(weight_bytes: int, available: int) -> None:
    """Weights are copied into memory in the order that the kernels read them."""
    if weight_bytes > available:
        raise LoadError(
            f"the model's weights need {size(weight_bytes)}, but {size(available)} of memory are available; "
            "use a smaller model or free some memory."
        )


def max_num_seqs(asked: int, steps: Sequence[StepTime] = (), target_ms: float = 0) -> Choice:
    """Where throughput stops growing, or above that as far as steps keep the target.

    Beyond the first, more requests at once get no more tokens out of the machine. But those that run have their first
    token early, and those that wait do not, so as many run as leave each its pace. steps: measured, ascending.
    """
    if asked:
        return Choice(asked, f"max_num_seqs {asked}: as asked")
    if not steps:
        return Choice(DEFAULT_MAX_NUM_SEQS, f"max_num_seqs {DEFAULT_MAX_NUM_SEQS}: default")
    rates = [step.rows / step.seconds for step in steps]
    knee = next(step.rows for step, rate in zip(steps, rates, strict=True) if rate >= KNEE * max(rates))
    within = int(TARGET_PART * target_ms / 1e3 * rates[-1]) // SEQS_MULTIPLE * SEQS_MULTIPLE
    value = min(max(knee, within), MOST_SEQS)
    note = f"max_num_seqs {value}: {knee} at once reach {max(rates):.0f} tokens/s, and more do not raise that"
    if value > knee:
        note += f"; {value} keep target_itl_ms {target_ms:g}"
    return Choice(value, note)


def pool(config: EngineConfig, num_seqs: int, context_length: int, bytes_per_token: int, available: int) -> Pool:
    """How many blocks, and how long a request may get.

    num_seqs: requests at once. context_length: of the file. bytes_per_token: K and V of all layers. available: bytes
    free when the weights are loaded.
    """
    block_bytes = config.block_size * bytes_per_token
    wanted_len = config.max_model_len or context_length
    asked_by = "kv_cache_tokens" if config.kv_cache_tokens else "kv_cache_memory"
    if config.kv_cache_memory or config.kv_cache_tokens:
        budget, reason = config.kv_cache_memory or config.kv_cache_tokens * bytes_per_token, "as asked"
        if budget > available:
            raise LoadError(f"{asked_by} is {size(budget)}, but {size(available)} of memory are available; lower it.")
    else:
        budget, reason = int(available * KV_SHARE), f"half of the {size(available)} available"
        useful = num_seqs * -(-wanted_len // config.block_size) * block_bytes
        if useful <= budget:
            budget, reason = useful, f"enough for {num_seqs} requests of {wanted_len} tokens"
    num_blocks = budget // block_bytes
    if num_blocks < 1:
        raise LoadError(
            f"a KV block of {config.block_size} tokens takes {size(block_bytes)}, but the KV memory is {size(budget)} "
            f"({reason}); raise {asked_by}."
        )
    num_tokens = num_blocks * config.block_size
    if config.max_model_len > num_tokens:
        blocks = -(-config.max_model_len // config.block_size)
        needed = blocks * config.block_size if config.kv_cache_tokens else f"{blocks * block_bytes} bytes"
        raise LoadError(
            f"max_model_len is {config.max_model_len}, but the KV memory holds {num_tokens} tokens; "
            f"lower max_model_len or raise {asked_by} to at least {needed}."
        )
    memory = f"kv_cache_memory {size(num_blocks * block_bytes)}, {num_tokens} tokens: {reason}"
    length = _model_len(config.max_model_len, context_length, num_tokens)
    return Pool(num_blocks, length.value, [memory, length.note])


def sharing(config: EngineConfig) -> list[str]:
    """Lines for what was switched away from the default."""
    notes = []
    if not config.enable_prefix_caching:
        notes.append("prefix caching off: as asked; every prompt is computed whole")
    if config.capacity_policy == GUARANTEED_NO_EVICT:
        notes.append(f"capacity_policy {GUARANTEED_NO_EVICT}: as asked; requests wait until they can run to their end")
    if (policy := SCHEDULE_POLICIES[config.schedule_policy]) != "fcfs":
        notes.append(f"schedule_policy {policy}: as asked")
    return notes


def _model_len(asked: int, context_length: int, num_tokens: int) -> Choice:
    """num_tokens: that the KV memory holds; at least what was asked for."""
    if asked:
        return Choice(asked, f"max_model_len {asked}: as asked")
    if num_tokens < context_length:
        reason = f"all that the KV memory holds; the model's context is {context_length}"
        return Choice(num_tokens, f"max_model_len {num_tokens}: {reason}")
    return Choice(context_length, f"max_model_len {context_length}: the model's context")


def budget(asked: int, seconds_per_token: float, num_seqs: int, target_ms: float) -> Choice:
    """max_num_batched_tokens. seconds_per_token: measured on a prompt.

    With a target, what a step computes is chosen step by step, and this bounds it only: it is generous, in case the
    machine was busy when it was measured. At least twice num_seqs, so that prompts never keep anybody from decoding.
    """
    if asked:
        return Choice(asked, f"max_num_batched_tokens {asked}: as asked")
    seconds = TARGETS_OF_A_STEP * target_ms / 1e3 or STEP_SECONDS
    fitting = int(seconds / seconds_per_token) // BUDGET_MULTIPLE * BUDGET_MULTIPLE
    value = min(max(fitting, MIN_DERIVED_BUDGET), MAX_DERIVED_BUDGET)
    rate = f"{1 / seconds_per_token:.0f} prompt tokens/s measured"
    note = f"a step of about {value * seconds_per_token:.2f} s at {rate}"
    if value < 2 * num_seqs:
        value, note = 2 * num_seqs, "twice max_num_seqs"
    if target_ms:
        note += f"; as many of them as target_itl_ms {target_ms:g} allows"
    return Choice(value, f"max_num_batched_tokens {value}: {note}")


def size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
