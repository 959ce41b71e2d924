"""What sampling takes and gives for the sampled rows of one step, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


class SampleRows(NamedTuple):
    """How each of the S sampled rows is turned into a token (order of operations: potok.sampling).

    seed: [S] uint64, choice: [S], position: [S] absolute position that the new token will have.
    seen_*: CSR over rows that have a penalty: distinct ids of prompt and output, and how often the output holds each
    (ids of the prompt alone may be missing where the repetition penalty is 1: nothing happens to them).
    bias_*: CSR of distinct (id, value) added to the logits after the penalties; -inf makes an id impossible.
    indptrs: [S+1].
    logprobs: [S], -1 none, else how many best ids to report.
    """

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    seed: U64
    choice: I32
    position: I32
    presence: F32
    frequency: F32
    repetition: F32
    seen_indptr: I32
    seen_ids: I32
    seen_counts: I32
    bias_indptr: I32
    bias_ids: I32
    bias_values: F32
    logprobs: I32
    want_hashes: bool


class Sampled(NamedTuple):
    """ids: [S], -1 where the row's logits were not finite (that request fails, its neighbours do not).

    logprob: [S], of the chosen id; 0 where no log-probabilities were asked.
    top_ids, top_logprobs: [S, K], K = max(logprobs, 0), filled as far as asked, then with -1 and 0.
    hashes: [S] of the raw logits' bytes when asked for, else [0].
    """

    ids: I32
    logprob: F32
    top_ids: I32
    top_logprobs: F32
    hashes: U64
