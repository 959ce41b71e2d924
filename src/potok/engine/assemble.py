"""From a loaded backend to an engine that can serve: sizes of the KV memory and of a step, and the first steps."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol

from potok.backends.api import Backend
from potok.backends.inputs import pack
from potok.config import GUARANTEED_NO_EVICT, SCHEDULE_POLICIES, EngineConfig
from potok.core.batch import Batch, Segment
from potok.core.radix import BYTES
from potok.core.scheduler import Limits, Scheduler
from potok.engine import resolve
from potok.engine.journal import Journal, create
from potok.engine.recorded import RecordedScheduler
from potok.engine.redacted import Mask, RedactedScheduler
from potok.engine.scheduling import SchedulerSettings, TierSettings, build_scheduler
from potok.engine.serve import Engine
from potok.engine.tier_store import Locked, NoStore, Store, TierStore
from potok.errors import LoadError
from potok.protocol import EngineInfo, Sampling
from potok.sampling.state import RowState, build_rows

PROBE_TOKENS = 64
WARM_UP_TOKENS = 16
PROBE_SECONDS = 0.2
#: What reading a block is taken to cost before any has been read: a modest disk.
DISK_BYTES_PER_US = 500


class AllocatingBackend(Backend, Protocol):
    """A backend whose weights are loaded. `info.num_blocks` counts after `allocate`."""

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Takes the KV memory. Called once, before the first step."""

    def kv_block(self, block: int) -> memoryview:
        """The memory of one block, as long as any other's; writable."""
        ...


def assemble(
    config: EngineConfig,
    backend: AllocatingBackend,
    *,
    memory: int,
    notes: list[str],
    probe: Callable[[AllocatingBackend], float],
    fingerprint: Callable[[], str] = lambda: "",
) -> Engine:
    """memory: bytes available now. notes: of what has been resolved before. probe: runs steps, tells seconds per token.
    fingerprint: names what the KV depends on; called only when prefixes are to be kept.

    Raises LoadError when the settings, the model and the machine do not fit together.
    """
    info = backend.info
    seqs = resolve.max_num_seqs(config.max_num_seqs)
    pool = resolve.pool(config, seqs.value, info.context_length, info.kv_bytes_per_token, memory)
    backend.allocate(pool.num_blocks, pool.max_model_len)
    named = fingerprint() if config.prefix_cache_dir else ""  # before the probe, which wants the cores for itself
    seconds_per_token = probe(backend)
    budget = resolve.budget(config.max_num_batched_tokens, seconds_per_token)
    no_evict = config.capacity_policy == GUARANTEED_NO_EVICT
    limits = Limits(seqs.value, budget.value, pool.max_model_len, config.block_size, no_evict)
    second = open_tier(config, backend, named, seconds_per_token)
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
        token_us=seconds_per_token * 1e6,
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
            max_num_seqs=seqs.value,
            max_num_batched_tokens=budget.value,
            threads=info.threads,
            isa=info.isa,
            kv_cache_bytes=pool.num_blocks * config.block_size * info.kv_bytes_per_token,
            notes=[*notes, *backend.info.notes],
        ),
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


def measure(backend: AllocatingBackend) -> float:
    """Seconds per prompt token, from steps on blocks that nobody uses yet. It warms everything up, too.

    The second, longer step comes closer to what a full step costs; on a slow machine it is left out.
    """
    num_tokens = min(PROBE_TOKENS, backend.info.num_blocks * backend.info.block_size, backend.info.context_length)
    warm_up = min(WARM_UP_TOKENS, num_tokens)
    per_token = _time_prompt(backend, warm_up) / warm_up
    if per_token * num_tokens <= PROBE_SECONDS:
        per_token = min(per_token, _time_prompt(backend, num_tokens) / num_tokens)
    return per_token


def _time_prompt(backend: AllocatingBackend, num_tokens: int) -> float:
    """Seconds of one step that computes a made-up prompt and samples after it."""
    info = backend.info
    tokens = array("i", (7919 * i % info.vocab_size for i in range(num_tokens)))
    blocks = array("i", range(-(-num_tokens // info.block_size)))
    inputs = pack(Batch(0, (Segment(0, 0, tokens, blocks, sample=True),)), info.block_size)
    rows = build_rows([(RowState(Sampling(), tokens), num_tokens)], want_hashes=False)
    started = time.perf_counter()
    backend.step(inputs, rows)
    return time.perf_counter() - started
