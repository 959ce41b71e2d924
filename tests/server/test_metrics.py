"""Metrics by themselves: rates, and the account of calls."""

from __future__ import annotations

import pytest

from potok.obs.metrics import BOUNDS_MET, RATE_WINDOW_S, Metrics, Rates
from potok.protocol import Stats


def value(metrics: Metrics, name: str) -> float:
    [line] = [line for line in metrics.text().decode().splitlines() if line.startswith(name + " ")]
    return float(line.split()[-1])


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0
        self.stats = Stats()

    def __call__(self) -> float:
        return self.seconds


def test_rates_follow_the_work_and_return_to_zero() -> None:
    clock = Clock()
    metrics = Metrics(lambda: clock.stats, clock)
    for second in range(21):
        clock.seconds = 100.0 + second
        busy = min(second, 10)  # ten seconds of work at 300 and 50 tokens a second
        clock.stats = Stats(prompt_tokens=300 * busy, generation_tokens=50 * busy)
        metrics.sample()
        if RATE_WINDOW_S <= second <= 10:
            assert value(metrics, "potok_avg_prompt_throughput_toks_per_s") == pytest.approx(300)
            assert value(metrics, "potok_avg_generation_throughput_toks_per_s") == pytest.approx(50)
        if second >= 10 + RATE_WINDOW_S:
            assert value(metrics, "potok_avg_generation_throughput_toks_per_s") == 0
    assert value(metrics, "potok_generation_tokens_total") == 500


def test_rates_keep_few_samples_and_reading_changes_nothing() -> None:
    rates = Rates(5.0)
    assert rates.per_second() == (0.0, 0.0)
    for i in range(10_000):
        rates.note(i * 1.0, Stats(generation_tokens=7 * i))
    assert rates.per_second() == rates.per_second() == (0.0, 7.0)
    assert len(rates._samples) < 10


def test_gauges_are_the_last_stats() -> None:
    clock = Clock()
    metrics = Metrics(lambda: clock.stats, clock)
    assert value(metrics, "potok_kv_cache_usage_ratio") == 0
    clock.stats = Stats(running=3, waiting=2, kv_blocks_used=25, kv_blocks_total=100, preemptions=4, busy_us=1_500_000)
    names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "preemptions_total")
    assert [value(metrics, f"potok_{name}") for name in names] == [3, 2, 0.25, 4]
    assert value(metrics, "potok_engine_busy_seconds_total") == 1.5


def test_what_the_prefix_cache_does() -> None:
    """Only blocks that somebody needs are in use; the idle ones are told apart."""
    stats = Stats(
        kv_blocks_used=20, kv_blocks_total=100, kv_blocks_idle=70,
        prefix_queries=9, prefix_hits=5, prefix_queried_tokens=900, prefix_hit_tokens=640,
        prefix_misses={"differs": 3, "evicted": 1, "too_short": 0, "skipped": 0},
        evicted_blocks=12, evicted_reused_blocks=2,
    )  # fmt: skip
    metrics = Metrics(lambda: stats)
    expected = {
        "kv_cache_usage_ratio": 0.2,
        "kv_blocks": 100,
        "kv_blocks_idle": 70,
        "prefix_cache_queries_total": 900,
        "prefix_cache_hits_total": 640,
        "prefix_cache_requests_total": 9,
        "prefix_cache_requests_hit_total": 5,
        'prefix_cache_misses_total{reason="differs"}': 3,
        'prefix_cache_misses_total{reason="evicted"}': 1,
        'prefix_cache_misses_total{reason="skipped"}': 0,
        "kv_blocks_evicted_total": 12,
        "kv_blocks_evicted_reused_total": 2,
    }
    assert {name: value(metrics, f"potok_{name}") for name in expected} == expected


def test_a_call_is_timed_from_its_arrival() -> None:
    clock = Clock()
    metrics = Metrics(lambda: clock.stats, clock)
    meter = metrics.accepted(99.0, prompt_tokens=30)
    for index, at_s in ((0, 101.0), (1, 101.5), (0, 102.0), (1, 104.5)):
        clock.seconds = at_s
        meter.piece(index, 2, "length" if at_s > 102 else None)
    clock.seconds = 105.0
    meter.finished()
    assert value(metrics, "potok_time_to_first_token_seconds_sum") == 2.0
    assert value(metrics, "potok_time_to_first_token_seconds_count") == 1
    assert value(metrics, "potok_inter_token_latency_seconds_sum") == 1.0 + 3.0
    assert value(metrics, "potok_e2e_request_latency_seconds_sum") == 6.0
    assert value(metrics, "potok_request_prompt_tokens_sum") == 30
    assert value(metrics, "potok_request_generation_tokens_sum") == 8
    assert value(metrics, 'potok_requests_finished_total{reason="length"}') == 1
    assert value(metrics, 'potok_requests_finished_total{reason="stop"}') == 0


def test_what_the_scheduler_counts() -> None:
    metrics = Metrics(lambda: Stats(waiting=2, waiting_tokens=70, padding_rows=9, timeouts=3, slow_steps=4))
    expected = {
        "prompt_tokens_waiting": 70,
        "padding_rows_total": 9,
        "choices_timed_out_total": 3,
        "slow_steps_total": 4,
    }
    assert {name: value(metrics, f"potok_{name}") for name in expected} == expected


def test_calls_that_met_a_bound_are_told_apart() -> None:
    metrics = Metrics(Stats)
    for status, code in ((429, "queue_full"), (429, "queue_full"), (429, "rate_limited"), (400, "out_of_range")):
        metrics.rejected(status, code)
    assert value(metrics, 'potok_requests_rejected_total{status="429"}') == 3
    assert value(metrics, 'potok_requests_rejected_total{status="400"}') == 1
    for reason, count in zip(BOUNDS_MET, (2, 0, 1), strict=True):
        assert value(metrics, f'potok_requests_crowded_out_total{{reason="{reason}"}}') == count


def test_a_deadline_outweighs_a_limit() -> None:
    metrics = Metrics(Stats)
    meter = metrics.accepted(0.0, 1)
    for choice, reason in enumerate(("stop", "timeout", "length")):
        meter.piece(choice, 1, reason)
    meter.finished()
    metrics.accepted(0.0, 1).timed_out()
    assert value(metrics, 'potok_requests_finished_total{reason="timeout"}') == 1
    assert value(metrics, 'potok_requests_finished_total{reason="length"}') == 0
    assert value(metrics, "potok_requests_timed_out_total") == 1


def test_two_servers_in_one_process_do_not_share_counters() -> None:
    one, two = Metrics(Stats), Metrics(Stats)
    one.accepted(0.0, 1).aborted()
    assert value(one, "potok_requests_aborted_total") == 1
    assert value(two, "potok_requests_aborted_total") == 0
