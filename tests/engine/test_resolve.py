"""Settings from machine facts: by table, no machine involved."""

from __future__ import annotations

from typing import Any

import pytest

from potok.config import EngineConfig
from potok.engine import resolve
from potok.engine.machine import Machine
from potok.engine.probe import StepTime
from potok.errors import LoadError

GIB = 2**30


def machine(cores: int = 8, quota: float | None = None) -> Machine:
    return Machine(cores, quota, 16 * GIB, None)


def config(**settings: int) -> EngineConfig:
    return EngineConfig(model="m.gguf", **settings)


@pytest.mark.parametrize(
    ("asked", "cores", "quota", "expected", "reason"),
    [
        (0, 8, None, 8, "affinity"),
        (0, 1, None, 1, "affinity"),
        (0, 8, 1.5, 1, "quota is 1.5"),  # rounded down: a thread that runs half the time stalls all others
        (0, 8, 0.3, 1, "quota is 0.3"),
        (0, 8, 2.0, 2, "quota is 2"),
        (0, 2, 6.0, 2, "affinity"),
        (3, 8, None, 3, "as asked"),
        (4, 2, None, 4, "although 2"),
    ],
)
def test_threads(asked: int, cores: int, quota: float | None, expected: int, reason: str) -> None:
    choice = resolve.threads(asked, machine(cores, quota))
    assert choice.value == expected
    assert choice.note.startswith(f"threads {expected}: ")
    assert reason in choice.note


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_batched_tokens": -1}, ["max_num_batched_tokens", "at least 1", "-1"]),
        ({"max_num_seqs": -3}, ["max_num_seqs", "at least 1", "-3"]),
        ({"kv_cache_memory": -1}, ["kv_cache_memory"]),
        ({"threads": -1}, ["threads"]),
        ({"max_model_len": -1}, ["max_model_len"]),
        ({"max_model_len": 1}, ["max_model_len", "at least 2"]),
        ({"max_model_len": 8193}, ["max_model_len", "8193", "8192", "lower"]),
        ({"block_size": 48}, ["block_size", "16, 32 or 64", "48"]),
        ({"activation_bits": 4}, ["activation_bits", "8 or 16", "4"]),
        ({"kv_cache_tokens": -1}, ["kv_cache_tokens", "at least 1"]),
        ({"kv_cache_tokens": 512, "kv_cache_memory": 2**30}, ["kv_cache_tokens", "kv_cache_memory", "give one"]),
        ({"capacity_policy": "hope"}, ["capacity_policy", "max_utilization or guaranteed_no_evict", "'hope'"]),
        ({"batching": "inflight"}, ["batching", "off, static, dynamic, continuous", "'inflight'"]),
        ({"max_wait_ms": 5.0}, ["max_wait_ms is 5.0", "batching dynamic", "continuous", "leave out one"]),
        ({"max_wait_ms": 5.0, "batching": "static"}, ["max_wait_ms", "batching dynamic", "static"]),
        ({"max_wait_ms": -1.0, "batching": "dynamic"}, ["max_wait_ms", "at least 0", "-1"]),
        ({"max_tokens_per_batch": 64, "batching": "static"}, ["max_tokens_per_batch", "dynamic"]),
        ({"padding_rows": False}, ["padding_rows is False", "batching static or dynamic"]),
        ({"padding_rows": False, "batching": "off"}, ["padding_rows", "static or dynamic"]),
        ({"scheduler_delay_factor": 0.5, "batching": "static"}, ["scheduler_delay_factor", "continuous"]),
        ({"scheduler_delay_factor": float("nan")}, ["scheduler_delay_factor", "at least 0"]),
        ({"target_itl_ms": float("inf")}, ["target_itl_ms", "at least 0"]),
        ({"target_itl_ms": -60.0}, ["target_itl_ms", "at least 0"]),
        ({"journal_redact": True}, ["journal_redact", "no journal"]),
        ({"schedule_policy": "random"}, ["schedule_policy", "fcfs, longest_prefix", "'random'"]),
    ],
)
def test_contradictions_are_refused_in_one_sentence(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LoadError) as caught:
        resolve.check(config(**settings), context_length=8192)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plain_settings_pass() -> None:
    resolve.check(config(), context_length=8192)
    resolve.check(config(max_model_len=8192, block_size=64, max_num_seqs=1, max_num_batched_tokens=1), 8192)


def test_pool_takes_half_of_what_is_available() -> None:
    pool = resolve.pool(config(), 128, 8192, bytes_per_token=32 * 1024, available=4 * GIB)
    assert pool.num_blocks == 2 * GIB // (32 * 32 * 1024)
    assert pool.max_model_len == 8192
    assert any("half of the 4.0 GiB" in note for note in pool.notes)


def test_pool_takes_no_more_than_all_requests_can_fill() -> None:
    pool = resolve.pool(config(), 4, 100, bytes_per_token=1024, available=64 * GIB)
    assert pool.num_blocks == 4 * 4  # 100 tokens: 4 blocks of 32
    assert pool.max_model_len == 100


def test_context_is_lowered_to_the_pool_and_the_note_says_so() -> None:
    pool = resolve.pool(config(kv_cache_memory=1000 * 1024), 128, 8192, bytes_per_token=1024, available=GIB)
    assert pool.num_blocks == 31
    assert pool.max_model_len == 31 * 32
    assert any("max_model_len 992" in note and "8192" in note for note in pool.notes)


