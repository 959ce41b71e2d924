"""What a scheduler is built from, in one place: the engine builds its own here, and a replay builds the same again."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from potok.config import CONTINUOUS, DYNAMIC, OFF
from potok.core.cost import CostModel
from potok.core.gate import Continuous, Gate, Gathered
from potok.core.policy import POLICIES
from potok.core.scheduler import Limits, Scheduler
from potok.core.tier import Tier

S = TypeVar("S", bound=Scheduler)


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of potok.core.tier.Tier. found: digests and slots, used longest ago first."""

    num_slots: int
    found: list[tuple[bytes, int]]
    read_us: float
    token_us: float


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that two schedulers must agree in to decide alike. No field has a default, so that none is forgotten.

    Names as in potok.config.EngineConfig, resolved, and times in microseconds. token_us: what a prompt's token is taken
    to cost before any step has been seen. tier: None where there is no second tier.
    """

    limits: Limits
    num_blocks: int
    prefix_caching: bool
    policy: str
    batching: str
    padding_rows: bool
    max_wait_us: int
    max_tokens_per_batch: int
    delay_factor: float
    target_us: int
    token_us: float
    tier: TierSettings | None


def build_scheduler(settings: SchedulerSettings, kind: type[S]) -> S:
    """kind: Scheduler, or what stands in for it."""
    return kind(
        settings.limits,
        settings.num_blocks,
        prefix_caching=settings.prefix_caching,
        policy=POLICIES[settings.policy](),
        gate=build_gate(settings),
        target_us=settings.target_us,
        cost=CostModel(settings.token_us),
        tier=None if settings.tier is None else build_tier(settings.tier, settings.limits.block_size),
    )


def build_gate(settings: SchedulerSettings) -> Gate:
    if settings.batching == CONTINUOUS:
        return Continuous(settings.delay_factor)
    if settings.batching == OFF:
        return Gathered(1)
    dynamic = settings.batching == DYNAMIC
    return Gathered(
        settings.limits.max_num_seqs,
        padding=settings.padding_rows,
        max_wait_us=settings.max_wait_us if dynamic else 0,
        max_tokens=settings.max_tokens_per_batch if dynamic else 0,
    )


def build_tier(settings: TierSettings, block_size: int) -> Tier:
    return Tier(settings.num_slots, block_size, settings.found, read_us=settings.read_us, token_us=settings.token_us)
