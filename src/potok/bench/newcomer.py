"""Somebody who comes where others run already: what he waits for, and what he does to them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from potok.bench.closed_loop import stamped
from potok.errors import ServerError
from potok.finish import Finish
from potok.protocol import FromEngine, Shutdown, Step, Submit, ToEngine


class Newcomer:
    """The engine's connection: of `others` at most `seats` are open at a time, in their order; `one` comes when `ready`
    says so, and all ends with his last token.

    Times in seconds of one clock. times: when each of the others' tokens came, by id; ended: how many of them have.
    sent, first, end: of the newcomer; 0 until then.
    """

    def __init__(
        self, others: Sequence[Submit], seats: int, one: Submit, ready: Callable[[Newcomer], bool] | None = None
    ) -> None:
        self.times: dict[int, list[float]] = {}
        self.ended = 0
        self.sent = self.first = self.end = 0.0
        self._left = list(reversed(others))
        self._seats = seats
        self._one = one
        self._ready = ready or (lambda _: True)

    def receive(self, timeout: float) -> Sequence[ToEngine]:
        if self.end:
            return [Shutdown()]
        arriving: list[ToEngine] = []
        while self._left and len(self.times) - self.ended < self._seats:
            other = self._left.pop()
            self.times[other.id] = []
            arriving.append(stamped(other))
        if not self.sent and self._ready(self):
            self.sent = time.perf_counter()
            arriving.append(stamped(self._one))
        elif not arriving and self.ended == len(self.times) and not self.sent:
            raise ServerError("those who ran have ended before anybody came; a longer run is needed")
        return arriving

    def send(self, message: FromEngine) -> None:
        if not isinstance(message, Step):
            return
        now = time.perf_counter()
        for chunk in message.chunks:
            if chunk.finish is Finish.ERROR:
                raise ServerError(f"a request of the benchmark failed: {chunk.error}")
            ended = chunk.finish is not None
            if chunk.id == self._one.id:
                if chunk.tokens and not self.first:
                    self.first = now
                if ended:
                    self.end = now
            else:
                if chunk.tokens:
                    self.times[chunk.id].append(now)
                self.ended += ended

    def gaps_before(self) -> list[float]:
        """Of the others, from when each of them has its first token until the newcomer comes, in seconds."""
        start = max(times[0] for times in self.times.values())
        return [b - a for a, b in self._gaps() if a >= start and b <= self.sent]

    def gaps_meanwhile(self) -> list[float]:
        """Of the others, all that the newcomer's prompt was computed in, in seconds."""
        return [b - a for a, b in self._gaps() if b > self.sent and a < self.first]

    def _gaps(self) -> list[tuple[float, float]]:
        return [pair for times in self.times.values() for pair in itertools.pairwise(times)]
