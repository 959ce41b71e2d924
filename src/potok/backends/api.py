"""What a backend takes and gives. A backend keeps the weights and the KV memory, and no state of any request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step in CSR form. T tokens, B segments, S sampled rows.

    tokens, positions: [T], segment after segment. q_indptr: [B+1] into tokens.
    kv_blocks: block tables, segment after segment; kv_indptr: [B+1] into kv_blocks.
    A segment's row at absolute position p reads KV of [0, p] and writes slot p; its table covers them.
    out_rows: [S] ascending, rows of T whose logits are wanted.
    """

    tokens: I32
    positions: I32
    q_indptr: I32
    kv_indptr: I32
    kv_blocks: I32
    out_rows: I32


@dataclass(frozen=True, slots=True)
class SampleRows:
    """How each of the S sampled rows is turned into a token (order of operations: potok.sampling).

    seed: [S] uint64, choice: [S], position: [S] absolute position that the new token will have.
    seen_*: CSR over rows that have a penalty: distinct ids of prompt and output, and how often the output holds each.
    bias_*: CSR of (id, value) added to the logits after the penalties; -inf makes an id impossible.
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


@dataclass(frozen=True, slots=True)
class Sampled:
    """ids: [S], -1 where the row's logits were not finite (that request fails, its neighbours do not).

    logprob: [S], of the chosen id. top_ids, top_logprobs: [S, K], K = max(logprobs, 0), filled as far as asked.
    hashes: [S] of the raw logits' bytes when asked for, else [0].
    """

    ids: I32
    logprob: F32
    top_ids: I32
    top_logprobs: F32
    hashes: U64


@dataclass(frozen=True, slots=True)
class BackendInfo:
    vocab_size: int
    context_length: int  # of the model file, tokens
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    threads: int
    isa: str
    notes: tuple[str, ...]


class Backend(Protocol):
    info: BackendInfo

    def step(self, inputs: StepInputs, rows: SampleRows) -> Sampled:
        """Computes the plan for the step's tokens, writes their KV, samples the asked rows. Releases the GIL."""
        ...
