"""Who waits for a batch, and who goes next. It knows no event loop: the time is an argument, in seconds.

enter(x) --> outside ------------> queue ---------------------------> next_batch()
             while max_queue       until a batch is full, or its
             are in the queue      oldest has waited max_wait_s
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """batch_size: items of a batch. batch_tokens: tokens of a batch. queue: items in the queue. inf: no bound.

    The queue holds at least a batch.
    """

    batch_size: int
    batch_tokens: float
    queue: float
    wait_s: float


class Entry:
    """An item, its tokens, and the future that its caller awaits.

    line: the one that it stands in; None once it has left. deadline: when it has been in the queue for long enough.
    """

    __slots__ = ("answer", "deadline", "item", "line", "tokens")

    def __init__(self, item: Any, tokens: int, answer: asyncio.Future[Any]) -> None:
        self.item = item
        self.tokens = tokens
        self.answer = answer
        self.line: Line | None = None
        self.deadline = math.inf


#: Entries by arrival. In a plain dict, taking from the front becomes slower with everyone that was taken.
Line = OrderedDict[Entry, None]


class Waiting:
    """The queue, and those outside it. Somebody is outside only while the queue is full.

    Entries come and go on the event loop's thread; batches are taken there and on threads that run them.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.queue: Line = OrderedDict()
        self.outside: Line = OrderedDict()
        self._bounds = bounds
        self._tokens = 0  # in the queue
        self._lock = threading.Lock()  # never held for longer than it takes to look through one batch

    @property
    def has_room(self) -> bool:
        return len(self.queue) < self._bounds.queue

    @property
    def fills_a_batch(self) -> bool:
        """Nothing more would fit in the next batch, if all callers are still there."""
        return len(self.queue) >= self._bounds.batch_size or self._tokens >= self._bounds.batch_tokens

    @property
    def deadline(self) -> float | None:
        """Of the oldest in the queue."""
        with self._lock:
            return next(iter(self.queue)).deadline if self.queue else None

    def enter(self, entry: Entry, now: float) -> None:
        with self._lock:
            if self.has_room:
                self._let_in(entry, now)
            else:
                entry.line = self.outside
                self.outside[entry] = None

    def leave(self, entry: Entry, now: float) -> None:
        """For a caller that waits no longer. Harmless when the entry is in no line."""
        with self._lock:
            if entry.line is self.queue:
                self._take([entry], now)
            elif entry.line is self.outside:
                del self.outside[entry]
                entry.line = None

    def next_batch(self, now: float, *, wait: bool = True) -> list[Entry]:
        """Takes the batch whose time has come from the queue; empty if there is none.

        wait: False takes what there is, without waiting for more.
        """
        with self._lock:
            batch, full = self._front()
            if not batch or (wait and not full and now < batch[0].deadline):
                return []
            self._take(batch, now)
            return batch

    def _front(self) -> tuple[list[Entry], bool]:
        """The next entries that fit in one batch, and whether nothing more fits.

        Without those whose caller was cancelled in this very turn of the event loop: they leave in their next turn.
        """
        size, limit = self._bounds.batch_size, self._bounds.batch_tokens
        batch: list[Entry] = []
        tokens = 0
        for entry in self.queue:
            if entry.answer.done():
                continue
            if len(batch) == size or tokens + entry.tokens > limit:
                return batch, True
            batch.append(entry)
            tokens += entry.tokens
        return batch, len(batch) == size or tokens == limit

    def _let_in(self, entry: Entry, now: float) -> None:
        entry.line = self.queue
        entry.deadline = now + self._bounds.wait_s
        self.queue[entry] = None
        self._tokens += entry.tokens

    def _take(self, entries: list[Entry], now: float) -> None:
        """Takes entries out of the queue, and lets in who waits outside."""
        for entry in entries:
            del self.queue[entry]
            self._tokens -= entry.tokens
            entry.line = None
        while self.outside and self.has_room:
            self._let_in(self.outside.popitem(last=False)[0], now)
