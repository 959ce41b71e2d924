"""What a backend takes and gives. A backend keeps the weights and the KV memory, and no state of any request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from potok.sampling.rows import Sampled, SampleRows

__all__ = ["Backend", "BackendInfo", "SampleRows", "Sampled", "StepInputs"]

I32 = npt.NDArray[np.int32]
Ints: TypeAlias = "array[int] | I32"


class StepInputs:
    """One step in CSR form. T tokens, B segments, S sampled rows.

    Each field is given as anything that holds int32 in a row: `buffers`, in the order below. A backend that computes
    reads them as they are; numpy arrays are made only for whoever asks for one.

    tokens, positions: [T], segment after segment. q_indptr: [B+1] into tokens.
    kv_blocks: block tables, segment after segment; kv_indptr: [B+1] into kv_blocks.
    A segment's row at absolute position p reads KV of [0, p] and writes slot p; its table covers them.
    out_rows: [S] ascending, rows of T whose logits are wanted.
    copies: [C, 2] source and target of whole blocks, copied in this order before anything else.
    """

    __slots__ = ("buffers",)

    def __init__(
        self,
        tokens: Ints,
        positions: Ints,
        q_indptr: Ints,
        kv_indptr: Ints,
        kv_blocks: Ints,
        out_rows: Ints,
        copies: Ints,
    ) -> None:
        self.buffers = (tokens, positions, q_indptr, kv_indptr, kv_blocks, out_rows, copies)

    def with_out_rows(self, out_rows: Ints) -> StepInputs:
        """The same step, with other rows sampled."""
        tokens, positions, q_indptr, kv_indptr, kv_blocks, _, copies = self.buffers
        return StepInputs(tokens, positions, q_indptr, kv_indptr, kv_blocks, out_rows, copies)

    @property
    def tokens(self) -> I32:
        return np.asarray(self.buffers[0])

    @property
    def positions(self) -> I32:
        return np.asarray(self.buffers[1])

    @property
    def q_indptr(self) -> I32:
        return np.asarray(self.buffers[2])

    @property
    def kv_indptr(self) -> I32:
        return np.asarray(self.buffers[3])

    @property
    def kv_blocks(self) -> I32:
        return np.asarray(self.buffers[4])

    @property
    def out_rows(self) -> I32:
        return np.asarray(self.buffers[5])

    @property
    def copies(self) -> I32:
        return np.asarray(self.buffers[6]).reshape(-1, 2)


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
