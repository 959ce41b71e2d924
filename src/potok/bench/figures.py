"""From what the clients saw to the figures of one load: pure arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from potok.bench.stream import Record


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread | None:
        """None of nothing: there is no median of no values."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        p50, p95, p99, top = (1000 * percentile(ordered, p) for p in (50, 95, 99, 100))
        return Spread(1000 * sum(ordered) / len(ordered), p50, p95, p99, top)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the ascending values do not exceed."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Targets:
    """What a user accepts: of a request, its time to first token and the 95th percentile of its gaps, in ms."""

    ttft_ms: float
    gap_ms: float

    def met_by(self, record: Record) -> bool:
        if record.error is not None or record.ttft is None or 1000 * record.ttft > self.ttft_ms:
            return False
        gaps = sorted(record.gaps)
        return not gaps or 1000 * percentile(gaps, 95) <= self.gap_ms


@dataclass(frozen=True, slots=True)
class Load:
    """What was offered: so many clients that ask again when answered, or so many requests a second."""

    clients: int | None = None
    rate: float | None = None  # requests/s
    duration_s: float | None = None  # of the arrivals, with a rate

    @property
    def name(self) -> str:
        if self.clients is None:
            return f"{self.rate:g} requests/s"
        return f"{self.clients} client{'s' * (self.clients != 1)}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one load. Rates count answered requests only, over the time from the first send to the last end.

    output_tokens, prompt_tokens: the server's counts. deltas: text deltas that the clients counted themselves.
    ended_early: answered with fewer tokens than asked. uncounted: answered without a usage chunk (deltas stand in).
    client_cpu_us_per_token: CPU of this whole process per token received.
    good: requests within the targets; goodput_per_s: those, per second of arrivals. Both only with a rate.
    """

    load: Load
    requests: int
    answered: int
    errors: dict[str, int]
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    deltas: int
    ended_early: int
    uncounted: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft: Spread | None
    gap: Spread | None
    e2e: Spread | None
    client_cpu_us_per_token: float | None
    good: int | None = None
    goodput_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """One request. sent_s counts from the first request of its load; counts of the server are None without usage."""

    sent_s: float
    ttft_ms: float | None
    e2e_ms: float
    longest_gap_ms: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    deltas: int
    finish: str | None
    error: str | None

    @staticmethod
    def of(record: Record, start: float) -> RequestFigures:
        gaps = record.gaps
        return RequestFigures(
            sent_s=record.due - start,
            ttft_ms=None if record.ttft is None else 1000 * record.ttft,
            e2e_ms=1000 * (record.end - record.due),
            longest_gap_ms=1000 * max(gaps) if gaps else None,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            deltas=len(record.times),
            finish=record.finish,
            error=record.error,
        )


def summarise(load: Load, records: Sequence[Record], output_tokens: int, cpu_s: float, targets: Targets) -> Figures:
    """output_tokens: asked of each request. cpu_s: CPU time that this process used during the load."""
    answered = [r for r in records if r.error is None]
    wall_s = max((r.end for r in records), default=0.0) - min((r.due for r in records), default=0.0)
    produced = sum(r.tokens for r in answered)
    prompts = sum(r.prompt_tokens or 0 for r in answered)
    received = sum(len(r.times) if r.error is not None else r.tokens for r in records)
    good = sum(map(targets.met_by, records)) if load.rate is not None else None
    return Figures(
        load=load,
        requests=len(records),
        answered=len(answered),
        errors=dict(Counter(r.error for r in records if r.error is not None).most_common()),
        wall_s=wall_s,
        prompt_tokens=prompts,
        output_tokens=produced,
        deltas=sum(len(r.times) for r in answered),
        ended_early=sum(r.tokens < output_tokens for r in answered),
        uncounted=sum(r.output_tokens is None for r in answered),
        output_tokens_per_s=produced / wall_s if wall_s else 0.0,
        total_tokens_per_s=(produced + prompts) / wall_s if wall_s else 0.0,
        requests_per_s=len(answered) / wall_s if wall_s else 0.0,
        ttft=Spread.of([r.ttft for r in answered if r.ttft is not None]),
        gap=Spread.of([gap for r in answered for gap in r.gaps]),
        e2e=Spread.of([r.end - r.due for r in answered]),
        client_cpu_us_per_token=1e6 * cpu_s / received if received else None,
        good=good,
        goodput_per_s=good / load.duration_s if good is not None and load.duration_s else None,
    )
