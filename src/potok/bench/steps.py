"""The steps of a measurement: when each ran, what it computed, and how long the machine would have needed at least."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from potok.backends.api import Backend, BackendInfo, Ints, Sampled, SampleRows, StepInputs
from potok.backends.native.backend import NativeBackend
from potok.bench.bound import Ceilings, Factors, ModelWork, StepWork, factors_of, step_seconds
from potok.bench.work import best, mean, measure_ceilings, model_work, step_work
from potok.engine.serve import Engine
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config

NO_TABLE = array("i")


class TimedStep(NamedTuple):
    """Times in seconds of one clock. inputs: without block tables, which are the most of them by far.

    native: of the time between start and end, what was spent in native code; all of it where a backend has no other.
    """

    started: float
    ended: float
    native: float
    inputs: StepInputs


class TimedBackend:
    """Passes steps on, and remembers when each ran and what it computed."""

    def __init__(self, backend: Backend) -> None:
        self.info: BackendInfo = backend.info
        self._backend = backend
        self._native = backend if isinstance(backend, NativeBackend) else None
        self._steps: list[tuple[float, float, float, tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]]] = []

    def step(self, inputs: StepInputs, rows: SampleRows) -> Sampled:
        """What it remembers is made into TimedSteps later: here it would count as time between two steps."""
        native = self._native
        before_ns = 0 if native is None else native.computing_ns
        started = time.perf_counter()
        sampled = self._backend.step(inputs, rows)
        ended = time.perf_counter()
        spent = ended - started if native is None else (native.computing_ns - before_ns) / 1e9
        tokens, positions, q_indptr, _, _, out_rows, copies = inputs.buffers
        self._steps.append((started, ended, spent, (tokens, positions, q_indptr, NO_TABLE, NO_TABLE, out_rows, copies)))
        return sampled

    @property
    def steps(self) -> list[TimedStep]:
        return [
            TimedStep(started, ended, spent, StepInputs(*buffers)) for started, ended, spent, buffers in self._steps
        ]


class StepFigures(NamedTuple):
    """seconds: from the end of the step before to its own. native: inside native code. bound: see potok.bench.bound."""

    rows: int
    sampled: int
    prompt: bool  # some segment has several tokens
    seconds: float
    native: float
    bound: float


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second over some steps. bound: tokens a second that the machine would allow in them.

    python: part of the time that was spent outside native code.
    """

    tokens_per_s: float
    bound: float
    of_bound: float
    python: float
    steps: int

    @staticmethod
    def of(steps: Sequence[StepFigures], tokens: int) -> Rate:
        seconds, bound = sum(s.seconds for s in steps), sum(s.bound for s in steps)
        return Rate(
            tokens_per_s=tokens / seconds,
            bound=tokens / bound,
            of_bound=bound / seconds,
            python=1 - sum(s.native for s in steps) / seconds,
            steps=len(steps),
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """What one machine allows one model, with the best kernels of the table that is in use."""

    ceilings: Ceilings
    factors: Factors
    work: ModelWork

    @staticmethod
    def measure(engine: Engine, model: str) -> Bound:
        """Takes a second or two. model: the path of the file that the engine serves."""
        file = GGUFFile.open(model)
        work = model_work(file, read_config(file), engine.backend.info.kv_bytes_per_token)
        return Bound(measure_ceilings(engine.info.threads, work.nbytes), factors_of(engine.info.isa), work)

    def again(self) -> Bound:
        """Measured a second time: the better counts."""
        return replace(self, ceilings=best(self.ceilings, self._now(self.work.nbytes)))

    def around(self, kv_tokens: int, run: Callable[[], list[TimedStep]], rounds: int) -> list[TimedRun]:
        """Runs so many times, each held against the mean of the machine just before it and just after it.

        kv_tokens: whose K and V a step of the run reads beside the weights; W is measured over as many bytes.
        """
        stream_bytes = self.work.nbytes + kv_tokens * self.work.kv_bytes
        runs, before = [], self._now(stream_bytes)
        for _ in range(rounds):
            steps, after = run(), self._now(stream_bytes)
            runs.append(TimedRun(steps, replace(self, ceilings=mean(before, after))))
            before = after
        return runs

    def _now(self, stream_bytes: int) -> Ceilings:
        return measure_ceilings(self.ceilings.threads, stream_bytes)

    def seconds(self, step: StepWork) -> float:
        return step_seconds(self.work, self.ceilings, self.factors, step)

    def figures(self, steps: Sequence[TimedStep]) -> list[StepFigures]:
        figures = []
        before = steps[0].started
        for _, ended, native, inputs in steps:
            step = step_work(inputs)
            prompt = step.prompt_context > 0
            figures.append(StepFigures(step.rows, step.sampled, prompt, ended - before, native, self.seconds(step)))
            before = ended
        return figures


class TimedRun(NamedTuple):
    """The steps of a run, and the bound of the machine as it was around it."""

    steps: list[TimedStep]
    bound: Bound

    @property
    def figures(self) -> list[StepFigures]:
        return self.bound.figures(self.steps)
