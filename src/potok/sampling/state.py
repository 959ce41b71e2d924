"""What the engine remembers of each request for its sampler, and the rows of a step made from it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from potok.protocol import Sampling
from potok.sampling.rows import F32, I32, SETTINGS, Lists, SampleRows

NO_IDS: I32 = np.empty(0, np.int32)
NO_IDS.flags.writeable = False


class Seen:
    """The distinct ids that a request's penalties look at, and how often the output holds each."""

    def __init__(self, prompt: I32) -> None:
        distinct = np.unique(prompt)
        self._size = len(distinct)
        self._ids = np.empty(max(64, 2 * self._size), np.int32)
        self._ids[: self._size] = distinct
        self._counts = np.zeros_like(self._ids)
        self._places = {token: i for i, token in enumerate(distinct.tolist())}

    def push(self, token: int) -> None:
        """Counts one output token."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1

    @property
    def ids(self) -> I32:
        return self._ids[: self._size]

    @property
    def counts(self) -> I32:
        return self._counts[: self._size]


NOTHING_SEEN = Seen(NO_IDS)


class RowState:
    """One request's part of SampleRows: fixed settings, penalties, biases. `push` each of its output tokens, in order.

    A function of (sampling, prompt, output) alone: it can be rebuilt from them at any time, `emitted` being the output
    so far. Ids of the prompt are kept only for a repetition penalty; the other penalties do not see them.
    """

    __slots__ = (
        *("_free_ids", "_free_values", "_until_free", "bias_ids", "bias_values"),
        *("seen", "settings", "settled", "width"),
    )

    def __init__(self, sampling: Sampling, prompt: Sequence[int], emitted: Sequence[int] = ()) -> None:
        self.settings: bytes = np.array(
            (
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                sampling.min_p,
                sampling.seed,
                sampling.choice,
                sampling.presence_penalty,
                sampling.frequency_penalty,
                sampling.repetition_penalty,
                sampling.logprobs,
            ),
            SETTINGS,
        ).tobytes()

        self.width = max(0, sampling.logprobs)  # ids to report

        self.seen: Seen | None = None
        if sampling.repetition_penalty != 1:
            self.seen = Seen(np.array(prompt, np.int32))
        elif sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
            self.seen = Seen(NO_IDS)

        bias = dict(sampling.logit_bias)
        self._free_ids, self._free_values = _arrays(bias)
        self.bias_ids, self.bias_values = self._free_ids, self._free_values
        self._until_free = sampling.min_tokens if sampling.stop_ids else 0  # outputs until a stop id may come
        if self._until_free > 0:
            self.bias_ids, self.bias_values = _arrays(bias | dict.fromkeys(sampling.stop_ids, -np.inf))
        self.settled = self.seen is None and self._until_free == 0  # tokens to come change nothing here

        for token in emitted:
            self.push(token)

    def push(self, token: int) -> None:
        """Takes one output token."""
        if self.seen is not None:
            self.seen.push(token)
        if self._until_free > 0:
            self._until_free -= 1
            if self._until_free == 0:
                self.bias_ids, self.bias_values = self._free_ids, self._free_values
                self.settled = self.seen is None


class RowBuilder:
    """`build_rows` for one step after the other.

    Most steps sample the same requests as the step before, and nothing but their positions has changed. With the caches
    full of weights, making all anew takes a tenth of a millisecond.
    """

    __slots__ = ("_last", "_states")

    def __init__(self) -> None:
        self._states: list[RowState] = []
        self._last: SampleRows | None = None  # of these states, while all are settled

    def build(self, states: list[RowState], positions: array[int], want_hashes: bool) -> SampleRows:
        """positions: of the token to sample, absolute. All but these is shared between steps: it is only read."""
        last = self._last
        if last is not None and states == self._states and want_hashes == last.want_hashes:
            return SampleRows(last.settings, positions, last.width, want_hashes, None, last.biases)
        rows = build_rows(states, positions, want_hashes)
        self._states = states
        self._last = rows if all(state.settled for state in states) else None
        return rows


def build_rows(states: Sequence[RowState], positions: array[int], want_hashes: bool) -> SampleRows:
    """The rows of one step. positions: absolute, of the token to sample, one for each state."""
    assert len(states) == len(positions), f"{len(states)} rows, but {len(positions)} positions"
    seen = biases = None
    if any(state.seen for state in states):
        parts = [NOTHING_SEEN if state.seen is None else state.seen for state in states]
        seen = _lists([part.ids for part in parts], [part.counts for part in parts])
    if any(len(state.bias_ids) for state in states):
        biases = _lists([state.bias_ids for state in states], [state.bias_values for state in states])
    return SampleRows(
        settings=b"".join([state.settings for state in states]),
        position=positions,
        width=max([state.width for state in states], default=0),
        want_hashes=want_hashes,
        seen=seen,
        biases=biases,
    )


def _arrays(bias: dict[int, float]) -> tuple[I32, F32]:
    return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)


def _lists(ids: list[I32], values: list[npt.NDArray[Any]]) -> Lists:
    """From those of each row."""
    indptr = np.zeros(len(ids) + 1, np.int32)
    np.cumsum([len(row) for row in ids], out=indptr[1:])
    return Lists(indptr, np.concatenate(ids), np.concatenate(values))
