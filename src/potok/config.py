"""Settings of the engine and of the server, resolved once and never written again.

Flag names are those of vLLM where it has them; the help text of each flag is the field's comment in `cli`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_UTILIZATION, GUARANTEED_NO_EVICT = CAPACITY_POLICIES = ("max_utilization", "guaranteed_no_evict")

#: Names of a policy, each with the one that stands for it: other servers call longest_prefix otherwise.
SCHEDULE_POLICIES = {
    "fcfs": "fcfs",
    "longest_prefix": "longest_prefix",
    "lpm": "longest_prefix",
    "longest_prefix_weight": "longest_prefix",
    "priority": "priority",
    "shortest": "shortest",
    "fair": "fair",
}

OFF, STATIC, DYNAMIC, CONTINUOUS = BATCHING_MODES = ("off", "static", "dynamic", "continuous")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine is asked for. 0 (or None) means: derive it from the machine and say why in the start log."""

    model: str  # path of a GGUF file
    max_num_seqs: int = 0  # requests that run at once
    max_num_batched_tokens: int = 0  # token budget of one step
    max_model_len: int = 0  # tokens of one request, prompt + output
    kv_cache_memory: int = 0  # bytes
    kv_cache_tokens: int = 0  # instead of kv_cache_memory: tokens whose KV is held
    block_size: int = 32  # tokens: 16, 32 or 64
    threads: int = 0
    kv_cache_dtype: str = "f16"  # element type of K and V: f16, f32 or int8
    activation_bits: int = 8  # 8: 8-bit except where fidelity asks for 16; 16: 16-bit everywhere
    enable_prefix_caching: bool = True  # requests that begin with the same tokens share their KV
    capacity_policy: str = MAX_UTILIZATION  # or guaranteed_no_evict: admit only what can run to its last token
    schedule_policy: str = "fcfs"  # who joins first
    batching: str = CONTINUOUS  # when waiting requests may join those that run
    padding_rows: bool = True  # static, dynamic: go on computing finished members until the last one ends
    max_wait_ms: float = 20.0  # dynamic: a batch is gathered for so long
    max_tokens_per_batch: int = 0  # dynamic: or until it has so many tokens of prompts; 0: no such limit
    scheduler_delay_factor: float = 0.0  # continuous: hold prompts for so many times the last prompt step
    target_itl_ms: float = 100.0  # the gap between two tokens to keep while prompts are computed; 0: no target
    journal: str = ""  # file for all calls to the scheduler, to be replayed; "": none
    journal_redact: bool = False  # token ids in it are replaced, each by another
    prefix_cache_dir: str = ""  # folder where computed prefixes are kept, also for the next start; "": nowhere
    swap_space: float = 4.0  # GiB that they may take there


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""  # "": the file's name without its ending
    drain_seconds: float = 30.0  # how long running requests may take to finish after SIGTERM
    api_keys: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # (name, key); empty: everybody is let in
    max_waiting: int = 1024  # requests that wait to run; more are refused
    max_waiting_tokens: int = 0  # the same in tokens of their prompts; 0: no such limit
    key_requests: int = 0  # requests of one API key at once, running or waiting; 0: no such limit
    key_tokens_per_minute: int = 0  # prompts and answers of one API key; 0: no such limit
