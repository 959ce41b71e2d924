"""What sampling takes and gives for the sampled rows of one step."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

#: What stays the same for the life of a request; RowSettings of csrc/bind/bind_replay.cpp. logprobs: -1 none, else how
#: many best ids to report.
SETTINGS = np.dtype(
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


class Lists(NamedTuple):
    """Of each row a list of distinct ids, each with a value: row i has those from indptr[i] to indptr[i + 1].

    indptr: [S+1].
    """

    indptr: I32
    ids: I32
    values: npt.NDArray[Any]

    def of(self, row: int) -> tuple[I32, npt.NDArray[Any]]:
        part = slice(self.indptr[row], self.indptr[row + 1])
        return self.ids[part], self.values[part]


class SampleRows(NamedTuple):
    """How each of the S sampled rows is turned into a token (order of operations: potok.sampling).

    A backend that computes reads the bytes; `table` shows them to whoever wants to look at them.
    settings: S times SETTINGS. position: [S] absolute position that the new token will have.
    width: the most ids that a row reports.
    seen: ids of prompt and output, and how often the output holds each, of rows that have a penalty (ids of the prompt
    alone may be missing where the repetition penalty is 1: nothing happens to them). None: no row has a penalty.
    biases: values added to the logits of these ids after the penalties; -inf makes an id impossible. None: there are
    none.
    """

    settings: bytes
    position: array[int]
    width: int
    want_hashes: bool
    seen: Lists | None
    biases: Lists | None

    @property
    def table(self) -> npt.NDArray[np.void]:
        return np.frombuffer(self.settings, SETTINGS)


class Sampled(NamedTuple):
    """ids: [S], -1 where the row's logits were not finite (that request fails, its neighbours do not).

    logprob: [S], of the chosen id; 0 where no log-probabilities were asked.
    top_ids, top_logprobs: [S, K], K the rows' width, filled as far as asked, then with -1 and 0; S may be 0 where K is.
    hashes: [S] of the raw logits' bytes when asked for, else [0].
    """

    ids: I32 | array[int]
    logprob: F32 | array[float]
    top_ids: I32
    top_logprobs: F32
    hashes: U64


NO_IDS: I32 = np.empty((0, 0), np.int32)
NO_LOGPROBS: F32 = np.empty((0, 0), np.float32)
NO_HASHES: U64 = np.empty(0, np.uint64)
