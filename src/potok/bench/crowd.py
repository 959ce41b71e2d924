"""What somebody who comes does to those who run, and they to him: a long prompt, and the one request of a tenant."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from potok.backends.api import Backend
from potok.bench.cells import requests
from potok.bench.figures import Spread, percentile
from potok.bench.newcomer import Newcomer
from potok.bench.prefix_loads import Lengths
from potok.core.scheduler import Scheduler
from potok.engine.loop import EngineLoop
from potok.errors import ServerError

#: Of the streams that a long prompt joins: they last longer than any prompt takes.
STREAM = Lengths(48, 2000)
#: Tokens of each stream before the prompt comes: how long a step takes without it is seen in them.
ALONE_TOKENS = 48

#: Requests that may run at once while two tenants meet.
SEATS = 16
#: Requests that the first tenant has to ask in all.
TENANT_REQUESTS = 100
#: Of them, those that have ended when the other one comes: by then the running ones are all at different places.
TENANT_ENDED = 16
TENANT_PROMPT_TOKENS = 48
#: The first tenant's answers have any length between these; that of the other one is the mean.
TENANT_OUTPUT = (16, 112)
LONGEST_OF_TENANT = Lengths(TENANT_PROMPT_TOKENS, TENANT_OUTPUT[1])


@dataclass(frozen=True, slots=True)
class LongPromptFigures:
    """A prompt of so many tokens that joins streams. target_ms: of the gap, 0: none. whole: it is computed in one step.

    decode_ms: a gap before it came, the median. gap: of all streams, from when it came to its first token.
    prompt_ms: that time.
    """

    prompt_tokens: int
    target_ms: float
    whole: bool
    decode_ms: float
    gap: Spread
    prompt_ms: float

    def of_its_part(self, without_target: LongPromptFigures) -> float | None:
        """The prompt's time, as a multiple of what the target leaves it.

        Of a step of length T the streams take t, and T - t are the prompt's: it should take T / (T - t) times as long
        as without a target. None where nothing is left.
        """
        left = self.target_ms - self.decode_ms
        return self.prompt_ms / (without_target.prompt_ms * self.target_ms / left) if left > 0 else None


def stream_lengths(max_model_len: int) -> Lengths:
    return Lengths(STREAM.prompt, min(STREAM.output, max_model_len - STREAM.prompt))


def meet_streams(scheduler: Scheduler, backend: Backend, streams: int, prompt_tokens: int, seed: int) -> Newcomer:
    """Raises ServerError when a stream ended before the prompt was computed."""
    name, vocab = f"{seed} long prompt {prompt_tokens}", backend.info.vocab_size
    stream = stream_lengths(scheduler.limits.max_model_len)
    [one] = requests(vocab, [Lengths(prompt_tokens, 1)], streams, f"{name} itself")

    def ready(met: Newcomer) -> bool:
        return all(len(times) > ALONE_TOKENS for times in met.times.values())

    met = Newcomer(requests(vocab, [stream] * streams, 0, name), streams, one, ready)
    EngineLoop(scheduler, backend, met).run()
    if met.ended:
        raise ServerError("a stream ended before the long prompt was computed; lower --long-prompt-tokens")
    return met


def long_prompt_figures(met: Newcomer, prompt_tokens: int, target_ms: float, whole: bool) -> LongPromptFigures:
    gap = Spread.of(met.gaps_meanwhile())
    assert gap is not None
    return LongPromptFigures(
        prompt_tokens=prompt_tokens,
        target_ms=target_ms,
        whole=whole,
        decode_ms=1000 * percentile(sorted(met.gaps_before()), 50),
        gap=gap,
        prompt_ms=1000 * (met.first - met.sent),
    )


class FairCase(NamedTuple):
    """others: requests of the first tenant that are open at once."""

    policy: str
    others: int


#: The last one is what the other tenant would have at best: a seat is free, and nobody waits.
FAIR_CASES = (
    FairCase("fcfs", TENANT_REQUESTS),
    FairCase("fair", TENANT_REQUESTS),
    FairCase("fcfs", SEATS - 1),
)


@dataclass(frozen=True, slots=True)
class FairFigures:
    """The one request of a tenant, beside the running and the waiting ones of another. Times in ms, round by round."""

    policy: str
    running: int
    waiting: int
    ttft_ms: list[float]
    latency_ms: list[float]

    @property
    def typical_ms(self) -> float:
        """Of the whole answer, the median."""
        return percentile(sorted(self.latency_ms), 50)

    @property
    def typical_ttft_ms(self) -> float:
        return percentile(sorted(self.ttft_ms), 50)


def meet_tenant(scheduler: Scheduler, backend: Backend, others: int, name: str) -> Newcomer:
    """others: as in FairCase. All lengths and prompts depend on the name alone."""
    rng, vocab = random.Random(f"{name} lengths"), backend.info.vocab_size
    lengths = [Lengths(TENANT_PROMPT_TOKENS, rng.randint(*TENANT_OUTPUT)) for _ in range(TENANT_REQUESTS)]
    own = Lengths(TENANT_PROMPT_TOKENS, sum(TENANT_OUTPUT) // 2)
    first = [replace(r, namespace="A") for r in requests(vocab, lengths, 0, f"{name} A")]
    [one] = requests(vocab, [own], TENANT_REQUESTS, f"{name} B")
    met = Newcomer(first, others, replace(one, namespace="B"), lambda met: met.ended >= TENANT_ENDED)
    EngineLoop(scheduler, backend, met).run()
    return met


def fair_figures(case: FairCase, meetings: Sequence[Newcomer]) -> FairFigures:
    running = min(case.others, SEATS)
    left = TENANT_REQUESTS - TENANT_ENDED
    return FairFigures(
        policy=case.policy,
        running=running,
        waiting=min(case.others, left) - running,
        ttft_ms=[1000 * (met.first - met.sent) for met in meetings],
        latency_ms=[1000 * (met.end - met.sent) for met in meetings],
    )
