"""What the server counts, in Prometheus form, with a registry of its own.

Two sources: the engine's last `Stats`, read when somebody asks for the metrics (the engine itself is not asked), and
the calls as the server sees them. A call is one HTTP request for a generation, whatever its number of choices:

    received = accepted + rejected          accepted = finished + aborted + failed + timed out + in flight
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from potok.protocol import Stats

#: Rates are averages over about this many seconds; that long after the last token they are zero.
RATE_WINDOW_S = 5.0

_LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
_GAP_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


#: How a call that was answered ended: `reason` of the counter of finished ones.
FINISHES = ("stop", "length", "timeout", "refused")

#: Codes of the errors that say that a bound is met.
BOUNDS_MET = ("queue_full", "too_many_requests", "rate_limited")


class _Sample(NamedTuple):
    seconds: float
    prompt_tokens: int
    generation_tokens: int


class Rates:
    """Tokens per second over the last seconds, from totals that are noted now and then.

    Asking for a rate changes nothing, so any number of scrapers see the same values.
    """

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[_Sample] = deque()

    def note(self, now_s: float, stats: Stats) -> None:
        """Adds the totals at `now_s` and forgets all but one of the samples older than the window."""
        self._samples.append(_Sample(now_s, stats.prompt_tokens, stats.generation_tokens))
        while len(self._samples) > 2 and self._samples[1].seconds <= now_s - self._window_s:
            self._samples.popleft()

    def per_second(self) -> tuple[float, float]:
        """Prompt and generation tokens per second."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        first, last = self._samples[0], self._samples[-1]
        seconds = last.seconds - first.seconds
        return (
            (last.prompt_tokens - first.prompt_tokens) / seconds,
            (last.generation_tokens - first.generation_tokens) / seconds,
        )


