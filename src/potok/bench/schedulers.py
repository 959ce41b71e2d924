"""Schedulers beside an engine's own, with other settings, for measurements that need one each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import msgspec

from potok.core.scheduler import Scheduler
from potok.engine.scheduling import build_scheduler
from potok.engine.serve import Engine


class NewScheduler(Protocol):
    """max_num_seqs, max_num_batched_tokens: as in Limits; 0: as the engine has them.

    settings: fields of SchedulerSettings that differ from the engine's.
    """

    def __call__(self, *, max_num_seqs: int = 0, max_num_batched_tokens: int = 0, **settings: Any) -> Scheduler: ...


def new_scheduler(engine: Engine) -> NewScheduler:
    """They use the engine's backend and its KV memory, one at a time, and no second tier."""

    def new(*, max_num_seqs: int = 0, max_num_batched_tokens: int = 0, **settings: Any) -> Scheduler:
        limits = engine.settings.limits
        limits = replace(
            limits,
            max_num_seqs=max_num_seqs or limits.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens or limits.max_num_batched_tokens,
        )
        return build_scheduler(
            msgspec.structs.replace(engine.settings, limits=limits, tier=None, **settings), Scheduler
        )

    return new
