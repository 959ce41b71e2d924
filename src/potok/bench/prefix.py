"""Measures what the KV memory is good for: prefixes that are shared, blocks that are filled, a pool that is too small.

Everything runs in this process on one loaded model, each part with a scheduler of its own. The parts:

shared     requests behind one system prompt, with the prefix cache and without
dialogues  users who resend their history, in a pool that does not hold all of them, by policy
memory     how many requests a pool takes, and how many slots of their blocks are empty: modelled, without the model
pressure   a pool for a third of the load against a load that fits, on the model and modelled
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from potok.bench.closed_loop import ClosedLoop, Listed, check_same, checked, duration, run_closed_loop, ttft
from potok.bench.figures import Spread
from potok.bench.machine import Machine, disturbances
from potok.bench.modelled import BUDGET, WEIGHTS_BOUND, StepCost, run_modelled
from potok.bench.options import at_least, some_of
from potok.bench.prefix_loads import (
    LONGEST_MIXED,
    Dialogues,
    Lengths,
    behind_one_prompt,
    mixed_lengths,
    mixed_requests,
)
from potok.config import EngineConfig
from potok.core.policy import POLICIES, Policy
from potok.core.scheduler import Limits, Scheduler
from potok.engine.build import build_engine
from potok.engine.serve import Engine
from potok.errors import ClientError
from potok.protocol import Submit

PARTS = ("shared", "dialogues", "memory", "pressure")

#: What a server reserves that gives each request the longest context from its start.
RESERVED_TOKENS = 2048
#: The part of a load's KV that the small pools hold: of all histories, of all open requests.
POOL_PART = 3
#: Clients of the modelled pressure, in those of the real one; and requests of each.
MODELLED_SCALE = 4
#: What no answer may depend on.
CACHED = "what was cached"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBenchOptions:
    """requests, requests_off: behind one system prompt, with the cache and without it; clients: that ask them.

    system_tokens, question_tokens, answer_tokens: of each. users, turns, turn_tokens, turn_answer_tokens: of the
    dialogues; turns_open: turns that wait or run at a time, turns_running: that run. memory_requests: at once, into
    memory_pool times the longest context. pressure_clients, pressure_requests: of which a third fits.
    """

    parts: tuple[str, ...] = PARTS
    requests: int = 1000
    requests_off: int = 100
    clients: int = 8
    system_tokens: int = 256
    question_tokens: int = 12
    answer_tokens: int = 4
    users: int = 50
    turns: int = 8
    turn_tokens: int = 20
    turn_answer_tokens: int = 12
    turns_open: int = 24
    turns_running: int = 8
    memory_requests: int = 256
    memory_pool: int = 8
    pressure_clients: int = 24
    pressure_requests: int = 48
    seed: int = 0

    def check(self) -> None:
        """Raises ClientError naming the first option that makes no sense."""
        some_of("parts", self.parts, PARTS)
        at_least(self, 1, *(name for name in self.__dataclass_fields__ if name not in {"parts", "seed"}))
        at_least(self, POOL_PART, "pressure_clients")
        if self.requests_off > self.requests:
            raise ClientError(
                f"--requests-off must be at most --requests ({self.requests}), not {self.requests_off}.", "requests_off"
            )


@dataclass(frozen=True, slots=True)
class SharedFigures:
    """saved: of the system prompt's tokens in all requests, the part that was not computed. Times in ms."""

    caching: bool
    requests: int
    prompt_tokens: int
    computed_tokens: int  # of the prompts
    saved: float
    ms_per_request: float
    ttft: Spread


@dataclass(frozen=True, slots=True)
class DialogueFigures:
    """hit_rate: of all prompt tokens, those that came from the cache; at_best: those that earlier turns computed.

    steps: the same on every machine, unlike the times.
    """

    policy: str  # or "off"
    turns: int
    prompt_tokens: int
    hit_rate: float
    at_best: float
    computed_tokens: int  # of the prompts
    steps: int
    seconds: float
    turns_per_s: float
    ttft: Spread
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """admitted: requests that ran at once before the first preemption; reserving: when each holds RESERVED_TOKENS.

    joined: requests that had joined until then, those that had ended included. empty_slots: of a running request.
    """

    requests: int
    num_blocks: int
    block_size: int
    reserving: int
    admitted: int
    joined: int
    empty_slots: float


@dataclass(frozen=True, slots=True)
class PressureFigures:
    """One load into one pool. seconds of a modelled run are those of the modelled clock."""

    modelled: bool
    clients: int
    requests: int
    num_blocks: int
    failures: int
    preemptions: int
    most_preemptions: int | None  # of one request, where that is known
    seconds: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class PrefixBenchResult:
    """Everything that was measured, and with what. Parts that were not asked for are empty or None.

    pressure: pairs, a load that fits and then one of which a third does, on the model and modelled.
    """

    command: str
    date: str  # ISO 8601, UTC
    machine: Machine
    model: str
    options: PrefixBenchOptions
    isa: str
    threads: int
    block_size: int
    max_num_batched_tokens: int
    step_cost: StepCost
    notes: list[str]
    shared: list[SharedFigures]
    dialogues: list[DialogueFigures]
    dialogue_blocks: int
    memory: MemoryFigures | None
    pressure: list[PressureFigures]


