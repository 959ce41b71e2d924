"""From a loaded backend to an engine that can serve: sizes of the KV memory and of a step, and the first steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from potok.backends.api import AllocatingBackend
from potok.config import GUARANTEED_NO_EVICT, OFF, SCHEDULE_POLICIES, EngineConfig
from potok.core.radix import BYTES
from potok.core.scheduler import Limits, Scheduler
from potok.engine import resolve
from potok.engine.journal import Journal, create
from potok.engine.probe import Speed
from potok.engine.recorded import RecordedScheduler
from potok.engine.redacted import Mask, RedactedScheduler
from potok.engine.scheduling import SchedulerSettings, TierSettings, build_scheduler
from potok.engine.serve import Engine
from potok.engine.tier_store import Locked, NoStore, Store, TierStore
from potok.errors import LoadError
from potok.protocol import EngineInfo

#: What reading a block is taken to cost before any has been read: a modest disk.
DISK_BYTES_PER_US = 500


def assemble(
    config: EngineConfig,
    backend: AllocatingBackend,
    *,
    memory: int,
    notes: list[str],
    probe: Callable[[AllocatingBackend], Speed],
    fingerprint: Callable[[], str] = lambda: "",
) -> Engine:
    """memory: bytes available now. notes: of what has been resolved before. probe: runs steps, tells how fast they are.
    fingerprint: names what the KV depends on; called only when prefixes are to be kept.

    Raises LoadError when the settings, the model and the machine do not fit together.
    """
    info = backend.info
    at_once = config.max_num_seqs or resolve.DEFAULT_MAX_NUM_SEQS  # before anything is measured
    pool = resolve.pool(config, at_once, info.context_length, info.kv_bytes_per_token, memory)
    backend.allocate(pool.num_blocks, pool.max_model_len)
    named = fingerprint() if config.prefix_cache_dir else ""  # before the probe, which wants the cores for itself
    speed = probe(backend)
    seqs = resolve.max_num_seqs(config.max_num_seqs, speed.steps, config.target_itl_ms)
    budget = resolve.budget(config.max_num_batched_tokens, speed.token_s, seqs.value, config.target_itl_ms)
    no_evict = config.capacity_policy == GUARANTEED_NO_EVICT
    limits = Limits(seqs.value, budget.value, pool.max_model_len, config.block_size, no_evict)
    second = open_tier(config, backend, named, speed.token_s)
    settings = SchedulerSettings(
        limits=limits,
        num_blocks=pool.num_blocks,
        prefix_caching=config.enable_prefix_caching,
        policy=SCHEDULE_POLICIES[config.schedule_policy],
        batching=config.batching,
        padding_rows=config.padding_rows,
        max_wait_us=round(config.max_wait_ms * 1000),
        max_tokens_per_batch=config.max_tokens_per_batch,
        delay_factor=config.scheduler_delay_factor,
        target_us=round(config.target_itl_ms * 1000),
        token_us=speed.token_s * 1e6,
        tier=second.settings,
    )
    try:
        recorded = open_scheduler(config, settings, info.vocab_size)
    except LoadError:
        second.store.close()
        raise
    notes = [*notes, *pool.notes, seqs.note, budget.note, *resolve.sharing(config), *second.notes, *recorded.notes]
    return Engine(
        recorded.scheduler,
        backend,
        EngineInfo(
            vocab_size=info.vocab_size,
            max_model_len=pool.max_model_len,
            block_size=config.block_size,
            num_blocks=pool.num_blocks,
            max_num_seqs=1 if config.batching == OFF else seqs.value,
            max_num_batched_tokens=budget.value,
            threads=info.threads,
            isa=info.isa,
            kv_cache_bytes=pool.num_blocks * config.block_size * info.kv_bytes_per_token,
            notes=[*notes, *backend.info.notes],
            schedule_policy=SCHEDULE_POLICIES[config.schedule_policy],
        ),
        settings,
        second.store,
        recorded.journal,
    )


class Recorded(NamedTuple):
    scheduler: Scheduler
    journal: Journal | None
    notes: list[str]


def open_scheduler(config: EngineConfig, settings: SchedulerSettings, vocab_size: int) -> Recorded:
    """The scheduler, which writes a journal where one is asked for. Raises LoadError when it cannot be begun."""
    path = config.journal
    if not path:
        return Recorded(build_scheduler(settings, Scheduler), None, [])
    journal, older = create(path, settings, config.journal_redact)
    scheduler: RecordedScheduler
    if config.journal_redact:
        scheduler = build_scheduler(settings, RedactedScheduler)
        scheduler.hide_with(Mask(vocab_size))
    else:
        scheduler = build_scheduler(settings, RecordedScheduler)
    scheduler.record_to(journal)
    what = "all calls to the scheduler" + (", every token id replaced by another" if config.journal_redact else "")
    return Recorded(scheduler, journal, [f"journal {path}: {what}" + (f"; the older one is {older}" if older else "")])


class SecondTier(NamedTuple):
    settings: TierSettings | None
    store: Store
    notes: list[str]


def open_tier(
    config: EngineConfig, backend: AllocatingBackend, fingerprint: str, seconds_per_token: float
) -> SecondTier:
    """The second tier of the prefix cache, if there is one. Raises LoadError when the folder cannot be used."""
    folder, size = config.prefix_cache_dir, config.block_size
    if not folder:
        return SecondTier(None, NoStore(), [])
    num_bytes = int(config.swap_space * 2**30)
    try:
        store = TierStore(folder, fingerprint, num_bytes=num_bytes, key_bytes=size * BYTES, kv_block=backend.kv_block)
    except Locked:
        note = f"prefix_cache_dir {folder}: another process uses it for this model; this one keeps nothing there"
        return SecondTier(None, NoStore(), [note])
    read_us = store.payload_bytes / DISK_BYTES_PER_US
    settings = TierSettings(
        num_slots=store.num_slots, found=store.found, read_us=read_us, token_us=seconds_per_token * 1e6
    )
    found = f"{len(store.found)} of {store.num_slots} blocks are there, {len(store.found) * size} tokens"
    return SecondTier(settings, store, [f"prefix_cache_dir {folder}, {resolve.size(num_bytes)}: {found}"])
