"""A request as the scheduler sees it: tokens, blocks, progress. No text, no sampling."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from potok.finish import Finish


class Phase(IntEnum):
    WAITING = 0  # holds no blocks
    RUNNING = 1  # holds blocks for [0, computed)
    FINISHED = 2  # terminal


#: The only legal moves. Anything else is a bug and raises AssertionError.
MOVES = {
    (Phase.WAITING, Phase.RUNNING),  # admitted
    (Phase.RUNNING, Phase.WAITING),  # preempted: blocks dropped, tokens kept
    (Phase.RUNNING, Phase.FINISHED),
    (Phase.WAITING, Phase.FINISHED),  # cancelled before admission
}


@dataclass(slots=True, eq=False)
class Request:
    """tokens: prompt then output. max_new: at most this many output tokens (at least 1).

    stop_ids end the request; the sampler makes them impossible before `min_tokens`, so the scheduler need not know it.
    """

    id: int
    tokens: array[int]
    prompt_len: int
    max_new: int
    stop_ids: frozenset[int] = frozenset()
    phase: Phase = Phase.WAITING
    finish: Finish | None = None
    computed: int = 0  # tokens whose KV is in `blocks`
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.prompt_len

    def move(self, to: Phase) -> None:
        assert (self.phase, to) in MOVES, f"request {self.id}: {self.phase.name} -> {to.name}"
        self.phase = to
