"""How many requests may wait, and how much one API key may ask: what is over a bound is refused at once.

Here and not in the engine, because the engine answers between two steps, and a step may take longer than a client that
could try elsewhere should wait. Pure: the engine is only looked at, and the clock is an argument.

What waits is not known exactly on this side of the wire, so the larger of two numbers counts:
- requests that are open beyond those that run at once;
- what waited when the engine spoke last, and what was sent to it since, if anything waited: it may run fewer than it
  could, short of memory or gathering a batch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol

from potok.config import ServerConfig
from potok.errors import RETRY_AFTER_S, ClientError, Crowded
from potok.protocol import EngineInfo, Stats


class Queue(Protocol):
    """What is known of an engine. unseen: requests sent that `stats` do not count yet."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> Stats: ...

    @property
    def unseen(self) -> int: ...


class Allowance:
    """Tokens that refill at a steady rate, up to those of one minute. Charging may lead into debt."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._noted_s = now_s

    def charge(self, num_tokens: int, now_s: float) -> None:
        refilled = (now_s - self._noted_s) * self._per_minute / 60
        self._left = min(float(self._per_minute), self._left + refilled) - num_tokens
        self._noted_s = now_s

    def debt_s(self, now_s: float) -> float:
        """Seconds until it is out of debt; 0: it is."""
        self.charge(0, now_s)
        return max(0.0, -self._left * 60 / self._per_minute)


@dataclass(slots=True)
class _Key:
    """What the calls of one API key have taken. allowance: None where tokens are not limited."""

    allowance: Allowance | None
    num_open: int = 0


@dataclass(slots=True)
class _Entry:
    """Of one open request. prompt_tokens: 0 before they are counted. sent: the engine has it, or has been sent it."""

    key: _Key
    prompt_tokens: int = 0
    sent: bool = False


class Admission:
    """The bounds of `config` over everything that its tickets hold. clock: seconds."""

    def __init__(self, config: ServerConfig, engine: Queue, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._engine = engine
        self._clock = clock
        self._keys: dict[str, _Key] = {}  # by namespace
        self._open: dict[int, _Entry] = {}  # oldest first
        self._num_unsent = 0
        self._numbers = count()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def ticket(self, namespace: str) -> Iterator[Ticket]:
        """Around all of one call. Whatever becomes of the call, nothing of it is open afterwards."""
        ticket = Ticket(self, namespace)
        try:
            yield ticket
        finally:
            ticket.leave()

    # -- for tickets -----------------------------------------------------------------------------------------------

    def key(self, namespace: str) -> _Key:
        key = self._keys.get(namespace)
        if key is None:
            per_minute = self._config.key_tokens_per_minute
            key = self._keys[namespace] = _Key(Allowance(per_minute, self._clock()) if per_minute else None)
        return key

    def check(self, key: _Key, num_requests: int) -> None:
        """Raises Crowded when so many requests more are too many now, ClientError when they always are."""
        config = self._config
        if config.key_requests:
            if num_requests > config.key_requests:
                raise _never(f"one API key may have {config.key_requests} requests open at once")
            if key.num_open + num_requests > config.key_requests:
                raise _crowded(
                    "too_many_requests",
                    f"{key.num_open} requests of this API key are open, and it may have {config.key_requests} at once",
                    self._place_s(),
                )
        at_once = self._engine.info.max_num_seqs
        if num_requests - at_once > config.max_waiting:
            raise _never(f"this server runs {at_once} requests at once and lets {config.max_waiting} wait")
        if self._waiting(num_requests) > config.max_waiting:
            raise _crowded(
                "queue_full",
                f"the queue is full: {self._waiting(0)} requests wait, and {config.max_waiting} may",
                self._place_s(),
            )
        debt_s = 0.0 if key.allowance is None else key.allowance.debt_s(self._clock())
        if debt_s > 0:
            raise _crowded(
                "rate_limited", f"this API key has used up its {config.key_tokens_per_minute} tokens a minute", debt_s
            )

    def check_tokens(self, prompt_tokens: Sequence[int]) -> None:
        """The same for the tokens of requests that are open already. prompt_tokens: of each one's prompt."""
        bound = self._config.max_waiting_tokens
        if not bound:
            return
        at_once = self._engine.info.max_num_seqs
        if sum(prompt_tokens[at_once:]) > bound:
            raise _never(f"this server runs {at_once} requests at once and lets {bound} tokens of prompts wait")
        if (waiting := self._waiting_tokens()) > bound:
            raise _crowded(
                "queue_full",
                f"the queue is full: with this prompt {waiting} tokens of prompts would wait, and {bound} may",
                self._place_s(),
            )

    def open(self, key: _Key, num_requests: int) -> list[int]:
        """Numbers of so many requests that are open from now on."""
        numbers = list(islice(self._numbers, num_requests))
        self._open.update({number: _Entry(key) for number in numbers})
        key.num_open += num_requests
        self._num_unsent += num_requests
        return numbers

    def count_tokens(self, number: int, prompt_tokens: int) -> None:
        self._open[number].prompt_tokens = prompt_tokens

    def send(self, number: int) -> None:
        entry = self._open[number]
        self._num_unsent -= not entry.sent
        entry.sent = True

    def close(self, number: int) -> None:
        entry = self._open.pop(number)
        self._num_unsent -= not entry.sent
        entry.key.num_open -= 1

    def charge(self, key: _Key, num_tokens: int) -> None:
        if key.allowance is not None:
            key.allowance.charge(num_tokens, self._clock())

    # -- what waits ------------------------------------------------------------------------------------------------

    def _waiting(self, more: int) -> int:
        """Requests that wait when so many more have come."""
        beyond = len(self._open) + more - self._engine.info.max_num_seqs
        told = self._engine.stats.waiting
        if told:  # never more than are open: it has not heard yet of those that were cancelled
            told = min(told + self._unsettled(), len(self._open)) + more
        return max(0, beyond, told)

    def _waiting_tokens(self) -> int:
        stats = self._engine.stats
        beyond = self._youngest(len(self._open) - self._engine.info.max_num_seqs)
        told = stats.waiting_tokens + self._youngest(self._unsettled()) if stats.waiting else 0
        return max(beyond, told)

    def _unsettled(self) -> int:
        """Requests that the engine's last words do not count."""
        return self._engine.unseen + self._num_unsent

    def _youngest(self, num_requests: int) -> int:
        """Tokens of the prompts that came last."""
        entries = islice(reversed(self._open.values()), max(0, num_requests))
        return sum(entry.prompt_tokens for entry in entries)

    def _place_s(self) -> float:
        """When a place in the queue becomes free, in seconds."""
        return self._engine.stats.place_us / 1e6 or RETRY_AFTER_S


