"""How fast this machine computes this model, measured before anybody is served: what settings are derived from."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from potok.backends.api import AllocatingBackend
from potok.backends.inputs import pack
from potok.core.batch import Batch, Segment
from potok.protocol import Sampling
from potok.sampling.state import RowState, build_rows

WARM_UP_TOKENS = 16
PROMPT_TOKENS = 64
#: A step that is expected to take longer is left out.
LONGEST_S = 0.2
#: Requests at once that are tried, until twice as many gain less than GAIN.
ROWS = (8, 16, 32, 64, 128, 256)
GAIN = 1.05


class StepTime(NamedTuple):
    """Of a step with one token each of so many requests."""

    rows: int
    seconds: float


class Speed(NamedTuple):
    """token_s: seconds for each token of a prompt. steps: of decoding, by rows; may be empty."""

    token_s: float
    steps: tuple[StepTime, ...] = ()


def measure(backend: AllocatingBackend) -> Speed:
    """From steps on blocks that nobody uses yet, each the better of two where there is time. It warms everything up.

    The second, longer step comes closer to what a full step costs; on a slow machine it is left out.
    """
    info = backend.info
    num_tokens = min(PROMPT_TOKENS, info.num_blocks * info.block_size, info.context_length)
    warm_up = min(WARM_UP_TOKENS, num_tokens)
    token_s = _time(backend, [_prompt(backend, warm_up)]) / warm_up
    if token_s * num_tokens <= LONGEST_S:
        token_s = min(token_s, _time(backend, [_prompt(backend, num_tokens)]) / num_tokens)
    return Speed(token_s, tuple(_decode(backend, token_s)))


def _decode(backend: AllocatingBackend, token_s: float) -> list[StepTime]:
    steps: list[StepTime] = []
    row_s = token_s
    for rows in ROWS:
        if rows > backend.info.num_blocks or rows * row_s > LONGEST_S:
            break
        segments = [_row(backend, i) for i in range(rows)]
        seconds = min(_time(backend, segments) for _ in range(2))
        steps.append(StepTime(rows, seconds))
        before, row_s = row_s, seconds / rows
        if len(steps) > 1 and before < GAIN * row_s:
            break
    return steps


def _row(backend: AllocatingBackend, i: int) -> Segment:
    """The first token of a request of its own."""
    return Segment(i, 0, array("i", [7919 * i % backend.info.vocab_size]), array("i", [i]), sample=True)


def _prompt(backend: AllocatingBackend, num_tokens: int) -> Segment:
    """Made up, with one sampled row."""
    info = backend.info
    tokens = array("i", (7919 * i % info.vocab_size for i in range(num_tokens)))
    return Segment(0, 0, tokens, array("i", range(-(-num_tokens // info.block_size))), sample=True)


def _time(backend: AllocatingBackend, segments: Sequence[Segment]) -> float:
    """Seconds of one step."""
    inputs = pack(Batch(0, tuple(segments)), backend.info.block_size)
    states = [RowState(Sampling(), segment.tokens) for segment in segments]
    positions = array("i", [len(segment.tokens) for segment in segments])
    rows = build_rows(states, positions, want_hashes=False)
    started = time.perf_counter()
    backend.step(inputs, rows)
    return time.perf_counter() - started
