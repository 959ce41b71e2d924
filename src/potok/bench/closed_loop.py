"""Clients of an engine in this process that ask again when they are answered, and what they saw."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from potok.backends.api import Backend
from potok.bench.figures import Spread
from potok.core.scheduler import Scheduler
from potok.engine.loop import EngineLoop
from potok.errors import ServerError
from potok.finish import Finish
from potok.protocol import FromEngine, Shutdown, Stats, Step, Submit, ToEngine


class Source(Protocol):
    """What the clients ask."""

    def next(self) -> Submit | None:
        """The next request; None when there is none before somebody is answered, or none at all."""
        ...

    def take(self, id: int, answer: Sequence[int]) -> None:
        """The whole answer to a request."""
        ...


class Listed:
    """Requests in a fixed order that depend on nobody's answer."""

    def __init__(self, requests: Sequence[Submit]) -> None:
        self._left = list(reversed(requests))

    def next(self) -> Submit | None:
        return self._left.pop() if self._left else None

    def take(self, id: int, answer: Sequence[int]) -> None:
        """Nobody goes on from an answer."""


@dataclass(slots=True)
class Asked:
    """One request as its client saw it. Times in seconds of one clock."""

    prompt_tokens: int
    sent: float
    first: float = 0.0  # when the first token came
    ended: float = 0.0
    cached: int = 0  # tokens of the prompt that were not computed
    failed: bool = False


def stamped(request: Submit) -> Submit:
    """As it arrives now, by the clock of the engine."""
    return msgspec.structs.replace(request, arrived_us=time.monotonic_ns() // 1000)


class ClosedLoop:
    """The engine's connection: at most `clients` requests are open; the engine ends when none is left.

    stats: what the engine said of itself last.
    """

    def __init__(self, source: Source, clients: int) -> None:
        self._source = source
        self._clients = clients
        self._open: dict[int, list[int]] = {}
        self.asked: dict[int, Asked] = {}
        self.answers: dict[int, list[int]] = {}
        self.stats = Stats()

    def receive(self, timeout: float) -> Sequence[ToEngine]:
        arriving: list[ToEngine] = []
        while len(self._open) < self._clients:
            request = self._source.next()
            if request is None:
                break
            self._open[request.id] = []
            self.asked[request.id] = Asked(len(request.prompt), time.perf_counter())
            arriving.append(stamped(request))
        if not self._open:
            return [Shutdown()]
        if timeout and not arriving:
            time.sleep(timeout)  # nothing comes from clients who wait
        return arriving

    def send(self, message: FromEngine) -> None:
        if not isinstance(message, Step):
            return
        now = time.perf_counter()
        self.stats = message.stats or self.stats
        for chunk in message.chunks:
            asked, answer = self.asked[chunk.id], self._open[chunk.id]
            if chunk.tokens and not answer:
                asked.first = now
            answer += chunk.tokens
            if chunk.finish is not None:
                asked.ended = now
                asked.cached = chunk.cached_tokens
                asked.failed = chunk.finish is Finish.ERROR
                self.answers[chunk.id] = self._open.pop(chunk.id)
                self._source.take(chunk.id, answer)


def run_closed_loop(scheduler: Scheduler, backend: Backend, source: Source, clients: int) -> ClosedLoop:
    """Serves all that `source` asks, on this thread."""
    loop = ClosedLoop(source, clients)
    EngineLoop(scheduler, backend, loop).run()
    return loop


def checked(loop: ClosedLoop) -> list[Asked]:
    """What the clients saw. Raises ServerError when one of them was not answered."""
    asked = list(loop.asked.values())
    failed = sum(a.failed for a in asked)
    if failed:
        raise ServerError(f"{failed} of {len(asked)} requests of the benchmark failed")
    return asked


def check_same(some: dict[int, list[int]], others: dict[int, list[int]], cause: str) -> None:
    """Raises ServerError where an answer depended on `cause`, which differed: then no figure means anything."""
    differing = [id for id, answer in some.items() if answer != others[id]]
    if differing:
        raise ServerError(f"{len(differing)} answers depend on {cause}, that of request {differing[0]} first")


def duration(asked: Sequence[Asked]) -> float:
    """Seconds from the first request to the last answer."""
    return max(a.ended for a in asked) - min(a.sent for a in asked)


def ttft(asked: Sequence[Asked]) -> Spread:
    spread = Spread.of([a.first - a.sent for a in asked])
    assert spread is not None
    return spread