def run_prefix_bench(
    config: EngineConfig, options: PrefixBenchOptions, command: str, say: Callable[[str], None] = lambda line: None
) -> PrefixBenchResult:
    """Loads the model and runs the parts one after the other. `say` is told what is being measured.

    Raises ClientError or LoadError for what the caller can repair, ServerError when a request failed or an answer
    depended on what was shared.
    """
    options.check()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    notes = disturbances()
    say("loading the model")
    bench = PrefixBench(build_engine(config), options, say)
    bench.check_room()
    parts = options.parts
    info = bench.engine.info
    return PrefixBenchResult(
        command=command,
        date=date,
        machine=Machine.read(),
        model=os.path.basename(config.model),
        options=options,
        isa=info.isa,
        threads=info.threads,
        block_size=info.block_size,
        max_num_batched_tokens=info.max_num_batched_tokens,
        step_cost=WEIGHTS_BOUND,
        notes=[*notes, *info.notes],
        shared=bench.shared() if "shared" in parts else [],
        dialogues=bench.dialogues() if "dialogues" in parts else [],
        dialogue_blocks=bench.dialogue_blocks,
        memory=bench.memory() if "memory" in parts else None,
        pressure=bench.pressure() if "pressure" in parts else [],
    )


class PrefixBench:
    """The parts, on one engine."""

    def __init__(self, engine: Engine, options: PrefixBenchOptions, say: Callable[[str], None]) -> None:
        self.engine = engine
        self._options = options
        self._say = say
        self._limits = engine.scheduler.limits
        self._vocab = engine.info.vocab_size

    def check_room(self) -> None:
        """Raises ClientError where the loads would not run as they are meant to."""
        o, info = self._options, self.engine.info
        longest = max(
            o.system_tokens + o.question_tokens + o.answer_tokens,
            o.turns * (o.turn_tokens + o.turn_answer_tokens),
            LONGEST_MIXED if "pressure" in o.parts else 0,
        )
        if longest > info.max_model_len:
            raise ClientError(
                f"a request of {longest} tokens is too long: max_model_len is {info.max_model_len}; ask for shorter "
                "ones, or for other --parts.",
                "parts",
            )
        blocks = max(self.dialogue_blocks, self._pressure_blocks(self._pressure_lengths(), o.pressure_clients))
        if blocks > info.num_blocks:
            raise ClientError(
                f"the loads need {blocks} KV blocks, but there are {info.num_blocks}; raise --kv-cache-memory.", "parts"
            )

    # -- shared ---------------------------------------------------------------------------------------------------

    def shared(self) -> list[SharedFigures]:
        o = self._options
        requests = behind_one_prompt(
            self._vocab, o.requests, o.system_tokens, o.question_tokens, o.answer_tokens, o.seed
        )
        self._say(f"{len(requests)} requests behind one system prompt")
        on, loop = self._shared(True, requests)
        self._say(f"{o.requests_off} of them without the prefix cache")
        off, other = self._shared(False, requests[: o.requests_off])
        check_same(other.answers, loop.answers, CACHED)
        return [on, off]

    def _shared(self, caching: bool, requests: Sequence[Submit]) -> tuple[SharedFigures, ClosedLoop]:
        scheduler = Scheduler(self._limits, self.engine.info.num_blocks, prefix_caching=caching)
        loop = run_closed_loop(scheduler, self.engine.backend, Listed(requests), self._options.clients)
        asked = checked(loop)
        prompts, computed = sum(a.prompt_tokens for a in asked), scheduler.counters.prompt_tokens
        return SharedFigures(
            caching=caching,
            requests=len(asked),
            prompt_tokens=prompts,
            computed_tokens=computed,
            saved=(prompts - computed) / (len(asked) * self._options.system_tokens),
            ms_per_request=1000 * duration(asked) / len(asked),
            ttft=ttft(asked),
        ), loop

    # -- dialogues ------------------------------------------------------------------------------------------------

    @property
    def dialogue_blocks(self) -> int:
        """A pool for a third of all histories, and for one at least."""
        o = self._options
        history = self._limits.blocks_for(o.turns * (o.turn_tokens + o.turn_answer_tokens))
        return max(o.users // POOL_PART, 1) * history

    def dialogues(self) -> list[DialogueFigures]:
        figures: list[DialogueFigures] = []
        answers: dict[int, list[int]] = {}
        for name in ("fcfs", "longest_prefix", "off"):
            self._say(f"dialogues, {name}")
            policy = POLICIES.get(name, Policy)()
            figure, loop = self._dialogues(name, policy)
            check_same(loop.answers, answers or loop.answers, CACHED)
            answers = loop.answers
            figures.append(figure)
        return figures

    def _dialogues(self, name: str, policy: Policy) -> tuple[DialogueFigures, ClosedLoop]:
        o = self._options
        limits = replace(self._limits, max_num_seqs=o.turns_running)
        scheduler = Scheduler(limits, self.dialogue_blocks, prefix_caching=name != "off", policy=policy)
        source = Dialogues(self._vocab, o.users, o.turns, o.turn_tokens, o.turn_answer_tokens, o.seed)
        loop = run_closed_loop(scheduler, self.engine.backend, source, o.turns_open)
        asked = checked(loop)
        prompts, seconds = sum(a.prompt_tokens for a in asked), duration(asked)
        return DialogueFigures(
            policy=name,
            turns=len(asked),
            prompt_tokens=prompts,
            hit_rate=sum(a.cached for a in asked) / prompts,
            at_best=1 - len(asked) * o.turn_tokens / prompts,
            computed_tokens=scheduler.counters.prompt_tokens,
            steps=scheduler.counters.steps,
            seconds=seconds,
            turns_per_s=len(asked) / seconds,
            ttft=ttft(asked),
            evicted_blocks=scheduler.cache.counters.evicted_blocks,
        ), loop

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryFigures:
        self._say("memory, modelled")
        o = self._options
        per_request = self._limits.blocks_for(RESERVED_TOKENS)
        num_blocks = o.memory_pool * per_request
        limits = self._modelled_limits(o.memory_requests)
        run = run_modelled(
            Scheduler(limits, num_blocks), mixed_lengths(o.memory_requests, o.seed), o.memory_requests, seed=o.seed
        )
        return MemoryFigures(
            requests=o.memory_requests,
            num_blocks=num_blocks,
            block_size=limits.block_size,
            reserving=num_blocks // per_request,
            admitted=run.running_before_preemption,
            joined=run.joined_before_preemption,
            empty_slots=run.empty_slots,
        )

    # -- pressure -------------------------------------------------------------------------------------------------

    def pressure(self) -> list[PressureFigures]:
        o = self._options
        lengths = self._pressure_lengths()
        figures = []
        for clients in (o.pressure_clients // POOL_PART, o.pressure_clients):
            self._say(f"{clients} clients, a pool for {o.pressure_clients // POOL_PART}")
            figures.append(self._pressure(lengths, clients))
        self._say("pressure, modelled")
        at_once = MODELLED_SCALE * o.pressure_clients
        many = mixed_lengths(MODELLED_SCALE * at_once, o.seed)
        return figures + [
            self._modelled_pressure(many, at_once, clients) for clients in (at_once // POOL_PART, at_once)
        ]

    def _pressure_lengths(self) -> list[Lengths]:
        return mixed_lengths(self._options.pressure_requests, self._options.seed)

    def _pressure_blocks(self, lengths: Sequence[Lengths], clients: int) -> int:
        """A pool for a third of what that many of these requests need at their ends, and for the longest of them."""
        needed = [self._limits.blocks_for(n.prompt + n.output) for n in lengths]
        return max(int(clients * sum(needed) / len(needed) / POOL_PART), *needed)

    def _pressure(self, lengths: Sequence[Lengths], clients: int) -> PressureFigures:
        scheduler = Scheduler(self._limits, self._pressure_blocks(lengths, self._options.pressure_clients))
        requests = mixed_requests(self._vocab, lengths, self._options.seed)
        loop = run_closed_loop(scheduler, self.engine.backend, Listed(requests), clients)
        asked = list(loop.asked.values())
        seconds = duration(asked)
        return PressureFigures(
            modelled=False,
            clients=clients,
            requests=len(asked),
            num_blocks=scheduler.pool.num_blocks,
            failures=sum(a.failed for a in asked),
            preemptions=scheduler.counters.preemptions,
            most_preemptions=None,
            seconds=seconds,
            tokens_per_s=sum(map(len, loop.answers.values())) / seconds,
        )

    def _modelled_pressure(self, lengths: Sequence[Lengths], at_once: int, clients: int) -> PressureFigures:
        scheduler = Scheduler(self._modelled_limits(at_once), self._pressure_blocks(lengths, at_once))
        run = run_modelled(scheduler, lengths, clients, seed=self._options.seed)
        return PressureFigures(
            modelled=True,
            clients=clients,
            requests=len(lengths),
            num_blocks=scheduler.pool.num_blocks,
            failures=run.failures,
            preemptions=run.preemptions,
            most_preemptions=run.most_preemptions,
            seconds=run.seconds,
            tokens_per_s=run.output_tokens / run.seconds,
        )

    def _modelled_limits(self, most_running: int) -> Limits:
        """Nothing of the machine in them, so that a seed gives the same figures on every machine."""
        return Limits(most_running, BUDGET, RESERVED_TOKENS, self._limits.block_size)
