"""What a backend takes and gives. A backend keeps the weights and the KV memory, and no state of any request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from potok.sampling.rows import Sampled, SampleRows

__all__ = ["Backend", "BackendInfo", "SampleRows", "Sampled", "StepInputs"]

I32 = npt.NDArray[np.int32]


class StepInputs(NamedTuple):
    """One step in CSR form. T tokens, B segments, S sampled rows.

    tokens, positions: [T], segment after segment. q_indptr: [B+1] into tokens.
    kv_blocks: block tables, segment after segment; kv_indptr: [B+1] into kv_blocks.
    A segment's row at absolute position p reads KV of [0, p] and writes slot p; its table covers them.
    out_rows: [S] ascending, rows of T whose logits are wanted.
    copies: [C, 2] source and target of whole blocks, copied in this order before anything else.
    """

    tokens: I32
    positions: I32
    q_indptr: I32
    kv_indptr: I32
    kv_blocks: I32
    out_rows: I32
    copies: I32


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


class AllocatingBackend(Backend, Protocol):
    """A backend whose weights are loaded. `info.num_blocks` counts after `allocate`."""

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Takes the KV memory. Called once, before the first step."""

    def kv_block(self, block: int) -> memoryview:
        """The memory of one block, as long as any other's; writable."""
        ...
