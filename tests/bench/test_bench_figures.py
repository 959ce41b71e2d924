from __future__ import annotations

import pytest

from potok.bench.figures import Load, Spread, Targets, percentile, summarise
from potok.bench.stream import Record

TARGETS = Targets(ttft_ms=2000, gap_ms=150)


def record(due: float, times: list[float], output_tokens: int | None, error: str | None = None) -> Record:
    end = times[-1] if times else due
    return Record(due, end, times, 10, output_tokens, None if error else "length", error)


def test_percentiles_are_values_that_were_seen() -> None:
    ordered = [float(i) for i in range(1, 101)]
    assert [percentile(ordered, p) for p in (0, 1, 50, 95, 99, 99.5, 100)] == [1, 1, 50, 95, 99, 100, 100]
    assert percentile([7.0], 50) == 7.0
    assert Spread.of([]) is None
    assert Spread.of([0.2, 0.1, 0.3]) == Spread(mean=pytest.approx(200), p50=200, p95=300, p99=300, max=300)


def test_rates_use_the_servers_count_of_answered_requests() -> None:
    records = [
        record(0.0, [1.0, 1.5, 2.0], 4),  # one token had no text of its own
        record(0.5, [1.5, 2.5], None),  # no usage: its deltas are counted
        record(1.0, [2.0], None, error="HTTP 500: no"),
    ]
    f = summarise(Load(clients=3), records, output_tokens=4, cpu_s=0.0007, targets=TARGETS)
    assert (f.requests, f.answered, f.errors) == (3, 2, {"HTTP 500: no": 1})
    assert (f.output_tokens, f.deltas, f.prompt_tokens, f.ended_early, f.uncounted) == (6, 5, 20, 1, 1)
    assert f.wall_s == 2.5
    assert f.output_tokens_per_s == 6 / 2.5
    assert f.total_tokens_per_s == 26 / 2.5
    assert f.client_cpu_us_per_token == pytest.approx(100)  # 4 + 2 of the answered, 1 delta of the failed
    assert f.ttft is not None
    assert (f.ttft.p50, f.ttft.max) == (1000, 1000)
    assert f.gap is not None
    assert (f.gap.p50, f.gap.max) == (500, 1000)
    assert f.good is None


def test_goodput_counts_requests_within_both_targets() -> None:
    steady = [1.0 + 0.1 * i for i in range(40)]
    one_pause = [t + (0.5 if i > 30 else 0.0) for i, t in enumerate(steady)]  # 1 gap of 39: p95 is fine
    pauses = [t + 0.5 * sum(i > at for at in (5, 15, 25)) for i, t in enumerate(steady)]  # 3 of 39: it is not
    records = [
        record(0.0, steady, 40),
        record(0.0, one_pause, 40),
        record(0.0, pauses, 40),
        record(-1.01, steady, 40),  # too late
        record(0.0, [], None, error="HTTP 503: busy"),
    ]
    f = summarise(Load(rate=0.5, duration_s=10.0), records, output_tokens=40, cpu_s=0.0, targets=TARGETS)
    assert f.good == 2
    assert f.goodput_per_s == 0.2


def test_nothing_answered_gives_no_medians_and_no_division_by_zero() -> None:
    records = [record(1.0, [], None, error="cannot connect: refused")]
    f = summarise(Load(clients=1), records, output_tokens=4, cpu_s=0.1, targets=TARGETS)
    assert (f.output_tokens_per_s, f.ttft, f.gap, f.e2e, f.client_cpu_us_per_token) == (0.0, None, None, None, None)
