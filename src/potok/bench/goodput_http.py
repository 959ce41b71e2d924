"""Finds the goodput of a server: rounds of Poisson arrivals over HTTP, at rates that potok.bench.goodput chooses."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import uvloop

from potok.bench.asker import PATHS, Asker, Wording
from potok.bench.client import Client, Server
from potok.bench.figures import Targets
from potok.bench.goodput import LEAST_REQUESTS, Round, Search, Window, hopeless, judged
from potok.bench.machine import Machine, disturbances
from potok.bench.options import above_zero, at_least
from potok.bench.own_server import OwnServer
from potok.bench.prefix_loads import MIXED_PROMPT, Lengths, mixed_lengths
from potok.bench.stream import Record
from potok.bench.workloads import poisson_arrivals
from potok.config import EngineConfig
from potok.errors import ClientError

TIMEOUT_S = 600.0
#: How often a running round is looked at: whether it can still pass.
LOOK_S = 0.1
#: Between rounds: the server notices that the clients of the last one have left.
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputOptions:
    """Fields are named after the command's options.

    url: "" for a server of our own. prompt_tokens, output_tokens: of each request; 0: mixed lengths. duration: of the
    window in which things count, after warm_up, in seconds. start_rate, resolution, rounds: see Search.
    """

    url: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float = 2000.0
    gap_ms: float = 150.0
    start_rate: float = 1.0  # requests/s
    resolution: float = 0.1
    rounds: int = 1
    duration: float = 60.0
    warm_up: float = 60.0
    endpoint: str = "completions"  # or "chat"
    model: str | None = None  # None: the first that /v1/models names
    api_key: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises ClientError naming the first option that makes no sense."""
        at_least(self, 0, "prompt_tokens", "output_tokens", "warm_up")
        above_zero(self, "ttft_ms", "gap_ms", "duration", "start_rate", "resolution")
        at_least(self, 1, "rounds")
        if self.endpoint not in PATHS:
            raise ClientError(f"--endpoint must be completions or chat, not {self.endpoint}.", "endpoint")
        if self.start_rate < self.lowest_rate:
            raise ClientError(
                f"--start-rate must be at least {self.lowest_rate:g}, so that --duration {self.duration:g} s brings "
                f"{LEAST_REQUESTS} requests on average; it is {self.start_rate:g}.",
                "start_rate",
            )

    @property
    def lowest_rate(self) -> float:
        return LEAST_REQUESTS / self.duration

    @property
    def targets(self) -> Targets:
        return Targets(self.ttft_ms, self.gap_ms)

    def lengths(self, requests: int, seed: int) -> list[Lengths]:
        """Of the requests of one round."""
        return [
            Lengths(self.prompt_tokens or n.prompt, self.output_tokens or n.output)
            for n in mixed_lengths(requests, seed)
        ]


@dataclass(frozen=True, slots=True)
class GoodputResult:
    """Everything that was measured, and with what. The API key is left out of `options`.

    goodput: requests a second; None when no rate passed. failed: the lowest that did not pass; None when all did.
    """

    command: str
    date: str  # ISO 8601, UTC
    machine: Machine
    model: str
    options: GoodputOptions
    notes: list[str]
    rounds: list[Round]
    goodput: float | None
    failed: float | None


def run_goodput(
    options: GoodputOptions,
    own: EngineConfig | None,
    command: str,
    say: Callable[[str], None] = lambda line: None,
) -> GoodputResult:
    """own: settings of a server of our own, started when the options name none.

    Raises ClientError when the options or the server cannot be used at all.
    """
    options.check()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    notes = disturbances()
    with ExitStack() as stack:
        url, model = options.url, options.model
        if not url:
            assert own is not None, "a server is needed"
            say("starting the server")
            url, model = stack.enter_context(OwnServer(own)).url, None
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        client = Client(Server.parse(url, options.api_key), TIMEOUT_S)
        stack.callback(client.close)
        asker = Asker(client, options.endpoint, model, Wording(options.seed))
        search, rounds = runner.run(search_goodput(asker, options, say))
    return GoodputResult(
        command=command,
        date=date,
        machine=Machine.read(),
        model=asker.model,
        options=replace(options, api_key=None),
        notes=[*notes, *asker.notes],
        rounds=rounds,
        goodput=search.passed,
        failed=search.failed,
    )


async def search_goodput(
    asker: Asker, options: GoodputOptions, say: Callable[[str], None] = lambda line: None
) -> tuple[Search, list[Round]]:
    """The search, ended, and all rounds that it took. Raises ClientError when the server cannot be used at all."""
    await asker.prepare(options.prompt_tokens or sum(MIXED_PROMPT) // 2)
    search = Search(options.start_rate, options.lowest_rate, options.resolution, options.rounds)
    rounds: list[Round] = []
    while (rate := search.rate) is not None:
        say(f"round {len(rounds) + 1}: {rate:g} requests a second for {options.warm_up + options.duration:g} s")
        rounds.append(await _round(asker, options, rate, options.seed + len(rounds)))
        search.note(not rounds[-1].failed)
        await asyncio.sleep(SETTLE_S)
    return search, rounds


async def _round(asker: Asker, options: GoodputOptions, rate: float, seed: int) -> Round:
    """Arrivals until the end of the window; then those who still wait for a first token get what the limit leaves them.
    Whatever runs after that is broken off: answers that nobody competes with any more would only flatter the gaps."""
    times = poisson_arrivals(seed, rate, options.warm_up + options.duration)
    lengths = options.lengths(len(times), seed)
    bodies = [asker.body(n.prompt, n.output) for n in lengths]
    start = time.perf_counter()
    window = Window(start + options.warm_up, start + options.warm_up + options.duration)
    expected = sum(window.holds(start + at) for at in times)
    records: list[Record] = []
    running: list[asyncio.Task[None]] = []

    async def arrive() -> None:
        for body, at in zip(bodies, times, strict=True):
            await asyncio.sleep(start + at - time.perf_counter())
            records.append(Record(due=start + at))
            running.append(asyncio.create_task(asker.ask(body, records[-1])))

    arriving = asyncio.create_task(arrive())
    cut = False
    while not cut and _unsettled(records, window, options.targets, time.perf_counter()):
        await asyncio.sleep(LOOK_S)
        cut = hopeless(records, window, expected, options.targets, time.perf_counter())
    now = time.perf_counter()
    cut = cut and now < window.end
    for task in (arriving, *running):
        task.cancel()
    for failure in await asyncio.gather(arriving, *running, return_exceptions=True):
        if isinstance(failure, Exception):  # none of the server's: those are in the records
            raise failure
    return judged(rate, records, window, options.targets, now, cut=cut)


def _unsettled(records: Sequence[Record], window: Window, targets: Targets, now: float) -> bool:
    """Whether the window is open, or somebody of it may still get a first token in time."""
    if now < window.end:
        return True
    waiting = [r.due for r in records if window.holds(r.due) and not (r.times or r.end)]
    return bool(waiting) and 1000 * (now - max(waiting)) <= targets.ttft_ms
