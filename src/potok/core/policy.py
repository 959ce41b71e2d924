"""In which order waiting requests are looked at. A policy orders; whether one fits is the business of `admission`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from potok.core.prefix import PrefixCache
from potok.core.request import Request


class Policy(NamedTuple):
    """order: of some waiting requests, given oldest first. patience: see potok.core.admission.joining."""

    order: Callable[[Sequence[Request], PrefixCache], Sequence[Request]]
    patience: int


def oldest_first(waiting: Sequence[Request], cache: PrefixCache) -> Sequence[Request]:
    return waiting


def longest_prefix_first(waiting: Sequence[Request], cache: PrefixCache) -> Sequence[Request]:
    """Those with most of their tokens in the cache, while they are there; before them who was passed too often."""

    def rank(request: Request) -> tuple[bool, int]:
        if request.overtaken >= LONGEST_PREFIX.patience:
            return False, request.order
        return True, -cache.match(request).num_tokens

    return sorted(waiting, key=rank)


FCFS = Policy(oldest_first, patience=16)
LONGEST_PREFIX = Policy(longest_prefix_first, patience=64)

POLICIES = {"fcfs": FCFS, "longest_prefix": LONGEST_PREFIX}
