"""Requests whose answers are worth nothing after a time: who cannot make it any more, before more is computed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import NamedTuple

from potok.core.request import Request

#: A prompt is taken to be hopeless when the time left is below this part of what it is expected to take: expectations
#: are good to some 15 %, and one that might just make it is let go on.
CERTAIN = 0.8


class _Due(NamedTuple):
    """at: when to look at the request again. first: for its first token; else for its end."""

    at: int
    order: int
    first: bool
    request: Request


class Deadlines:
    """live: requests whose end has not been told, by id; the caller keeps it up to date. prompt_us: how long the rest
    of a request's prompt is expected to take, with the machine to itself."""

    def __init__(self, live: Mapping[int, Request], prompt_us: Callable[[Request], float]) -> None:
        self._live = live
        self._prompt_us = prompt_us
        self._heap: list[_Due] = []

    def add(self, request: Request) -> None:
        if request.first_by_us:
            heapq.heappush(self._heap, _Due(self._last_chance(request), request.order, True, request))
        if request.ends_by_us:
            heapq.heappush(self._heap, _Due(request.ends_by_us, request.order, False, request))

    def wake_at(self) -> int | None:
        return self._heap[0].at if self._heap else None

    def missed(self, now_us: int) -> list[Request]:
        """Those that miss a deadline, or are bound to. Each is told once."""
        if not self._heap or self._heap[0].at > now_us:
            return []
        missed: dict[int, Request] = {}
        while self._heap and self._heap[0].at <= now_us:
            due = heapq.heappop(self._heap)
            request = due.request
            if request.id not in self._live or (due.first and len(request.tokens) > request.prompt_len):
                continue
            at = self._last_chance(request) if due.first else due.at
            if at > now_us:  # it may have found some of its prompt in the cache, or computed it meanwhile
                heapq.heappush(self._heap, due._replace(at=at))
            else:
                missed[request.id] = request
        return list(missed.values())

    def forget_ended(self) -> None:
        """Drops what nobody will ask for, when that is most of it."""
        if len(self._heap) > 4 * len(self._live) + 64:
            self._heap = [due for due in self._heap if due.request.id in self._live]
            heapq.heapify(self._heap)

    def _last_chance(self, request: Request) -> int:
        return request.first_by_us - int(CERTAIN * self._prompt_us(request))
