"""Settings of `LLM` and `AsyncLLM`: those of EngineConfig without the model, which comes first."""

from __future__ import annotations

from typing import TypedDict


class Settings(TypedDict, total=False):
    """What each one means, and its default, stands in potok.config.EngineConfig. 0: derived from the machine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_cache_memory: int
    kv_cache_tokens: int
    block_size: int
    threads: int
    kv_cache_dtype: str
    activation_bits: int
    enable_prefix_caching: bool
    capacity_policy: str
    schedule_policy: str
    journal: str
    journal_redact: bool
    prefix_cache_dir: str
    swap_space: float
    batching: str
    padding_rows: bool
    max_wait_ms: float
    max_tokens_per_batch: int
    scheduler_delay_factor: float
    target_itl_ms: float
