"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and halves rotated instead of neighbours."""

from __future__ import annotations

from potok.model.config import ModelConfig
from potok.model.families import llama
from potok.model.plan import Plan, RopeKind


def record(config: ModelConfig) -> Plan:
    return llama.record(config, RopeKind.HALVES)
