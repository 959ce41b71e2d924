"""Who joins first, and who makes way. Whether one fits is the business of `admission`, when of `gate`.

Every policy ranks requests once, when they arrive, and for good: the queue and those who run are kept in that order.
Short of blocks, the last in rank is preempted; the first always goes on and ends, so everybody does. What a policy
weighs against time is put into the rank as time: a request with the rank "arrived a minute later" is passed by all that
arrive within that minute, and by nobody after. So nobody starves, and the order of two requests never changes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from potok.core.batch import Segment
from potok.core.prefix import PrefixCache
from potok.core.request import Request

#: How many waiting requests a step looks at, so that its cost does not grow with the queue.
WINDOW = 64


class Policy:
    """First come, first served; the others change what they differ in.

    patience: see potok.core.admission.joining. preempts: whether `yields` may name anybody. by_rank: whether `order`
    keeps to the ranks.
    """

    patience = 16
    preempts = False
    by_rank = True

    def rank(self, request: Request) -> tuple[int, int]:
        """The lower, the earlier; no two requests are equal. request.order: the how-manieth that arrived."""
        return request.order, 0

    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], seats: int, cache: PrefixCache
    ) -> Sequence[Request]:
        """At most WINDOW of those who wait, given by rank: the next to join first. seats: who may run at once."""
        return waiting[:WINDOW]

    def yields(self, newcomer: Request, running: Sequence[Request], seats: int) -> list[Request]:
        """Of those who run, who would make way for `newcomer`, the first of them first."""
        return []

    def arrive(self, request: Request) -> None:
        """It begins to wait for the first time."""

    def leave(self, request: Request) -> None:
        """It has ended."""

    def account(self, segments: Iterable[Segment], requests: Iterable[Request]) -> None:
        """What a step has computed, and for whom."""


class LongestPrefix(Policy):
    """Those with most of their tokens in the cache, while they are there; before them who was passed too often."""

    patience = 64
    by_rank = False

    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], seats: int, cache: PrefixCache
    ) -> Sequence[Request]:
        def key(request: Request) -> tuple[bool, int]:
            if request.overtaken >= self.patience:
                return False, request.order
            return True, -cache.match(request).num_tokens

        return sorted(waiting[:WINDOW], key=key)


class Priority(Policy):
    """Low numbers first. Each number above another counts as an arrival so much later.

    Who runs makes way for a request of a lower number, and never for an equal or a higher one; nor for one that would
    come after it in rank, so whoever has waited long enough to run stays.
    """

    AGEING_US = 10_000_000
    preempts = True

    def rank(self, request: Request) -> tuple[int, int]:
        return request.arrived_us + request.priority * self.AGEING_US, request.order

    def yields(self, newcomer: Request, running: Sequence[Request], seats: int) -> list[Request]:
        return [r for r in reversed(running) if r.priority > newcomer.priority and r.rank > newcomer.rank]


class Shortest(Policy):
    """Those with the fewest tokens, prompt and longest answer, first. Each token is an arrival so much later."""

    AGEING_US = 10_000

    def rank(self, request: Request) -> tuple[int, int]:
        return request.arrived_us + request.last_len * self.AGEING_US, request.order


class Fair(Policy):
    """Between API keys: next is the key that has been served least, whatever number of requests each has sent.

    Virtual token counters after Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a key is charged
    1 for each computed token and 1 more for each sampled one, and a key that comes back starts from the least charged
    of those that are there, so that nobody saves up. A key with less than its part of the seats takes one from the key
    with the most: its requests would wait for a whole answer of somebody else.
    """

    preempts = True
    by_rank = False

    def __init__(self) -> None:
        self._charged: dict[str, int] = {}
        self._live: Counter[str] = Counter()  # requests by key, zeros left out

    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], seats: int, cache: PrefixCache
    ) -> Sequence[Request]:
        """As if each were charged for its prompt when it joins. First those whose keys have less than their parts."""
        if len(self._live) <= 1:
            return waiting[:WINDOW]
        taken, share = self._seats(running, seats)
        if len(running) >= seats and not any(taken[name] < min(share, n) for name, n in self._live.items()):
            return ()  # nobody would yield; and all who wait are looked at below
        lines: dict[str, list[Request]] = {}
        for request in waiting:
            lines.setdefault(request.domain.namespace, []).append(request)
        heap = [(taken[name] >= share, self._charged[name], line[0].rank, name, 0) for name, line in lines.items()]
        heapq.heapify(heap)
        ordered: list[Request] = []
        while heap and len(ordered) < WINDOW:
            _, charged, _, name, i = heapq.heappop(heap)
            request, line = lines[name][i], lines[name]
            ordered.append(request)
            taken[name] += 1
            if i + 1 < len(line):
                after = charged + len(request.tokens)
                heapq.heappush(heap, (taken[name] >= share, after, line[i + 1].rank, name, i + 1))
        return ordered

    def yields(self, newcomer: Request, running: Sequence[Request], seats: int) -> list[Request]:
        taken, share = self._seats(running, seats)
        if taken[newcomer.domain.namespace] >= share:
            return []
        most = max(taken, key=lambda name: (taken[name], name), default="")
        above = taken[most] - share
        return [r for r in reversed(running) if r.domain.namespace == most][: max(0, above)]

    def _seats(self, running: Sequence[Request], seats: int) -> tuple[Counter[str], int]:
        """How many each key has, and how many are its part."""
        return Counter([r.domain.namespace for r in running]), max(1, seats // len(self._live))

    def arrive(self, request: Request) -> None:
        name = request.domain.namespace
        if not self._live[name]:
            least = min([self._charged[other] for other in self._live if other != name], default=0)
            self._charged[name] = max(self._charged.get(name, 0), least)
        self._live[name] += 1

    def leave(self, request: Request) -> None:
        name = request.domain.namespace
        self._live[name] -= 1
        if not self._live[name]:
            del self._live[name]
        if not self._live:  # nobody is left to be fair to
            self._charged.clear()

    def account(self, segments: Iterable[Segment], requests: Iterable[Request]) -> None:
        charged = self._charged
        for segment, request in zip(segments, requests, strict=True):
            name = request.domain.namespace
            if name in charged:
                charged[name] += len(segment.tokens) + segment.sample


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Policy,
    "longest_prefix": LongestPrefix,
    "priority": Priority,
    "shortest": Shortest,
    "fair": Fair,
}
