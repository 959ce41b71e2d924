"""When waiting requests may join those that run: all that the modes of batching differ in.

continuous   whoever waits may join at any step
off          one request at a time
static       when nobody runs, those who wait become a batch; nobody joins before its last member has ended
dynamic      the same, but the batch is gathered for a while first

What a batch wastes on members that have ended before the last one is not decided here: see `Gathered.padding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from potok.core.request import Request


class Gate(Protocol):
    """batched: members of one batch end together. padding: those that ended are computed on until then."""

    @property
    def batched(self) -> bool: ...

    @property
    def padding(self) -> bool: ...

    def candidates(self, waiting: Sequence[Request], running: Sequence[Request], now_us: int) -> Sequence[Request]:
        """Those of `waiting` that may join now, in the same order."""
        ...

    def is_open(self, waiting: Sequence[Request]) -> bool:
        """Whether members of the present batch are still to join."""
        ...

    def wake_at(self, waiting: Sequence[Request]) -> int | None:
        """When to ask again although nothing happens; for when nobody runs. None: time alone changes nothing."""
        ...

    def note_step(self, prompts: bool, step_us: int) -> None:
        """prompts: whether the step computed tokens of a prompt."""
        ...


class Continuous:
    """delay_factor: while others run, prompts are held for up to so many times the last step that computed prompts, so
    that several of them go into one step."""

    batched = padding = False

    def __init__(self, delay_factor: float = 0.0) -> None:
        self._delay_factor = delay_factor
        self._last_prompt_us = 0

    def candidates(self, waiting: Sequence[Request], running: Sequence[Request], now_us: int) -> Sequence[Request]:
        if self._delay_factor and running and now_us < self._due(waiting):
            return ()
        return waiting

    def is_open(self, waiting: Sequence[Request]) -> bool:
        return False

    def wake_at(self, waiting: Sequence[Request]) -> int | None:
        return None

    def note_step(self, prompts: bool, step_us: int) -> None:
        if prompts:
            self._last_prompt_us = step_us

    def _due(self, waiting: Sequence[Request]) -> int:
        oldest = min([r.arrived_us for r in waiting], default=0)
        return oldest + int(self._delay_factor * self._last_prompt_us)


class Gathered:
    """size: members of a batch at most. padding: those that end are computed on, as in a tensor of fixed shape.

    max_wait_us: the first of a batch waits so long for the others at most. max_tokens: of the prompts of a batch;
    0: no limit. A batch that has reached `size` or `max_tokens` starts at once.
    """

    batched = True

    def __init__(self, size: int, *, padding: bool = True, max_wait_us: int = 0, max_tokens: int = 0) -> None:
        self.padding = padding
        self._size = size
        self._max_wait_us = max_wait_us
        self._max_tokens = max_tokens
        self._batch = 1  # number of the present one

    def candidates(self, waiting: Sequence[Request], running: Sequence[Request], now_us: int) -> Sequence[Request]:
        members = [r for r in waiting if r.batch == self._batch]
        if members or running or not waiting:
            return members
        gathered, full = self._gather(waiting)
        if not full and now_us < self._due(waiting):
            return ()
        self._batch += 1
        for request in gathered:
            request.batch = self._batch
        return gathered

    def is_open(self, waiting: Sequence[Request]) -> bool:
        return any(r.batch == self._batch for r in waiting)  # not yet joined, or preempted

    def wake_at(self, waiting: Sequence[Request]) -> int | None:
        return self._due(waiting) if waiting and not self.is_open(waiting) else None

    def note_step(self, prompts: bool, step_us: int) -> None:
        """How long steps take has no influence."""

    def _gather(self, waiting: Sequence[Request]) -> tuple[list[Request], bool]:
        """The first of those who wait, as many as one batch takes, and whether more would not go in."""
        gathered: list[Request] = []
        tokens = 0
        for request in waiting:
            tokens += len(request.tokens)
            if gathered and 0 < self._max_tokens < tokens:
                return gathered, True
            gathered.append(request)
            if len(gathered) == self._size:
                return gathered, True
        return gathered, 0 < self._max_tokens <= tokens

    def _due(self, waiting: Sequence[Request]) -> int:
        return min([r.arrived_us for r in waiting]) + self._max_wait_us