class Ticket:
    """What one call holds: each of its requests counts as open until it ends, or the call does."""

    def __init__(self, admission: Admission, namespace: str) -> None:
        self._admission = admission
        self._key = admission.key(namespace)
        self._entries: dict[int, int] = {}  # request of the call -> its number

    def knock(self) -> None:
        """Raises Crowded when not even one request could be taken: then nobody need read what the call asks."""
        self._admission.check(self._key, 1)

    def ask(self, num_requests: int) -> None:
        """Opens so many requests. Raises Crowded, or ClientError where so many are never taken."""
        self._admission.check(self._key, num_requests)
        self._entries = dict(enumerate(self._admission.open(self._key, num_requests)))

    def weigh(self, prompt_tokens: Sequence[int]) -> None:
        """Tells the length of each request's prompt. Raises as `ask`."""
        for request, num_tokens in enumerate(prompt_tokens):
            self._admission.count_tokens(self._entries[request], num_tokens)
        self._admission.check_tokens(prompt_tokens)

    def begin(self, prompt_tokens: int) -> None:
        """The engine has been sent all requests. prompt_tokens: as they are charged."""
        for number in self._entries.values():
            self._admission.send(number)
        self._admission.charge(self._key, prompt_tokens)

    def gained(self, request: int, num_tokens: int, *, ended: bool) -> None:
        self._admission.charge(self._key, num_tokens)
        if ended and request in self._entries:
            self._admission.close(self._entries.pop(request))

    def leave(self) -> None:
        """Frees what is left."""
        entries, self._entries = self._entries, {}
        for number in entries.values():
            self._admission.close(number)


def _crowded(code: str, why: str, retry_after_s: float) -> Crowded:
    return Crowded(f"{why}; try again in {max(1, math.ceil(retry_after_s))} s.", None, code, retry_after_s)


def _never(why: str) -> ClientError:
    return ClientError(f"this is more than one call may ask for: {why}; send several calls.", "n", "out_of_range")
