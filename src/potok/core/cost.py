"""How long a step will take, learnt from how long steps took.

    t = k (c0 + c1 rows + c2 sampled + c3 decode_context + c4 prompt_context),    all c >= 0

c0 is what a step costs whatever it computes (reading the weights), c1 a row's arithmetic, c2 that of its logits, c3
reading one token's K and V for a row alone in its segment, c4 one row of a prompt attending to one token. The c are the
least squares of relative errors over some hundred steps, older ones counting less and less; k follows at once when the
machine gets faster or slower as a whole, because its neighbours come and go.

Plain Python, a few microseconds a step: the sums of the normal equations are kept, and solved now and then; steps are
added to them only then, all at once, as a step finds nothing of this in the processor's caches. What it expects decides
batches, so it must come out the same wherever a journal is replayed: hence fsum, while sum of floats has another
rounding since Python 3.12.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import fsum, sqrt
from operator import mul
from typing import NamedTuple


class Work(NamedTuple):
    """What a step computes. rows: tokens. sampled: rows whose logits are wanted.

    decode_context: tokens that rows alone in their segment attend to, summed over those rows; prompt_context: the same
    of all other rows.
    """

    rows: int
    sampled: int
    decode_context: int
    prompt_context: int

    def plus(self, rows: int, sampled: int, context: int) -> Work:
        """With a part of a prompt."""
        return Work(self.rows + rows, self.sampled + sampled, self.decode_context, self.prompt_context + context)


def prompt_context(start: int, n: int) -> int:
    """Of n rows from position `start` on: each attends to itself and all before it."""
    return n * start + n * (n + 1) // 2


#: A step from n steps ago counts MEMORY**n as much as the last one.
MEMORY = 0.995
#: The equations are solved after so many steps, or sooner when a step took so much more or less than was expected.
#: A step that computes prompts counts as several: the others are all much alike.
SOLVE_EVERY = 64
SOLVE_SOONER = 16
PROMPTS_COUNT = 4
SURPRISE = 0.2
#: How fast k follows, per step; after solving it is what it would be had the new c been there for RECENT steps.
FOLLOW = 0.3
RECENT = 16
#: A step that took more than so many times what was expected was disturbed, and counts as if it had taken that long:
#: for the equations, and for k, which a machine that has become slower moves again and again.
MOST = 3.0
MOST_FOLLOWED = 1.5
#: How much the first guess counts, in steps: enough to tell apart what the first steps do not.
FIRST_GUESS = 0.25
#: Larger errors than usual are tracked as this quantile of taken over expected, within these bounds.
QUANTILE = 0.75
SPREADS = (1.0, 1.3)


class CostModel:
    """Times in microseconds. token_us: what a prompt's token is taken to cost before any step has been seen.

    spread: three of four steps take less than this many times what was expected.
    """

    def __init__(self, token_us: float = 0.0) -> None:
        self._c = [4 * token_us, token_us, 0.0, 0.0, 0.0]
        self._k = 1.0
        # Lower triangle of the sum of x x^T, and the sum of x, for x = features / measured time: the fit wants c x = 1.
        self._a = [[0.0] * 5 for _ in range(5)]
        self._b = [0.0] * 5
        self._unsolved: list[tuple[Work, int]] = []  # the newest steps, not in the sums yet
        self._news = 0  # what these count
        self._recent: deque[tuple[Work, int]] = deque(maxlen=RECENT)
        self.spread = 1.05
        if token_us:
            self._add([(work, self.step_us(work)) for work in (Work(1, 1, 0, 0), Work(64, 1, 0, 0))], FIRST_GUESS)

    @property
    def known(self) -> bool:
        """Whether anything is expected at all."""
        return self._c[0] > 0 or self._c[1] > 0

    def step_us(self, work: Work) -> float:
        c, (rows, sampled, decode, prompt) = self._c, work
        return self._k * (c[0] + c[1] * rows + c[2] * sampled + c[3] * decode + c[4] * prompt)

    def idle_us(self) -> float:
        """Of a step of one row: the machine can do nothing in less."""
        return self._k * (self._c[0] + self._c[1] + self._c[2])

    def prompt_us(self, start: int, n: int) -> float:
        """What n rows of a prompt from position `start` on add to a step."""
        return self._k * (self._c[1] * n + self._c[4] * prompt_context(start, n))

    def tokens_in(self, us: float, start: int) -> int:
        """How many rows of a prompt, from position `start` on, add no more than `us` to a step."""
        if us <= 0:
            return 0
        # a n^2 + b n = us
        a = self._k * self._c[4] / 2
        b = self._k * (self._c[1] + self._c[4] * (start + 0.5))
        if b <= 0 and a <= 0:
            return 1 << 30
        return int(2 * us / (b + sqrt(b * b + 4 * a * us)))

    def observe(self, work: Work, step_us: int) -> None:
        """A step has taken `step_us`."""
        expected = self.step_us(work)
        surprise = abs(step_us - expected) > SURPRISE * expected
        if expected > 0:
            ratio = step_us / expected
            # Moves up three times as far as down, so that it rests where one of four is above.
            self.spread += 0.01 * (QUANTILE if ratio > self.spread else QUANTILE - 1)
            self.spread = min(max(self.spread, SPREADS[0]), SPREADS[1])
            if ratio > MOST:
                step_us = int(MOST * expected)
            self._follow(expected, step_us)
        if step_us <= 0:
            return
        self._unsolved.append((work, step_us))
        self._news += PROMPTS_COUNT if work.prompt_context else 1
        if self._news >= (SOLVE_SOONER if surprise else SOLVE_EVERY) or not self.known:
            self._solve()

    def _follow(self, expected: float, us: int) -> None:
        if expected > 0:  # a fit may find that all the cost is in what this step did not do
            self._k += FOLLOW * self._k * (min(us / expected, MOST_FOLLOWED) - 1)

    def _add(self, steps: Sequence[tuple[Work, float]], weight: float) -> None:
        """Steps in the order in which they ran, each with its time. weight: what the last of them counts."""
        weights, decay = [], 1.0
        for _ in steps:
            weights.append(weight * decay)
            decay *= MEMORY
        weights.reverse()
        columns = list(zip(*[features(work, us) for work, us in steps], strict=True))
        for i, row in enumerate(self._a):
            weighted = list(map(mul, weights, columns[i]))
            self._b[i] = decay * self._b[i] + fsum(weighted)
            for j in range(i + 1):
                row[j] = decay * row[j] + fsum(map(mul, weighted, columns[j]))

    def _solve(self) -> None:
        self._add(self._unsolved, 1.0)
        self._recent += self._unsolved
        self._unsolved.clear()
        self._news = 0
        c = non_negative(self._a, self._b)
        if c is None:
            return
        self._c = c
        self._k = 1.0
        for work, us in self._recent:
            self._follow(self.step_us(work), us)


def features(work: Work, us: float) -> tuple[float, float, float, float, float]:
    """Of a step: what the fit wants is that c times this is 1."""
    inverse = 1.0 / us
    return inverse, work[0] * inverse, work[1] * inverse, work[2] * inverse, work[3] * inverse


def non_negative(lower: Sequence[Sequence[float]], b: Sequence[float]) -> list[float] | None:
    """The x >= 0 that solves A x = b in the least-squares sense, dropping what would be negative, the worst first.

    lower: A's lower triangle, A symmetric and not negative definite. None: there is no information at all.
    """
    size = len(b)
    used = [i for i in range(size) if lower[i][i] > 0]
    while used:
        x = _solved(lower, b, used)
        worst = min(used, key=lambda i: x[i] * sqrt(lower[i][i]))
        if x[worst] >= 0:
            return x
        used.remove(worst)
    return None


def _solved(lower: Sequence[Sequence[float]], b: Sequence[float], used: Sequence[int]) -> list[float]:
    """By Cholesky, each variable scaled to a diagonal of 1; a ridge decides between what cannot be told apart."""
    scale = [1.0 / sqrt(lower[i][i]) for i in used]
    n = len(used)
    factor = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            p, q = max(used[i], used[j]), min(used[i], used[j])
            s = lower[p][q] * scale[i] * scale[j] - fsum([factor[i][k] * factor[j][k] for k in range(j)])
            if i == j:
                factor[i][i] = sqrt(max(s, 0.0) + 1e-6)
            else:
                factor[i][j] = s / factor[j][j]
    y = [0.0] * n
    for i in range(n):
        y[i] = (b[used[i]] * scale[i] - fsum([factor[i][k] * y[k] for k in range(i)])) / factor[i][i]
    x = [0.0] * len(b)
    for i in reversed(range(n)):
        y[i] = (y[i] - fsum([factor[k][i] * y[k] for k in range(i + 1, n)])) / factor[i][i]
        x[used[i]] = y[i] * scale[i]
    return x
