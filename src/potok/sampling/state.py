"""What the engine remembers of each request for its sampler, and the rows of a step made from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from potok.protocol import Sampling
from potok.sampling.rows import F32, I32, SampleRows

#: The fields of a row that stay the same for the life of a request.
FIXED = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("choice", np.int32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("logprobs", np.int32),
    ]
)

NO_IDS: I32 = np.empty(0, np.int32)
NO_VALUES: F32 = np.empty(0, np.float32)
NO_IDS.flags.writeable = False
NO_VALUES.flags.writeable = False


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


class RowState:
    """One request's part of SampleRows: fixed settings, penalties, biases. `push` each of its output tokens, in order.

    A function of (sampling, prompt, output) alone: it can be rebuilt from them at any time, `emitted` being the output
    so far. Ids of the prompt are kept only for a repetition penalty; the other penalties do not see them.
    """

    __slots__ = ("_free_ids", "_free_values", "_until_free", "bias_ids", "bias_values", "fixed", "seen")

    def __init__(self, sampling: Sampling, prompt: Sequence[int], emitted: Sequence[int] = ()) -> None:
        self.fixed: bytes = np.array(
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
            FIXED,
        ).tobytes()

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

    @property
    def settled(self) -> bool:
        """Whether tokens to come change nothing here."""
        return self.seen is None and self._until_free == 0


class RowBuilder:
    """`build_rows` for one step after the other.

    Most steps sample the same requests as the step before, and nothing but their positions has changed. With the caches
    full of weights, making all arrays anew takes a tenth of a millisecond.
    """

    __slots__ = ("_last", "_states")

    def __init__(self) -> None:
        self._states: list[RowState] = []
        self._last: SampleRows | None = None  # of these states, while all are settled

    def build(self, states: list[RowState], positions: list[int], want_hashes: bool) -> SampleRows:
        """positions: of the token to sample, absolute. The arrays are shared between steps: they are only read."""
        last = self._last
        if last is not None and states == self._states and want_hashes == last.want_hashes:
            return last._replace(position=np.array(positions, np.int32))
        rows = build_rows(list(zip(states, positions, strict=True)), want_hashes)
        self._states = states
        self._last = rows if all(state.settled for state in states) else None
        return rows


def build_rows(rows: Sequence[tuple[RowState, int]], want_hashes: bool) -> SampleRows:
    """The rows of one step, from (state, absolute position of the token to sample) of each sampled row, in order."""
    count = len(rows)
    fixed = np.frombuffer(b"".join([state.fixed for state, _ in rows]), FIXED)
    field = {name: fixed[name].copy() for name in FIXED.names or ()}

    seen = [state.seen for state, _ in rows]
    seen_indptr, seen_ids, seen_counts = np.zeros(count + 1, np.int32), NO_IDS, NO_IDS
    if any(seen):
        seen_indptr = _indptr([0 if s is None else len(s.ids) for s in seen])
        seen_ids = np.concatenate([s.ids for s in seen if s is not None])
        seen_counts = np.concatenate([s.counts for s in seen if s is not None])

    bias_sizes = [len(state.bias_ids) for state, _ in rows]
    bias_indptr, bias_ids, bias_values = np.zeros(count + 1, np.int32), NO_IDS, NO_VALUES
    if any(bias_sizes):
        bias_indptr = _indptr(bias_sizes)
        bias_ids = np.concatenate([state.bias_ids for state, _ in rows])
        bias_values = np.concatenate([state.bias_values for state, _ in rows])

    return SampleRows(
        temperature=field["temperature"],
        top_k=field["top_k"],
        top_p=field["top_p"],
        min_p=field["min_p"],
        seed=field["seed"],
        choice=field["choice"],
        position=np.array([position for _, position in rows], np.int32),
        presence=field["presence"],
        frequency=field["frequency"],
        repetition=field["repetition"],
        seen_indptr=seen_indptr,
        seen_ids=seen_ids,
        seen_counts=seen_counts,
        bias_indptr=bias_indptr,
        bias_ids=bias_ids,
        bias_values=bias_values,
        logprobs=field["logprobs"],
        want_hashes=want_hashes,
    )


def _arrays(bias: dict[int, float]) -> tuple[I32, F32]:
    return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)


def _indptr(sizes: list[int]) -> npt.NDArray[np.int32]:
    indptr = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=indptr[1:])
    return indptr
