"""A request as the scheduler sees it: tokens, blocks, progress. No text, no sampling."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from potok.core.radix import COMMON, Domain
from potok.finish import Finish

if TYPE_CHECKING:
    from potok.core.radix import RadixNode


class Phase(IntEnum):
    WAITING = 0  # holds no blocks
    RUNNING = 1  # holds blocks for every token it has, the newest one's excepted until the next schedule
    GHOST = 2  # has ended, but its batch has not: a row of padding, with the blocks that it had
    FINISHED = 3  # terminal


#: The only legal moves. Anything else is a bug and raises AssertionError.
MOVES = {
    (Phase.WAITING, Phase.RUNNING),  # admitted
    (Phase.RUNNING, Phase.WAITING),  # preempted: blocks dropped, tokens kept
    (Phase.RUNNING, Phase.FINISHED),
    (Phase.RUNNING, Phase.GHOST),
    (Phase.GHOST, Phase.FINISHED),
    (Phase.WAITING, Phase.FINISHED),  # cancelled before admission
}


def no_blocks() -> array[int]:
    return array("i")


@dataclass(slots=True, eq=False)
class Request:
    """tokens: prompt then output. max_new: at most this many output tokens (at least 1).

    stop_ids end the request; the sampler makes them impossible before `min_tokens`, so the scheduler need not know it.
    domain: with whom it may share KV. rate_until: tokens [1, rate_until) of the prompt are rated, that is, the caller
    wants the log-probability of each after those before it.
    arrived_us, first_by_us, ends_by_us: of the clock that schedule() is told; its first token and its last come by then
    or are worth nothing, 0: whenever. priority: lower comes earlier. whole: its caller waits for the complete answer.
    Everything below `whole` belongs to the scheduler.
    """

    id: int
    tokens: array[int]
    prompt_len: int
    max_new: int
    stop_ids: frozenset[int] = frozenset()
    domain: Domain = COMMON
    rate_until: int = 0
    arrived_us: int = 0
    first_by_us: int = 0
    ends_by_us: int = 0
    priority: int = 0
    whole: bool = False
    phase: Phase = Phase.WAITING
    finish: Finish | None = None
    computed: int = 0  # tokens whose KV is in `blocks`
    blocks: array[int] = field(default_factory=no_blocks)
    node: RadixNode | None = None  # while it runs: the last of `blocks` that the prefix cache holds, or a root
    rated: int = 1  # the next token to rate
    loading: bool = False  # blocks are being read for it: it runs, but takes part in no step
    cached: int = 0  # tokens that it found in the prefix cache when it joined first
    last_len: int = 0  # it ends when it has so many tokens: max_new, or a full context
    order: int = 0  # arrival number
    rank: tuple[int, int] = (0, 0)  # its place among all requests, given by the policy; it never changes
    batch: int = 0  # of a gate that gathers: the number of its batch
    served: int = 0  # the last step that computed a token of it
    overtaken: int = 0  # younger requests that joined past it since it began to wait
    preemptions: int = 0
    joins: int = 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def reusable(self) -> int:
        """At most so many of its tokens may come from the prefix cache: what is not computed cannot be rated."""
        return sys.maxsize if self.rated >= self.rate_until else self.rated - 1

    def move(self, to: Phase) -> None:
        assert (self.phase, to) in MOVES, f"request {self.id}: {self.phase.name} -> {to.name}"
        self.phase = to