@pytest.mark.parametrize(
    ("settings", "available", "words"),
    [
        ({"kv_cache_memory": 1024}, GIB, ["32 tokens", "kv_cache_memory", "1 KiB"]),
        ({}, 1024, ["32 tokens", "kv_cache_memory"]),
        ({"kv_cache_memory": 2 * GIB}, GIB, ["kv_cache_memory", "2.0 GiB", "1.0 GiB"]),
        (
            {"kv_cache_memory": 64 * 1024, "max_model_len": 65},
            GIB,
            ["max_model_len", "65", "64 tokens", str(96 * 1024)],
        ),
    ],
)
def test_a_pool_that_cannot_work_is_refused(settings: dict[str, int], available: int, words: list[str]) -> None:
    with pytest.raises(LoadError) as caught:
        resolve.pool(config(**settings), 128, 8192, bytes_per_token=1024, available=available)
    for word in words:
        assert word in str(caught.value)


def test_the_pool_can_be_given_in_tokens() -> None:
    pool = resolve.pool(config(kv_cache_tokens=1000), 128, 8192, bytes_per_token=1024, available=GIB)
    assert (pool.num_blocks, pool.max_model_len) == (31, 992)
    assert any("992 tokens: as asked" in note for note in pool.notes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_tokens": 31}, ["32 tokens", "raise kv_cache_tokens"]),
        ({"kv_cache_tokens": 2 * 2**20}, ["kv_cache_tokens", "2.0 GiB", "1.0 GiB"]),
        ({"kv_cache_tokens": 64, "max_model_len": 65}, ["65", "64 tokens", "raise kv_cache_tokens to at least 96."]),
    ],
)
def test_a_pool_in_tokens_that_cannot_work_is_refused(settings: dict[str, int], words: list[str]) -> None:
    with pytest.raises(LoadError) as caught:
        resolve.pool(config(**settings), 128, 8192, bytes_per_token=1024, available=GIB)
    for word in words:
        assert word in str(caught.value)


def test_following_the_advice_of_a_refusal_helps() -> None:
    """The number of bytes that the sentence asks for is enough, for every block size."""
    for block_size in resolve.BLOCK_SIZES:
        for length in (16, 17, 63, 64, 65, 100):
            settings = {"kv_cache_memory": 64 * 1000, "max_model_len": length, "block_size": block_size}
            try:
                resolve.pool(config(**settings), 1, 8192, bytes_per_token=1000, available=GIB)
            except LoadError as error:
                needed = int(str(error).rsplit("at least ", 1)[1].split()[0])
                settings["kv_cache_memory"] = needed
                assert resolve.pool(config(**settings), 1, 8192, 1000, GIB).max_model_len == length


@pytest.mark.parametrize(
    ("asked", "seconds_per_token", "target_ms", "expected"),
    [
        (0, 1e-3, 0, 80),
        (0, 0.95e-3, 0, 80),  # 84 tokens fit; a multiple of 16
        (0, 1e-2, 0, 32),
        (0, 5e-2, 0, 32),
        (0, 1e-6, 0, 2048),
        (0, 0.08 / 512, 0, 512),
        (0, 1e-3, 100, 288),  # three targets: 300 tokens
        (0, 1e-1, 100, 32),
        (1, 1e-3, 100, 1),
        (5000, 1e-3, 0, 5000),
    ],
)
def test_budget(asked: int, seconds_per_token: float, target_ms: float, expected: int) -> None:
    choice = resolve.budget(asked, seconds_per_token, 8, target_ms)
    assert choice.value == expected
    assert choice.note.startswith(f"max_num_batched_tokens {expected}: ")


def test_prompts_never_keep_anybody_from_decoding() -> None:
    choice = resolve.budget(0, 1e-2, 100, 100)
    assert choice.value == 200 and "twice max_num_seqs" in choice.note


def test_max_num_seqs() -> None:
    assert resolve.max_num_seqs(0).value == 128
    assert resolve.max_num_seqs(3) == (3, "max_num_seqs 3: as asked")


def test_max_num_seqs_is_where_throughput_stops_growing_or_what_keeps_the_target() -> None:
    steps = [StepTime(8, 0.010), StepTime(16, 0.016), StepTime(32, 0.0300), StepTime(64, 0.0599)]
    knee = resolve.max_num_seqs(0, steps)
    assert knee.value == 32 and "32 at once reach 1068 tokens/s" in knee.note
    wide = resolve.max_num_seqs(0, steps, 100.0)
    assert wide.value == 80 and "80 keep target_itl_ms 100" in wide.note  # 75 ms at 1068 a second
    slow = [StepTime(8, 0.080), StepTime(16, 0.155)]
    assert resolve.max_num_seqs(0, slow, 100.0).value == 8
    assert resolve.max_num_seqs(0, [StepTime(8, 1e-6)], 100.0).value == 256


def test_weights_that_do_not_fit_are_refused_with_both_numbers() -> None:
    resolve.check_weights(GIB, GIB)
    with pytest.raises(LoadError, match=r"3\.0 GiB.*1\.0 GiB"):
        resolve.check_weights(3 * GIB, GIB)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (2**20, "1 MiB"), (2**31, "2.0 GiB")]
)
def test_size(num_bytes: int, text: str) -> None:
    assert resolve.size(num_bytes) == text
