"""Measures what each mode of batching gains, what a prompt costs those who run, and whether nobody starves.

Everything runs in this process on one loaded model, each measurement with a scheduler of its own. The parts:

clients       requests of one length from so many clients, under each mode
mixed         the same with answers of mixed lengths, where members of a batch end far apart
prompt_heavy  the same with long prompts
long_prompt   a long prompt that joins streams: their gaps, and its own time, with and without a target
fair          one request of a tenant after a hundred of another, first come first served and shared fairly
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass

from potok.bench.bound import Ceilings, Factors, ModelWork
from potok.bench.cells import MODES, Cell, CellRun, Offer, cell, requests, run_cell
from potok.bench.closed_loop import check_same
from potok.bench.crowd import (
    FAIR_CASES,
    LONGEST_OF_TENANT,
    SEATS,
    FairFigures,
    LongPromptFigures,
    fair_figures,
    long_prompt_figures,
    meet_streams,
    meet_tenant,
    stream_lengths,
)
from potok.bench.machine import Machine, disturbances
from potok.bench.newcomer import Newcomer
from potok.bench.options import above_zero, at_least, some_of
from potok.bench.prefix_loads import Lengths, mixed_lengths
from potok.bench.schedulers import NewScheduler, new_scheduler
from potok.bench.steps import Bound
from potok.config import CONTINUOUS, DYNAMIC, OFF, STATIC, EngineConfig
from potok.core.scheduler import Scheduler
from potok.engine.build import build_engine
from potok.engine.serve import Engine
from potok.errors import ClientError

PARTS = ("clients", "mixed", "prompt_heavy", "long_prompt", "fair")

#: Requests of a cell at least, so that few clients do not mean few figures.
LEAST_REQUESTS = 8
#: Of the part with long prompts, and the modes that others compare with it.
HEAVY = Lengths(512, 256)
HEAVY_MODES = (STATIC, CONTINUOUS)
WARM_UP = Lengths(16, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModesBenchOptions:
    """Fields are named after the command's options.

    requests_per_client: one after the other. prompt_tokens, output_tokens: of each request of the part `clients`.
    mixed_clients, mixed_requests: of the parts `mixed` and `prompt_heavy`. requests_off: at most so many with batching
    off, where more clients only wait longer. batch_size: of static and dynamic batches; max_wait_ms: of dynamic ones.
    long_prompt_tokens: of the prompt that joins `streams`; half of it is tried as well. targets_ms: of the gap;
    fair_rounds: how often two tenants meet.
    """

    parts: tuple[str, ...] = ("clients", "mixed")
    modes: tuple[str, ...] = tuple(MODES)
    clients: tuple[int, ...] = (1, 10, 50, 100)
    requests_per_client: int = 2
    prompt_tokens: int = 48
    output_tokens: int = 64
    mixed_clients: int = 100
    mixed_requests: int = 100
    requests_off: int = 30
    batch_size: int = 32
    max_wait_ms: float = 20.0
    streams: int = 8
    long_prompt_tokens: int = 6000
    targets_ms: tuple[float, ...] = (100.0, 60.0)
    fair_rounds: int = 3
    seed: int = 0

    def check(self) -> None:
        """Raises ClientError naming the first option that makes no sense."""
        some_of("parts", self.parts, PARTS)
        some_of("modes", self.modes, tuple(MODES))
        if not self.clients or min(self.clients) < 1:
            raise ClientError("--clients must be numbers from 1 up, such as 1,10,100.", "clients")
        at_least(self, 1, "requests_per_client", "prompt_tokens", "output_tokens", "mixed_clients", "mixed_requests")
        at_least(self, 1, "requests_off", "batch_size", "streams", "fair_rounds")
        at_least(self, 2, "long_prompt_tokens")
        above_zero(self, "max_wait_ms")
        if not all(target > 0 for target in self.targets_ms):
            raise ClientError("--targets-ms must be numbers above 0, such as 100,60.", "targets_ms")


@dataclass(frozen=True, slots=True)
class ModesBenchResult:
    """Everything that was measured, and with what. Parts that were not asked for are empty.

    same_answers: requests that more than one mode was given, and answered alike. ceilings, factors, work: of the bound.
    """

    command: str
    date: str  # ISO 8601, UTC
    machine: Machine
    model: str
    options: ModesBenchOptions
    isa: str
    threads: int
    max_num_seqs: int
    max_num_batched_tokens: int
    ceilings: Ceilings
    factors: Factors
    work: ModelWork
    notes: list[str]
    cells: list[Cell]
    same_answers: int
    long_prompt: list[LongPromptFigures]
    fair: list[FairFigures]


def run_modes_bench(
    config: EngineConfig, options: ModesBenchOptions, command: str, say: Callable[[str], None] = lambda line: None
) -> ModesBenchResult:
    """Loads the model and runs the parts one after the other. `say` is told what is being measured.

    Raises ClientError or LoadError for what the caller can repair, ServerError when a request failed or an answer
    depended on the mode.
    """
    options.check()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    notes = disturbances()
    say("loading the model")
    engine = build_engine(config)
    bench = ModesBench(engine, new_scheduler(engine), options, say)
    bench.check_room()
    say("the machine")
    bound = Bound.measure(engine, config.model)
    bench.warm_up()
    runs = bench.cells()
    long_prompt = bench.long_prompt() if "long_prompt" in options.parts else []
    fair = bench.fair() if "fair" in options.parts else []
    say("the machine, again")
    bound = bound.again()
    info = engine.info
    return ModesBenchResult(
        command=command,
        date=date,
        machine=Machine.read(),
        model=os.path.basename(config.model),
        options=options,
        isa=info.isa,
        threads=info.threads,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        ceilings=bound.ceilings,
        factors=bound.factors,
        work=bound.work,
        notes=[*notes, *info.notes],
        cells=[cell(run, bound) for run in runs],
        same_answers=bench.same_answers,
        long_prompt=long_prompt,
        fair=fair,
    )


class ModesBench:
    """The parts, on one engine. new: makes its schedulers.

    same_answers: requests that were given to more than one mode so far.
    """

    def __init__(
        self, engine: Engine, new: NewScheduler, options: ModesBenchOptions, say: Callable[[str], None]
    ) -> None:
        self.same_answers = 0
        self._engine = engine
        self._new = new
        self._options = options
        self._say = say
        self._offers = self._make_offers()

    def check_room(self) -> None:
        """Raises ClientError where the loads would not run as they are meant to."""
        o, info = self._options, self._engine.info
        for part, lengths in self._lengths_at_once():
            longest = max(n.prompt + n.output for n in lengths)
            if longest > info.max_model_len:
                raise ClientError(
                    f"the part {part} has requests of {longest} tokens, but max_model_len is {info.max_model_len}; ask "
                    "for shorter ones, or for other --parts.",
                    "parts",
                )
            ends = sorted((-(-(n.prompt + n.output) // info.block_size) for n in lengths), reverse=True)
            blocks = sum(ends[: max(info.max_num_seqs, o.batch_size)])
            if blocks > info.num_blocks:
                raise ClientError(
                    f"the part {part} needs {blocks} KV blocks, but there are {info.num_blocks}; raise "
                    "--kv-cache-memory.",
                    "parts",
                )

    def warm_up(self) -> None:
        """So that the first cell does not pay for memory that nobody has touched yet."""
        some = requests(self._engine.info.vocab_size, [WARM_UP] * self._options.batch_size, 0, "warm up")
        run_cell(self._new(), self._engine.backend, CONTINUOUS, Offer("", len(some), some), len(some))

    # -- clients, mixed, prompt_heavy -----------------------------------------------------------------------------

    def cells(self) -> list[CellRun]:
        """Each offer under each mode. Raises ServerError where an answer depended on the mode."""
        runs = []
        for offer in self._offers:
            answers: dict[int, list[int]] = {}
            twice: set[int] = set()
            for mode in self._options.modes:
                if offer.part == "prompt_heavy" and mode not in HEAVY_MODES:
                    continue
                self._say(f"{offer.part}, {offer.clients} clients, {mode}")
                most = self._options.requests_off if mode == OFF else len(offer.requests)
                run = run_cell(self._scheduler(mode), self._engine.backend, mode, offer, most)
                known = {id: answer for id, answer in run.answers.items() if id in answers}
                check_same(known, answers, "the mode of batching")
                twice |= set(known)
                answers |= run.answers
                runs.append(run)
            self.same_answers += len(twice)
        return runs

    def _make_offers(self) -> list[Offer]:
        o = self._options
        lengths: list[tuple[str, int, list[Lengths]]] = []
        if "clients" in o.parts:
            one = Lengths(o.prompt_tokens, o.output_tokens)
            lengths += [("clients", n, [one] * max(LEAST_REQUESTS, n * o.requests_per_client)) for n in o.clients]
        if "mixed" in o.parts:
            lengths.append(("mixed", o.mixed_clients, mixed_lengths(o.mixed_requests, o.seed)))
        if "prompt_heavy" in o.parts:
            lengths.append(("prompt_heavy", o.mixed_clients, [HEAVY] * o.mixed_requests))
        vocab = self._engine.info.vocab_size
        return [
            Offer(part, clients, requests(vocab, each, 0, f"{o.seed} {part} {clients}"))
            for part, clients, each in lengths
        ]

    def _scheduler(self, mode: str) -> Scheduler:
        o, (batching, padding) = self._options, MODES[mode]
        return self._new(
            max_num_seqs=o.batch_size if batching in {STATIC, DYNAMIC} else 0,
            batching=batching,
            padding_rows=padding,
            max_wait_us=round(1000 * o.max_wait_ms),
        )

    # -- long_prompt, fair ----------------------------------------------------------------------------------------

    def long_prompt(self) -> list[LongPromptFigures]:
        """In one step, then in steps as large as may be, then with each target; a prompt of half the length as well."""
        o, figures = self._options, []
        for length in (o.long_prompt_tokens, o.long_prompt_tokens // 2):
            for whole, target in ((True, 0.0), (False, 0.0), *((False, target) for target in o.targets_ms)):
                how = "in one step" if whole else f"target {target:g} ms" if target else "no target"
                self._say(f"a prompt of {length} tokens beside {o.streams} streams, {how}")
                budget = length + o.streams if whole else 0
                scheduler = self._new(max_num_batched_tokens=budget, target_us=round(1000 * target))
                met = meet_streams(scheduler, self._engine.backend, o.streams, length, o.seed)
                figures.append(long_prompt_figures(met, length, target, whole))
        return figures

    def fair(self) -> list[FairFigures]:
        o = self._options
        met: list[list[Newcomer]] = [[] for _ in FAIR_CASES]
        for round in range(o.fair_rounds):
            for case, meetings in zip(FAIR_CASES, met, strict=True):
                self._say(f"two tenants, {case.policy}, {case.others} of the one; round {round + 1} of {o.fair_rounds}")
                scheduler = self._new(max_num_seqs=SEATS, policy=case.policy)
                meetings.append(meet_tenant(scheduler, self._engine.backend, case.others, f"{o.seed} {round}"))
        return [fair_figures(case, meetings) for case, meetings in zip(FAIR_CASES, met, strict=True)]

    # -- room -----------------------------------------------------------------------------------------------------

    def _lengths_at_once(self) -> list[tuple[str, list[Lengths]]]:
        """Of each part, lengths of requests that run together."""
        o = self._options
        parts = [(offer.part, [Lengths(len(r.prompt), r.max_tokens) for r in offer.requests]) for offer in self._offers]
        if "long_prompt" in o.parts:
            parts.append(
                (
                    "long_prompt",
                    [Lengths(o.long_prompt_tokens, 1), *[stream_lengths(self._engine.info.max_model_len)] * o.streams],
                )
            )
        if "fair" in o.parts:
            parts.append(("fair", [LONGEST_OF_TENANT] * SEATS))
        return parts
