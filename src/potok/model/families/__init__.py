"""Model families by the architecture name of the file. One file each; adding one touches this table and that file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from potok.model.config import ModelConfig
from potok.model.families import llama, qwen2
from potok.model.plan import Plan, RopeKind

FAMILIES: dict[str, Callable[[ModelConfig], Plan]] = {
    "llama": partial(llama.record, rope=RopeKind.INTERLEAVED),
    "qwen2": qwen2.record,
}
