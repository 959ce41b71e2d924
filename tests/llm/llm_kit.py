"""A script with memory and its oracle: what each request alone must be answered with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from potok.backends.modelled.scripted import ScriptedBackend
from potok.config import EngineConfig
from potok.engine.assemble import assemble
from potok.engine.local import LocalEngine
from potok.engine.probe import Speed

FIRST, COUNT = 1000, 40_000  # ids that the script uses: no control tokens
CONTEXT = 512


def remember_all(history: Sequence[int]) -> int:
    """A next id that depends on every token and every position before it."""
    state = 17
    for token in history:
        state = (state * 31 + token) % 1_000_003
    return FIRST + state % COUNT


def expected(prompt: Sequence[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(remember_all(history))
    return history[len(prompt) :]


def scripted(script: Callable[[Sequence[int]], int] = remember_all, **hooks: Any) -> ScriptedBackend:
    return ScriptedBackend(script, context_length=CONTEXT, block_size=16, **hooks)


def local_engine(backend: ScriptedBackend, *, max_num_seqs: int = 16, **settings: Any) -> LocalEngine:
    config = EngineConfig(
        model="",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256,
        kv_cache_memory=512 * 16 * 4,
        block_size=16,
        **settings,
    )
    return LocalEngine(assemble(config, backend, memory=2**30, notes=[], probe=lambda _: Speed(1e-3)))