class _EngineCollector(Collector):
    """Turns the engine's last Stats into metrics at the moment of a scrape."""

    def __init__(self, stats: Callable[[], Stats], rates: Rates) -> None:
        self._stats = stats
        self._rates = rates

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        prompt_rate, generation_rate = self._rates.per_second()
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield _gauge("requests_running", "Choices that take part in the engine's steps.", stats.running)
        yield _gauge("requests_waiting", "Choices that wait to be admitted by the engine.", stats.waiting)
        yield _gauge("prompt_tokens_waiting", "Tokens of their prompts.", stats.waiting_tokens)
        yield _gauge(
            "kv_cache_usage_ratio",
            "Part of the KV blocks that requests need now, 0 to 1; what the prefix cache alone holds is not in use.",
            used,
        )
        yield _gauge("kv_blocks", "KV blocks in all.", stats.kv_blocks_total)
        yield _gauge(
            "kv_blocks_idle",
            "KV blocks that the prefix cache alone holds: free for whoever needs them.",
            stats.kv_blocks_idle,
        )
        yield _gauge(
            "avg_prompt_throughput_toks_per_s",
            "Prompt tokens computed per second, of late.",
            prompt_rate,
        )
        yield _gauge(
            "avg_generation_throughput_toks_per_s",
            "Tokens sampled per second, of late.",
            generation_rate,
        )
        yield _counter("prompt_tokens", "Prompt tokens computed, some again after a preemption.", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens sampled.", stats.generation_tokens)
        yield _counter("preemptions", "Times a running choice gave up its KV blocks.", stats.preemptions)
        yield _counter("choices_timed_out", "Choices that their deadline ended.", stats.timeouts)
        yield _counter(
            "padding_rows", "Rows computed for finished members of a static or dynamic batch.", stats.padding_rows
        )
        yield _counter(
            "slow_steps",
            "Steps whose answers alone were expected to take longer than --target-itl-ms.",
            stats.slow_steps,
        )
        yield from self._prefix_cache(stats)
        yield _counter("engine_steps", "Steps of the engine.", stats.steps)
        yield _counter("engine_busy_seconds", "Time inside the engine's steps.", stats.busy_us / 1e6)
        yield _gauge("tier_blocks", "Blocks in the second tier of the prefix cache.", stats.tier_blocks)
        yield _gauge("tier_slots", "Blocks that the second tier may hold.", stats.tier_slots)
        yield _counter("tier_read_blocks", "Blocks read from the second tier.", stats.tier_read_blocks)
        yield _counter("tier_written_blocks", "Blocks written to the second tier.", stats.tier_written_blocks)
        yield _counter("tier_read_bytes", "Bytes read from the second tier.", stats.tier_read_bytes)
        yield _counter("tier_written_bytes", "Bytes written to the second tier.", stats.tier_written_bytes)
        yield _counter("tier_failures", "Reads and writes of the second tier that failed.", stats.tier_failures)
        yield _counter("tier_hit_tokens", "Tokens read from the second tier, not computed.", stats.tier_hit_tokens)
        yield _counter("tier_given_up", "Choices that computed what took too long to read.", stats.tier_given_up)
        yield _counter("tier_pauses", "Times that writing was stopped for a while.", stats.tier_pauses)

    @staticmethod
    def _prefix_cache(stats: Stats) -> Iterator[Metric]:
        yield _counter(
            "prefix_cache_queries",
            "Prompt tokens that were looked up in the prefix cache, once for each choice.",
            stats.prefix_queried_tokens,
        )
        yield _counter(
            "prefix_cache_hits",
            "Prompt tokens that were found in the prefix cache and not computed again.",
            stats.prefix_hit_tokens,
        )
        yield _counter("prefix_cache_requests", "Choices that looked their prompt up.", stats.prefix_queries)
        yield _counter("prefix_cache_requests_hit", "Choices that found some of their prompt.", stats.prefix_hits)
        misses = CounterMetricFamily(
            "potok_prefix_cache_misses",
            "Choices that found nothing of their prompt; reason: "
            '"differs" from all that is cached, "too_short" for a block, '
            '"evicted" since it was computed, "skipped" because its log-probabilities are wanted or caching is off.',
            labels=["reason"],
        )
        for reason, count in stats.prefix_misses.items():
            misses.add_metric([reason], count)
        yield misses
        yield _counter("kv_blocks_evicted", "Cached blocks that were dropped for room.", stats.evicted_blocks)
        yield _counter(
            "kv_blocks_evicted_reused",
            "Of them, blocks that had been hit: growing fast, the pool is too small for what is shared.",
            stats.evicted_reused_blocks,
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"potok_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"potok_{name}", text, value=value)


class Metrics:
    """All metrics of one server. `stats` gives the engine's last Stats without asking the engine."""

    def __init__(self, stats: Callable[[], Stats], clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._stats = stats
        self._rates = Rates()
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(stats, self._rates))
        self._accepted = Counter(
            "potok_requests_accepted", "Calls for which the engine was given work.", registry=registry
        )
        self._rejected = Counter(
            "potok_requests_rejected", "Calls refused before any work, by HTTP status.", ["status"], registry=registry
        )
        self._crowded = Counter(
            "potok_requests_crowded_out",
            'Of the rejected calls, those that met a bound; reason: "queue_full", or of one API key '
            '"too_many_requests" or "rate_limited".',
            ["reason"],
            registry=registry,
        )
        self._finished = Counter(
            "potok_requests_finished",
            'Calls that were answered; reason: "stop" when every choice ended by itself, "length" when one met a '
            'limit, "timeout" when one was cut short by its deadline, "refused" when the engine could not take it.',
            ["reason"],
            registry=registry,
        )
        self._aborted = Counter("potok_requests_aborted", "Calls whose client left before the end.", registry=registry)
        self._failed = Counter("potok_requests_failed", "Calls that failed in the engine.", registry=registry)
        self._timed_out = Counter(
            "potok_requests_timed_out", "Calls that got no token before their deadline.", registry=registry
        )
        self._first_token = Histogram(
            "potok_time_to_first_token_seconds",
            "From the arrival of a call to its first token.",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self._gap = Histogram(
            "potok_inter_token_latency_seconds",
            "Between two deliveries of one choice.",
            buckets=_GAP_S,
            registry=registry,
        )
        self._latency = Histogram(
            "potok_e2e_request_latency_seconds",
            "From the arrival of a call to its last token.",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self._prompt = Histogram(
            "potok_request_prompt_tokens", "Prompt tokens of an answered call.", buckets=_TOKENS, registry=registry
        )
        self._generation = Histogram(
            "potok_request_generation_tokens", "Tokens of an answered call.", buckets=_TOKENS, registry=registry
        )
        for reason in FINISHES:
            self._finished.labels(reason)  # a counter that stands at 0 can be alerted on
        for reason in BOUNDS_MET:
            self._crowded.labels(reason)

    def sample(self) -> None:
        """Notes the totals for the rates; call it about once a second."""
        self._rates.note(self.clock(), self._stats())

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def rejected(self, status: int, code: str | None = None) -> None:
        """code: of the error."""
        self._rejected.labels(str(status)).inc()
        if code in BOUNDS_MET:
            self._crowded.labels(code).inc()

    def accepted(self, arrived_s: float, prompt_tokens: int) -> CallMeter:
        """Begins the account of a call that arrived at `arrived_s`; exactly one of the meter's ends must follow."""
        self._accepted.inc()
        return CallMeter(self, arrived_s, prompt_tokens)


class CallMeter:
    """The account of one accepted call."""

    __slots__ = ("_arrived_s", "_last_s", "_metrics", "_prompt_tokens", "_reason", "tokens")

    def __init__(self, metrics: Metrics, arrived_s: float, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._prompt_tokens = prompt_tokens
        self._last_s: dict[int, float] = {}  # choice -> its last delivery
        self._reason = "stop"
        self.tokens = 0

    def piece(self, choice: int, num_tokens: int, finish_reason: str | None) -> None:
        """Notes what one choice gained just now. finish_reason: one of FINISHES at its end."""
        now_s = self._metrics.clock()
        last_s = self._last_s.get(choice)
        if last_s is not None:
            self._metrics._gap.observe(now_s - last_s)
        elif not self._last_s:
            self._metrics._first_token.observe(now_s - self._arrived_s)
        self._last_s[choice] = now_s
        self.tokens += num_tokens
        if finish_reason in ("length", "timeout") and self._reason != "timeout":
            self._reason = finish_reason

    def finished(self) -> None:
        metrics = self._metrics
        metrics._finished.labels(self._reason).inc()
        metrics._latency.observe(metrics.clock() - self._arrived_s)
        metrics._prompt.observe(self._prompt_tokens)
        metrics._generation.observe(self.tokens)

    def refused(self) -> None:
        """The engine found that it can never compute this call."""
        self._metrics._finished.labels("refused").inc()

    def timed_out(self) -> None:
        """Its deadline came, or could only be missed, before it had a token."""
        self._metrics._timed_out.inc()

    def aborted(self) -> None:
        self._metrics._aborted.inc()

    def failed(self) -> None:
        self._metrics._failed.inc()
