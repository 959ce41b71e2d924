"""How an engine in another process, perhaps of another Python, is told what to do: a line of JSON each way.

Loads come on stdin; answers go to a file descriptor of their own, because libraries like to print to stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

LONGEST_SLEEP = 0.05


class Arrivals:
    """Requests that arrive by the clock, whether the engine keeps up or not, and when their tokens came.

    load: "arrivals", of each request when it comes, its prompt and how many tokens to add; "window", from when to when
    first tokens count; "ttft", the longest that one may take, and "allowed", how many of the window may take longer.
    All times in seconds since the start.
    """

    def __init__(self, load: dict[str, Any]) -> None:
        self._arrivals: list[tuple[float, list[int], int]] = load["arrivals"]
        self._begin, self._end = load["window"]
        self._ttft: float = load["ttft"]
        self._allowed: int = load["allowed"]
        self._next = 0
        self._times: list[list[float]] = [[] for _ in self._arrivals]
        self._ends = [0.0 for _ in self._arrivals]
        self._started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started

    def due(self) -> list[tuple[int, list[int], int]]:
        """Index, prompt and tokens to add of all that have arrived since the last call."""
        first, now = self._next, self.now()
        while self._next < len(self._arrivals) and self._arrivals[self._next][0] <= now:
            self._next += 1
        return [(i, *self._arrivals[i][1:]) for i in range(first, self._next)]

    def wait(self) -> None:
        """For an engine with nothing to do: until somebody arrives, or a little."""
        at = self._arrivals[self._next][0] if self._next < len(self._arrivals) else self._end
        time.sleep(min(LONGEST_SLEEP, max(0.0, at - self.now())))

    def tokens(self, index: int, count: int) -> None:
        self._times[index] += [self.now()] * count

    def ended(self, index: int) -> None:
        self._ends[index] = self.now()

    @property
    def over(self) -> bool:
        """Whether nothing that may still happen counts: nobody of the window can get a first token in time any more,
        or too many have not."""
        now, late = self.now(), 0
        hoping = now < self._end
        for (at, *_), times in zip(self._arrivals[: self._next], self._times, strict=False):
            if self._begin <= at < self._end:
                took = (times[0] if times else now) - at
                late += took > self._ttft
                hoping |= not times and took <= self._ttft
        return late > self._allowed or not hoping

    def seen(self) -> dict[str, Any]:
        """Of those that have arrived: times of tokens, and the end or 0."""
        return {"now": self.now(), "times": self._times[: self._next], "ends": self._ends[: self._next]}


def answer(
    descriptor: str,
    about: dict[str, Any],
    generate: Callable[[list[list[int]], int], int],
    serve: Callable[[Arrivals], None] | None = None,
) -> None:
    """Says `about`, then runs loads until stdin ends.

    generate: takes prompts and the number of tokens to add to each, and returns how many it added in all.
    serve: serves arrivals until they are over, then drops what still runs.
    """
    with os.fdopen(int(descriptor), "w", buffering=1) as answers:
        print(json.dumps(about), file=answers)
        for line in sys.stdin:
            load = json.loads(line)
            if "arrivals" in load:
                assert serve is not None, "this engine takes no arrivals"
                arrivals = Arrivals(load)
                serve(arrivals)
                print(json.dumps(arrivals.seen()), file=answers)
                continue
            started = time.perf_counter()
            tokens = generate(load["prompts"], load["output_tokens"])
            print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), file=answers)
