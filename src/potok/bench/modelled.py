"""The scheduler without a model: requests of given lengths on a clock that is modelled, for what only it decides.

A step costs a constant and so much a token, as on a real machine while the contexts are short. So hundreds of requests
take a second or two, and a seed gives the same figures on every machine.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from potok.bench.prefix_loads import Lengths
from potok.core.request import Request
from potok.core.scheduler import Scheduler
from potok.finish import Finish


class StepCost(NamedTuple):
    """Seconds of a step, and of each token in it."""

    step: float
    token: float

    def seconds(self, tokens: int) -> float:
        return self.step + self.token * tokens


#: Where reading the weights takes most of a step. Then throughput hangs on how many run at once, and a pool that is
#: too small hurts most; where tokens are dear, as for a small model on few cores, only what is recomputed counts.
WEIGHTS_BOUND = StepCost(0.03, 0.0005)
BUDGET = 256  # tokens of a step
#: So many different ids that requests share nothing by chance.
VOCAB = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelledRun:
    """seconds: of the modelled clock. most_preemptions: of one request.

    running_before_preemption: the most requests that ran at once before anybody was preempted for the first time.
    joined_before_preemption: requests that had joined until then, those that had ended included.
    empty_slots: in the blocks of a running request, those that no token of it belongs to; on average over time.
    """

    seconds: float
    output_tokens: int
    failures: int
    preemptions: int
    most_preemptions: int
    running_before_preemption: int
    joined_before_preemption: int
    empty_slots: float


def run_modelled(
    scheduler: Scheduler, lengths: Sequence[Lengths], clients: int, cost: StepCost = WEIGHTS_BOUND, seed: int = 0
) -> ModelledRun:
    """Runs all requests to their last tokens, at most `clients` of them open at a time. They share nothing."""
    rng = random.Random(f"{seed} modelled")
    requests = [request(id, n, rng) for id, n in enumerate(lengths)]
    left, live = requests[::-1], 0
    size, cache, counters = scheduler.limits.block_size, scheduler.cache, scheduler.counters
    seconds, failures, output = 0.0, 0, 0
    running = joined = 0
    empty = held = 0.0
    while left or live:
        while left and live < clients:
            refused = scheduler.submit(left.pop())
            failures += refused is not None
            live += refused is None
        batch = scheduler.schedule(round(1e6 * seconds))
        assert batch is not None or not live, f"{live} requests are open but nothing is computed"
        if batch is None:
            break
        if not counters.preemptions:
            running = max(running, len(scheduler.running))
            joined = cache.counters.queries
        step = cost.seconds(batch.num_tokens)
        seconds += step
        empty += step * sum([len(r.blocks) * size - len(r.tokens) for r in scheduler.running])
        held += step * len(scheduler.running)
        sampled = [rng.randrange(VOCAB) for _ in range(batch.num_sampled)]
        for delta in scheduler.commit(batch, sampled, round(1e6 * step)):
            output += delta.token is not None
            live -= delta.finish is not None
            failures += delta.finish is Finish.ERROR
    return ModelledRun(
        seconds=seconds,
        output_tokens=output,
        failures=failures,
        preemptions=counters.preemptions,
        most_preemptions=max(r.preemptions for r in requests),
        running_before_preemption=running,
        joined_before_preemption=joined,
        empty_slots=empty / held,
    )


def request(id: int, lengths: Lengths, rng: random.Random) -> Request:
    tokens = array("i", [rng.randrange(VOCAB) for _ in range(lengths.prompt)])
    return Request(id, tokens, lengths.prompt, lengths.output)
