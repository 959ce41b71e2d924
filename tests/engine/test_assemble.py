"""Probing and putting an engine together, over the scripted backend."""

from __future__ import annotations

import pytest
from engine_kit import VOCAB, remember_all

from potok.backends.api import StepInputs
from potok.backends.modelled.scripted import ScriptedBackend
from potok.config import EngineConfig
from potok.core.policy import LongestPrefix, Policy
from potok.engine import probe
from potok.engine.assemble import assemble
from potok.engine.probe import PROMPT_TOKENS, WARM_UP_TOKENS, Speed, StepTime, measure
from potok.errors import LoadError

MIB = 2**20


class Clock:
    """A step takes `step` and for each token `token` seconds of a time that only steps make pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, step: float = 0.0, token: float) -> None:
        self._step, self._token = step, token
        self.now = 0.0
        self.steps: list[int] = []
        monkeypatch.setattr(probe.time, "perf_counter", lambda: self.now)

    def __call__(self, inputs: StepInputs) -> None:
        self.steps.append(len(inputs.tokens))
        self.now += self._step + self._token * len(inputs.tokens)


def measured(clock: Clock, num_blocks: int = 300) -> Speed:
    backend = ScriptedBackend(remember_all, vocab_size=VOCAB, on_step=clock)
    backend.allocate(num_blocks, 256)
    return measure(backend)


def test_the_probe_measures_prompt_tokens_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = measured(Clock(monkeypatch, step=0.001, token=1e-3), num_blocks=8)
    assert speed.token_s == pytest.approx(65e-3 / 64)
    assert speed.steps == (StepTime(8, pytest.approx(9e-3)),)


@pytest.mark.parametrize(
    ("step", "token", "rows"),
    [
        (0.01, 1e-4, [8, 16, 32, 64, 128, 256]),  # 741, 1380, 2424, 3902, 5614 and 7191 rows a second
        (0.0, 1e-3, [8, 16]),  # twice as many gain nothing
        (0.002, 1e-3, [8, 16, 32, 64]),  # 800, 889, 941 and 970
        (0.1, 1e-2, [8]),  # a step of 16 is not worth its time
        (0.0, 1.0, []),
    ],
)
def test_rows_are_doubled_until_that_gains_nothing(
    monkeypatch: pytest.MonkeyPatch, step: float, token: float, rows: list[int]
) -> None:
    assert [s.rows for s in measured(Clock(monkeypatch, step=step, token=token)).steps] == rows


@pytest.mark.parametrize(
    ("seconds_per_token", "num_blocks", "steps"),
    [
        (1e-6, 8, [WARM_UP_TOKENS, PROMPT_TOKENS, 8, 8]),
        (5e-3, 8, [WARM_UP_TOKENS, 8, 8]),  # slow: a long step would only make the start longer
        (1e-6, 2, [WARM_UP_TOKENS, 32]),  # only blocks that exist
    ],
)
def test_the_probe_is_short(
    monkeypatch: pytest.MonkeyPatch, seconds_per_token: float, num_blocks: int, steps: list[int]
) -> None:
    clock = Clock(monkeypatch, token=seconds_per_token)
    backend = ScriptedBackend(remember_all, vocab_size=VOCAB, block_size=16, on_step=clock)
    backend.allocate(num_blocks, 256)
    measure(backend)
    assert clock.now < 0.3
    assert clock.steps == steps


def test_the_budget_follows_the_probe_and_every_setting_has_a_note() -> None:
    backend = ScriptedBackend(remember_all, vocab_size=VOCAB, context_length=512)
    engine = assemble(
        EngineConfig(model=""), backend, memory=MIB, notes=["threads 1: test"], probe=lambda _: Speed(1e-3)
    )
    assert engine.info.max_num_batched_tokens == engine.scheduler.limits.max_num_batched_tokens == 288
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
    engine = assemble(EngineConfig(model="", **settings), backend, memory=MIB, notes=[], probe=lambda _: Speed(1e-3))
    assert (engine.scheduler.cache.enabled, engine.scheduler.limits.no_evict) == (caching, no_evict)
    assert type(engine.scheduler.policy) is (LongestPrefix if "schedule_policy" in settings else Policy)
    said = [note for note in engine.info.notes if note.startswith(("prefix", "capacity", "schedule"))]
    assert [note.partition(":")[0] for note in said] == notes


def test_kv_memory_that_is_not_there_is_refused_before_it_is_taken() -> None:
    backend = ScriptedBackend(remember_all, vocab_size=VOCAB)
    with pytest.raises(LoadError, match="kv_cache_memory"):
        assemble(EngineConfig(model="", kv_cache_memory=2 * MIB), backend, memory=MIB, notes=[], probe=measure)
    assert backend.info.num_blocks == 0
