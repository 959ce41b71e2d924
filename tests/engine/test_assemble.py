"""Probing and putting an engine together, over the scripted backend."""

from __future__ import annotations

import time

import pytest
from engine_kit import VOCAB, remember_all

from potok.backends.api import StepInputs
from potok.backends.modelled.scripted import ScriptedBackend
from potok.config import EngineConfig
from potok.core.policy import LongestPrefix, Policy
from potok.engine.assemble import PROBE_TOKENS, WARM_UP_TOKENS, assemble, measure
from potok.errors import LoadError

MIB = 2**20


def test_the_probe_measures_prompt_tokens() -> None:
    backend = ScriptedBackend(remember_all, vocab_size=VOCAB, seconds_per_token=1e-3)
    backend.allocate(8, 256)
    assert 1e-3 <= measure(backend) < 1.5e-3


@pytest.mark.parametrize(
    ("seconds_per_token", "num_blocks", "steps"),
    [
        (1e-6, 8, [WARM_UP_TOKENS, PROBE_TOKENS]),
        (5e-3, 8, [WARM_UP_TOKENS]),  # slow: a long step would only make the start longer
        (1e-6, 2, [WARM_UP_TOKENS, 32]),  # only blocks that exist
    ],
)
def test_the_probe_is_short(seconds_per_token: float, num_blocks: int, steps: list[int]) -> None:
    seen: list[int] = []

    def note(inputs: StepInputs) -> None:
        seen.append(len(inputs.tokens))

    backend = ScriptedBackend(
        remember_all, vocab_size=VOCAB, block_size=16, on_step=note, seconds_per_token=seconds_per_token
    )
    backend.allocate(num_blocks, 256)
    started = time.monotonic()
    measure(backend)
    assert time.monotonic() - started < 0.3
    assert seen == steps


def test_the_budget_follows_the_probe_and_every_setting_has_a_note() -> None:
    backend = ScriptedBackend(remember_all, vocab_size=VOCAB, context_length=512)
    engine = assemble(EngineConfig(model=""), backend, memory=MIB, notes=["threads 1: test"], probe=lambda _: 1e-3)
    assert engine.info.max_num_batched_tokens == engine.scheduler.limits.max_num_batched_tokens == 80
    assert engine.info.num_blocks == backend.info.num_blocks == engine.scheduler.pool.num_blocks
    assert engine.info.max_model_len == 512
    for name in ("threads", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory"):
        assert sum(note.startswith(name + " ") for note in engine.info.notes) == 1, name


@pytest.mark.parametrize(
    ("settings", "caching", "no_evict", "notes"),
    [
        ({}, True, False, []),
        ({"enable_prefix_caching": False}, False, False, ["prefix caching off"]),
        ({"schedule_policy": "longest_prefix"}, True, False, ["schedule_policy longest_prefix"]),
        ({"schedule_policy": "lpm"}, True, False, ["schedule_policy longest_prefix"]),
        ({"capacity_policy": "guaranteed_no_evict"}, True, True, ["capacity_policy guaranteed_no_evict"]),
    ],
)
def test_how_memory_is_shared(settings: dict, caching: bool, no_evict: bool, notes: list[str]) -> None:
    backend = ScriptedBackend(remember_all, vocab_size=VOCAB)
    engine = assemble(EngineConfig(model="", **settings), backend, memory=MIB, notes=[], probe=lambda _: 1e-3)
    assert (engine.scheduler.cache.enabled, engine.scheduler.limits.no_evict) == (caching, no_evict)
    assert type(engine.scheduler.policy) is (LongestPrefix if "schedule_policy" in settings else Policy)
    said = [note for note in engine.info.notes if note.startswith(("prefix", "capacity", "schedule"))]
    assert [note.partition(":")[0] for note in said] == notes


def test_kv_memory_that_is_not_there_is_refused_before_it_is_taken() -> None:
    backend = ScriptedBackend(remember_all, vocab_size=VOCAB)
    with pytest.raises(LoadError, match="kv_cache_memory"):
        assemble(EngineConfig(model="", kv_cache_memory=2 * MIB), backend, memory=MIB, notes=[], probe=measure)
    assert backend.info.num_blocks == 0
