"""What of prompts a step computes beside those who decode: how much, and whose.

Tokens are bounded by `max_num_batched_tokens`, and time, as the cost model expects it, by the target for the gap
between two tokens, where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

from potok.core.admission import Limits, Room
from potok.core.cost import CostModel, Work
from potok.core.request import Request

#: Tokens of a request that one step rates at most: each takes a row of logits in memory.
MOST_RATED = 128


def of_rows(decoding: Sequence[Request]) -> Work:
    """A step of nobody's prompt: one row each of those who decode."""
    rows = len(decoding)
    return Work(rows, rows, sum([r.computed for r in decoding]) + rows, 0)


class Budget:
    """target_us: the gap to keep; 0: none. In what follows, alone: the step without prompts."""

    def __init__(self, limits: Limits, cost: CostModel, target_us: int) -> None:
        self._tokens = limits.max_num_batched_tokens
        self._cost = cost
        self._target_us = target_us
        self.prompt_share = max(1, self._tokens // 2)  # tokens of a step that decoding requests leave to prompts

    def is_slow(self, alone: Work) -> bool:
        """Whether decoding alone is expected to take longer than the target."""
        return 0 < self._target_us < self._cost.step_us(alone) and alone.rows > 0

    def room(self, alone: Work, prompts: Sequence[Request], by_rank: bool) -> Room:
        """For those who would join. prompts: of running requests; the caller keeps them up to date."""
        total = max(self._tokens - alone.rows, self.prompt_share)
        if self._target_us:
            total = min(total, self._tokens_in(self._time(alone), prompts))
        half = total // 2
        short = half - sum([r.pending for r in passing(prompts, half)])
        return Room(total, prompts, short, by_rank)

    def portions(self, prompts: Sequence[Request], pending: int, alone: Work) -> list[tuple[Request, int]]:
        """Which requests have how many tokens of their prompts computed. pending: tokens of all of them."""
        tokens = self._tokens - alone.rows
        if not prompts or tokens <= 0:
            return []
        timed = self._target_us > 0
        us = self._time(alone) if timed else 0.0
        room = min(tokens, self._tokens_in(us, prompts)) if timed else tokens
        turn: Sequence[Request] = prompts
        if pending > room:
            first = passing(prompts, room // 2)
            turn = first + [r for r in prompts if r not in first]
        portions: list[tuple[Request, int]] = []
        for request in turn:
            n = min(request.pending, tokens)
            if timed:
                n = min(n, max(self._cost.tokens_in(us, request.computed), not portions))
            if request.rated < request.rate_until:
                n = min(n, MOST_RATED)
            if n == 0:
                break
            portions.append((request, n))
            tokens -= n
            us -= self._cost.prompt_us(request.computed, n)
        return portions

    def _tokens_in(self, us: float, prompts: Sequence[Request]) -> int:
        """As many as fit if all are the first prompt's, and never none."""
        return max(1, self._cost.tokens_in(us, prompts[0].computed if prompts else 0))

    def _time(self, alone: Work) -> float:
        """Microseconds that prompts may add to the step.

        Three of four steps are to keep the target, so the aim is a little below it. When decoding alone takes all of
        it, prompts still get as long as the shortest step takes: else they would wait for the machine to be idle. When
        nobody decodes, the step makes those wait only who come during it, and takes two targets.
        """
        target_us = self._target_us / self._cost.spread
        if not alone.rows:
            return 2 * target_us
        return max(target_us - self._cost.step_us(alone), self._cost.idle_us())


def passing(prompts: Sequence[Request], tokens: int) -> list[Request]:
    """Those that pass the longer ones before them: as many, in order, as can be completed by `tokens`."""
    passing: list[Request] = []
    for request in prompts:
        if request.pending <= tokens:
            passing.append(request)
            tokens -= request.pending
    return passing
