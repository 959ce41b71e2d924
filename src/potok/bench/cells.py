"""One load under one mode of batching, in this process: what the clients saw, and what was computed for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from potok.backends.api import Backend
from potok.bench.bound import StepWork
from potok.bench.closed_loop import Asked, Listed, checked, duration, run_closed_loop
from potok.bench.figures import Spread
from potok.bench.prefix_loads import Lengths
from potok.bench.steps import Bound, TimedBackend
from potok.bench.work import step_work
from potok.config import CONTINUOUS, DYNAMIC, OFF, STATIC
from potok.core.scheduler import Scheduler
from potok.protocol import Sampling, Submit


class Mode(NamedTuple):
    """As potok.config.EngineConfig has it."""

    batching: str
    padding_rows: bool = True


#: By the name that it has in tables.
MODES = {
    "off": Mode(OFF),
    "static": Mode(STATIC),
    "unpadded": Mode(STATIC, padding_rows=False),
    "dynamic": Mode(DYNAMIC),
    "continuous": Mode(CONTINUOUS),
}


@dataclass(frozen=True, slots=True)
class Offer:
    """What so many clients ask, each for the next when he is answered. part: of the benchmark."""

    part: str
    clients: int
    requests: list[Submit]


@dataclass(frozen=True, slots=True)
class CellRun:
    """An offer under a mode, before the bound of the machine is known. padding_rows: of all steps."""

    part: str
    mode: str
    clients: int
    asked: list[Asked]
    answers: dict[int, list[int]]
    steps: list[StepWork]
    padding_rows: int


@dataclass(frozen=True, slots=True)
class Cell:
    """Figures of one load under one mode. bound: output tokens a second that the machine allows in these very steps.

    latency: of complete answers. seconds: from the first request to the last answer. rows: of all steps;
    padding_rows: of them, those that were computed for nobody.
    """

    part: str
    mode: str
    clients: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    tokens_per_s: float
    bound: float
    of_bound: float
    latency: Spread
    steps: int
    rows: int
    padding_rows: int

    @property
    def dead(self) -> float:
        return self.padding_rows / self.rows


def requests(vocab_size: int, lengths: Sequence[Lengths], first_id: int, name: str) -> list[Submit]:
    """Requests of these lengths that have nothing in common, whose callers wait for complete answers.

    name: of what they belong to; their tokens depend on it alone.
    """
    rng, vocab = random.Random(name), range(vocab_size)
    return [
        Submit(first_id + i, rng.choices(vocab, k=n.prompt), n.output, Sampling(), whole=True)
        for i, n in enumerate(lengths)
    ]


def run_cell(scheduler: Scheduler, backend: Backend, mode: str, offer: Offer, most: int) -> CellRun:
    """Of the offer's requests the first `most`. Raises ServerError when one fails."""
    timed = TimedBackend(backend)
    loop = run_closed_loop(scheduler, timed, Listed(offer.requests[:most]), offer.clients)
    steps = [step_work(step.inputs) for step in timed.steps]
    return CellRun(offer.part, mode, offer.clients, checked(loop), loop.answers, steps, loop.stats.padding_rows)


def cell(run: CellRun, bound: Bound) -> Cell:
    seconds, allowed = duration(run.asked), sum(map(bound.seconds, run.steps))
    output_tokens = sum(map(len, run.answers.values()))
    latency = Spread.of([a.ended - a.sent for a in run.asked])
    assert latency is not None
    return Cell(
        part=run.part,
        mode=run.mode,
        clients=run.clients,
        requests=len(run.asked),
        prompt_tokens=sum(a.prompt_tokens for a in run.asked),
        output_tokens=output_tokens,
        seconds=seconds,
        tokens_per_s=output_tokens / seconds,
        bound=output_tokens / allowed,
        of_bound=allowed / seconds,
        latency=latency,
        steps=len(run.steps),
        rows=sum(step.rows for step in run.steps),
        padding_rows=run.padding_rows,
    )


def find(cells: Sequence[Cell], like: Cell, mode: str) -> Cell | None:
    """The same offer under another mode, if it was measured."""
    same = [c for c in cells if (c.part, c.clients, c.mode) == (like.part, like.clients, mode)]
    return same[0] if same else None
