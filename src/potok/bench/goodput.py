"""The highest rate of arrivals at which those who ask are content: the criterion, and the search. Pure.

A rate is tried by rounds of Poisson arrivals. A round passes when nobody was refused or failed, 95 % of the times to
first token were within one limit and 95 % of the gaps within the other. Most rounds of a rate must pass.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from potok.bench.figures import Spread, Targets
from potok.bench.stream import Record

PART = 95  # percent
#: Rates with fewer requests in a round are not tried: they would say nothing.
LEAST_REQUESTS = 5
HIGHEST = 10_000.0  # requests/s


class Window(NamedTuple):
    """When things count: after the warm-up, before the end. Seconds of the clock of the records."""

    begin: float
    end: float

    def holds(self, time: float) -> bool:
        return self.begin <= time < self.end


@dataclass(frozen=True, slots=True)
class Round:
    """One round at one rate. Requests count that arrived in the window, and gaps that ended in it.

    errors: of all requests. cut: it was ended early, when it could not pass any more. failed: why it did not; "" if so.
    tokens_per_s: output, in the window.
    """

    rate: float
    requests: int
    tokens_per_s: float
    ttft: Spread | None
    gap: Spread | None
    errors: dict[str, int]
    cut: bool
    failed: str


def allowed_late(requests: int) -> int:
    """How many of so many values may be above a limit that their 95th percentile is not."""
    return requests - math.ceil(PART / 100 * requests)


def hopeless(records: Sequence[Record], window: Window, expected: int, targets: Targets, now: float) -> bool:
    """Whether a round cannot pass any more. expected: requests that arrive in the window in all."""
    if any(r.error is not None for r in records):
        return True
    late = sum(1000 * _ttft(r, now) > targets.ttft_ms for r in records if window.holds(r.due))
    return late > allowed_late(expected)


def judged(rate: float, records: Sequence[Record], window: Window, targets: Targets, now: float, *, cut: bool) -> Round:
    """now: when the round was ended; who had no token by then has waited until now, for the first or for the next."""
    window = Window(window.begin, min(window.end, now))
    times = [time for r in records for time in r.times if window.holds(time)]
    ttft = Spread.of([_ttft(r, now) for r in records if window.holds(r.due)])
    gap = Spread.of([gap for r in records for gap in _gaps(r, window, targets)])
    errors = Counter(r.error for r in records if r.error is not None)
    if errors:
        failed = errors.most_common(1)[0][0]
    elif ttft is None:
        failed = "no request arrived"
    elif ttft.p95 > targets.ttft_ms:
        failed = "TTFT"
    else:
        failed = "gap" if gap is not None and gap.p95 > targets.gap_ms else ""
    return Round(
        rate=rate,
        requests=sum(window.holds(r.due) for r in records),
        tokens_per_s=len(times) / (window.end - window.begin) if window.end > window.begin else 0.0,
        ttft=ttft,
        gap=gap,
        errors=dict(errors.most_common()),
        cut=cut,
        failed=failed,
    )


def _ttft(record: Record, now: float) -> float:
    """Seconds so far, while there is no token; an answer without any text has none until its end."""
    return (record.times[0] if record.times else record.end or now) - record.due


def _gaps(record: Record, window: Window, targets: Targets) -> list[float]:
    """Those that ended in the window, and one that its end cut short if it was too long by then."""
    gaps = []
    for a, b in itertools.pairwise([*record.times, *([] if record.end else [math.inf])]):
        if window.holds(b):
            gaps.append(b - a)
        elif a < window.end <= b and 1000 * (window.end - a) > targets.gap_ms:
            gaps.append(window.end - a)
    return gaps


class Search:
    """Which rate to try next: doubled or halved until one passes and one fails, then bisected.

    start: the first. lowest: below it nothing is tried. resolution: the search ends when the lowest rate that failed is
    at most so much above the highest that passed. rounds: of each rate, of which most must pass.
    """

    def __init__(self, start: float, lowest: float, resolution: float, rounds: int) -> None:
        self.passed: float | None = None  # the highest
        self.failed: float | None = None  # the lowest
        self._lowest = lowest
        self._resolution = resolution
        self._rounds = rounds
        self._rate = _rounded(start)
        self._good = self._bad = 0

    @property
    def rate(self) -> float | None:
        """To be tried now; None when the search has ended."""
        if self.passed is not None and self.failed is not None:
            found = self.failed <= self.passed * (1 + self._resolution) or not self.passed < self._rate < self.failed
            return None if found else self._rate
        return self._rate if self._lowest <= self._rate <= HIGHEST else None

    def note(self, passed: bool) -> None:
        """How a round at `rate` went."""
        assert self.rate is not None, "the search has ended"
        self._good += passed
        self._bad += not passed
        most = self._rounds // 2 + 1
        if self._good < most and self._bad < self._rounds - most + 1:
            return
        if self._good >= most:
            self.passed = self._rate
        else:
            self.failed = self._rate
        self._good = self._bad = 0
        if self.failed is None:
            self._rate = _rounded(2 * self._rate)
        elif self.passed is None:
            self._rate = _rounded(self._rate / 2)
        else:
            self._rate = _rounded(math.sqrt(self.passed * self.failed))


def _rounded(rate: float) -> float:
    """To three digits, as it is printed: what is shown is what was tried."""
    return float(f"{rate:.3g}")
