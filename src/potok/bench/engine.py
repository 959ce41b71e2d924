"""Measures the engine in this process: its own loop, scheduler and backend, with no server and no wire around them."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from potok.bench.bound import Ceilings, Factors, ModelWork
from potok.bench.machine import Machine, disturbances
from potok.bench.options import at_least
from potok.bench.steps import Bound, Rate, StepFigures, TimedBackend, TimedRun, TimedStep
from potok.config import EngineConfig
from potok.engine.build import build_engine
from potok.engine.loop import EngineLoop
from potok.engine.serve import Engine
from potok.errors import ClientError, ServerError
from potok.finish import Finish
from potok.protocol import FromEngine, Sampling, Shutdown, Step, Submit, ToEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchOptions:
    """requests: how many at once, one load each. prompt_tokens, output_tokens: of each request.

    long_prompt_tokens: of the prompts whose speed is measured, one at a time. rounds: of each load; the median counts.
    """

    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 100)
    prompt_tokens: int = 48
    output_tokens: int = 128
    long_prompt_tokens: int = 512
    rounds: int = 1
    seed: int = 0

    def check(self) -> None:
        """Raises ClientError naming the first option that makes no sense."""
        if not self.requests or min(self.requests) < 1:
            raise ClientError("--requests must be numbers from 1 up, such as 1,8,32.", "requests")
        at_least(self, 1, "prompt_tokens", "long_prompt_tokens", "rounds")
        at_least(self, 3, "output_tokens")


class Burst:
    """The engine's connection for one load: all requests arrive at once, and the engine ends with the last of them."""

    def __init__(self, requests: Sequence[Submit]) -> None:
        self._arriving = list(requests)
        self._open = {request.id for request in requests}

    def receive(self, timeout: float) -> Sequence[ToEngine]:
        if not self._open:
            return [Shutdown()]
        arrived, self._arriving = self._arriving, []
        return arrived

    def send(self, message: FromEngine) -> None:
        if not isinstance(message, Step):
            return
        for chunk in message.chunks:
            if chunk.finish is Finish.ERROR:
                raise ServerError(f"a request of the benchmark failed: {chunk.error}")
            if chunk.finish is not None:
                self._open.discard(chunk.id)


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Output tokens of one load. decode: in the steps where as many requests as ever decode, and nothing else happens.

    overall: from the first step to the last, prompts included.
    """

    requests: int
    rows: int  # of a decode step
    decode: Rate
    overall: Rate
    ceilings: Ceilings  # of the machine just before and after


@dataclass(frozen=True, slots=True)
class EngineBenchResult:
    """Everything that was measured, and with what.

    factors: of the bound. prompt: tokens of prompts alone, a second, and the machine around them. prompt_end: the same
    of their last prompt_end_tokens only, at the depth where they attend to all before them. of_rounds: parts of the
    bound that the rounds of each load reached in their decode steps, in the order in which they ran.
    """

    command: str
    date: str  # ISO 8601, UTC
    machine: Machine
    model: str
    options: EngineBenchOptions
    isa: str
    threads: int
    max_num_batched_tokens: int
    factors: Factors
    work: ModelWork
    notes: list[str]
    loads: list[LoadFigures]
    of_rounds: list[list[float]]
    prompt: Rate
    prompt_ceilings: Ceilings
    prompt_end: Rate
    prompt_end_tokens: int


def run_engine_bench(
    config: EngineConfig, options: EngineBenchOptions, command: str, say: Callable[[str], None] = lambda line: None
) -> EngineBenchResult:
    """Loads the model and runs the loads of `options` one after the other. `say` is told what is being measured.

    Raises ClientError or LoadError for what the caller can repair.
    """
    options.check()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    notes = disturbances()
    engine = build_engine(config)
    _check_room(engine, options)
    say("the machine")
    bound = Bound.measure(engine, config.model)
    bench = EngineBench(engine, options)
    loads = []
    for requests in options.requests:
        say(f"{requests} request{'s' * (requests != 1)}")
        loads.append([load_figures(requests, run.figures, run.bound.ceilings) for run in bench.load(requests, bound)])
    say("prompts")
    prompt = _median([_PromptFigures.of(run) for run in bench.prompts(bound)], lambda p: p.whole)
    return EngineBenchResult(
        command=command,
        date=date,
        machine=Machine.read(),
        model=os.path.basename(config.model),
        options=options,
        isa=engine.info.isa,
        threads=engine.info.threads,
        max_num_batched_tokens=engine.info.max_num_batched_tokens,
        factors=bound.factors,
        work=bound.work,
        notes=[*notes, *engine.info.notes],
        loads=[_median(rounds, lambda load: load.decode) for rounds in loads],
        of_rounds=[[load.decode.of_bound for load in rounds] for rounds in loads],
        prompt=prompt.whole,
        prompt_ceilings=prompt.ceilings,
        prompt_end=prompt.end,
        prompt_end_tokens=prompt.end_tokens,
    )


class _PromptFigures(NamedTuple):
    whole: Rate
    end: Rate
    end_tokens: int
    ceilings: Ceilings

    @staticmethod
    def of(run: TimedRun) -> _PromptFigures:
        steps = run.figures
        end = last_eighth(steps)
        return _PromptFigures(prompt_rate(steps), prompt_rate(end), sum(s.rows for s in end), run.bound.ceilings)


T = TypeVar("T")


def _median(rounds: Sequence[T], rate: Callable[[T], Rate]) -> T:
    """The round in the middle by its part of the bound; of an even number the lower one."""
    return sorted(rounds, key=lambda round: rate(round).of_bound)[(len(rounds) - 1) // 2]


class EngineBench:
    """Loads on one engine. Every request is greedy, runs to its last token, and has a prompt that no other has."""

    def __init__(self, engine: Engine, options: EngineBenchOptions) -> None:
        self._engine = engine
        self._options = options
        self._random = random.Random(options.seed)
        self._ids = 0

    def load(self, requests: int, bound: Bound) -> list[TimedRun]:
        """So many requests at once. In the middle of a run its steps read half of the output too."""
        o = self._options
        kv_tokens = requests * (o.prompt_tokens + o.output_tokens // 2)
        return bound.around(kv_tokens, lambda: self.run(requests, o.prompt_tokens, o.output_tokens), o.rounds)

    def prompts(self, bound: Bound) -> list[TimedRun]:
        """Long prompts, one after the other."""
        o = self._options
        return bound.around(0, lambda: self.run(1, o.long_prompt_tokens, 1), max(3, o.rounds))

    def run(self, requests: int, prompt_tokens: int, output_tokens: int) -> list[TimedStep]:
        vocab = range(self._engine.info.vocab_size)
        submits = []
        for _ in range(requests):
            self._ids += 1
            submits.append(Submit(self._ids, self._random.choices(vocab, k=prompt_tokens), output_tokens, Sampling()))
        return run_burst(self._engine, submits)


def run_burst(engine: Engine, requests: Sequence[Submit]) -> list[TimedStep]:
    """Runs all requests at once to their ends, on this thread. Raises ServerError when one fails."""
    timed = TimedBackend(engine.backend)
    EngineLoop(engine.scheduler, timed, Burst(requests)).run()
    return timed.steps


def load_figures(requests: int, steps: Sequence[StepFigures], ceilings: Ceilings) -> LoadFigures:
    decode = [s for s in steps if not s.prompt]
    rows = max(s.rows for s in decode)
    full = [s for s in decode if s.rows == rows]
    return LoadFigures(
        requests=requests,
        rows=rows,
        decode=Rate.of(full, sum(s.sampled for s in full)),
        overall=Rate.of(steps, sum(s.sampled for s in steps)),
        ceilings=ceilings,
    )


def prompt_rate(steps: Sequence[StepFigures]) -> Rate:
    return Rate.of(steps, sum(s.rows for s in steps))


def last_eighth(steps: Sequence[StepFigures]) -> list[StepFigures]:
    """The fewest last steps that compute an eighth of all rows."""
    rows, last = 0, len(steps)
    while 8 * rows < sum(s.rows for s in steps):
        last -= 1
        rows += steps[last].rows
    return list(steps[last:])


def _check_room(engine: Engine, options: EngineBenchOptions) -> None:
    """Raises ClientError where the loads would not run as they are meant to."""
    info = engine.info
    longest = max(options.prompt_tokens + options.output_tokens, options.long_prompt_tokens + 1)
    if longest > info.max_model_len:
        raise ClientError(
            f"a request of {longest} tokens is too long: max_model_len is {info.max_model_len}; lower --prompt-tokens, "
            "--output-tokens or --long-prompt-tokens.",
            "prompt_tokens",
        )
    most = max(options.requests)
    if most > info.max_num_seqs:
        raise ClientError(
            f"--requests: at most {info.max_num_seqs} (--max-num-seqs) run at once, not {most}.", "requests"
        )
    blocks = most * -(-(options.prompt_tokens + options.output_tokens) // info.block_size)
    if blocks > info.num_blocks:
        raise ClientError(
            f"{most} requests need {blocks} KV blocks, but there are {info.num_blocks}; raise --kv-cache-memory.",
            "requests",
        )
