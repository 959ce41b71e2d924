"""What one step computes, and what comes back. Immutable: the scheduler makes a Batch, a backend reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from potok.finish import Finish

NO_POSITIONS = range(0)


class Segment(NamedTuple):  # a tuple, as all here: a frozen dataclass takes three times as long to make
    """Consecutive tokens of one request.

    start: absolute position of tokens[0]; the KV of [0, start) is already written.
    blocks: block table covering [0, start + len(tokens)).
    sample: whether a token is sampled after the last one.
    rate: absolute positions, all before the sampled one, whose logits are wanted to rate the token that follows.
    """

    id: int
    start: int
    tokens: Sequence[int]
    blocks: Sequence[int]
    sample: bool
    rate: range = NO_POSITIONS

    @property
    def num_rows(self) -> int:
        """Rows whose logits are wanted."""
        return len(self.rate) + self.sample


class Copy(NamedTuple):
    """Of one whole block, into a block that one of the batch's segments goes on writing."""

    source: int
    target: int


class Batch(NamedTuple):
    """copies: done before anything else of the step, in this order."""

    step: int
    segments: tuple[Segment, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([len(s.tokens) for s in self.segments])

    @property
    def num_sampled(self) -> int:
        """Rows whose logits are wanted: segment after segment, first those that rate, then the one that samples."""
        return sum([s.num_rows for s in self.segments])


class Delta(NamedTuple):
    """What a step gave one request. row: index among the step's sampled rows, or -1 when it sampled nothing."""

    id: int
    token: int | None
    finish: Finish | None
    row: int = -1
