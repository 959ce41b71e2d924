"""Bad afternoons: made-up calls to a scheduler, as many and as mixed as anybody could wish, and without a model."""

from __future__ import annotations

import io
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from potok.core.batch import Delta
from potok.core.radix import Domain
from potok.core.request import Request
from potok.core.scheduler import Limits, Scheduler
from potok.core.tier import Done, Transfer
from potok.engine.journal import JournalReader, create
from potok.engine.recorded import RecordedScheduler
from potok.engine.redacted import Mask, RedactedScheduler
from potok.engine.replay import Replayed, replay
from potok.engine.scheduling import SchedulerSettings, TierSettings, build_scheduler

VOCAB = 50_000
STOP = 49_999
SALT, NAMESPACE = "grains of salt", "alice in chains"
TIER = TierSettings(num_slots=48, found=[(bytes([i]) * 16, i) for i in range(5)], read_us=10.0, token_us=100.0)


def settings(**changes: Any) -> SchedulerSettings:
    """A pool that is far too small."""
    usual = SchedulerSettings(
        limits=Limits(max_num_seqs=64, max_num_batched_tokens=256, max_model_len=200, block_size=4),
        num_blocks=200,
        prefix_caching=True,
        policy="fcfs",
        batching="continuous",
        padding_rows=True,
        max_wait_us=20_000,
        max_tokens_per_batch=0,
        delay_factor=0.0,
        target_us=15_000,
        token_us=50.0,
        tier=None,
    )
    return msgspec.structs.replace(usual, **changes)


@dataclass
class Afternoon:
    """requests: how many come. All of it follows from the seed and from what the scheduler answers."""

    requests: int = 400
    seed: int = 0

    def play(self, scheduler: Scheduler) -> list[Delta]:
        """Everything that came of it."""
        rng = Random(self.seed)
        preambles = [[rng.randrange(VOCAB) for _ in range(rng.randrange(24))] for _ in range(9)]
        ids = (STOP, -1, *range(200))
        under_way: list[Transfer] = []
        answers: list[Delta] = []
        now, next_id = 1_000_000, 1
        while True:
            for _ in range(
                rng.choice((0, 3, 9, 16)) if len(scheduler.waiting) < 40 and next_id <= self.requests else 0
            ):
                scheduler.submit(request(next_id, rng, rng.choice(preambles), now))
                next_id += 1
            if rng.random() < 0.1:
                scheduler.cancel(rng.randrange(max(1, next_id - 40), next_id + 1))
            rng.shuffle(under_way)
            ended = [under_way.pop() for _ in range(rng.randrange(len(under_way) + 1))]
            scheduler.transferred([Done(t.id, rng.random() < 0.8, rng.randrange(100)) for t in ended])
            batch = scheduler.schedule(now)
            under_way += scheduler.take_transfers()
            deltas = scheduler.take_ended()
            if batch is not None:
                if rng.random() < 0.05:
                    scheduler.cancel(rng.choice(batch.segments).id)
                sampled = [rng.choice(ids) for _ in range(batch.num_sampled)]
                deltas += scheduler.commit(batch, sampled, rng.randrange(100, 20_000))
            answers += deltas
            if batch is None and next_id > self.requests and not (scheduler.waiting or scheduler.running or under_way):
                return answers
            now += rng.randrange(100, 40_000)


def request(id: int, rng: Random, preamble: list[int], now: int) -> Request:
    tokens = array(
        "i", preamble[: rng.randrange(len(preamble) + 1)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(10))]
    )
    domain = Domain(namespace=rng.choice(("", "", NAMESPACE, "bob")), salt=rng.choice(("", "", "", SALT)))
    return Request(
        id,
        tokens,
        len(tokens),
        rng.choice((1, 3, 24)),
        frozenset((STOP, rng.randrange(VOCAB))),
        domain,
        rate_until=len(tokens) if rng.random() < 0.1 else 0,
        arrived_us=now - rng.randrange(1000),
        first_by_us=rng.choice((0, now + 500_000)),
        ends_by_us=rng.choice((0, now + 9_000_000)),
        priority=rng.randrange(-1, 3),
        whole=rng.random() < 0.3,
    )


def record(path: Path, afternoon: Afternoon, settings: SchedulerSettings, *, redacted: bool = False) -> list[Delta]:
    """Writes the journal of an afternoon; returns its answers."""
    journal, _ = create(str(path), settings, redacted)
    scheduler: RecordedScheduler
    if redacted:
        scheduler = build_scheduler(settings, RedactedScheduler)
        scheduler.hide_with(Mask(VOCAB))
    else:
        scheduler = build_scheduler(settings, RecordedScheduler)
    scheduler.record_to(journal)
    answers = afternoon.play(scheduler)
    journal.close()
    return answers


def replayed(data: bytes) -> Replayed:
    return replay(JournalReader(io.BytesIO(data), "it"))


if __name__ == "__main__":  # a writer that goes on until it is killed
    record(Path(sys.argv[1]), Afternoon(requests=10**9), settings())
