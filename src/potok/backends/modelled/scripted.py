"""A backend that computes nothing: a script says what comes next. For tests of everything around a backend.

It keeps what a real one keeps, one entry per KV slot, and reads a request's past only through its block table. So a
script that depends on the whole history notices every mistake in positions, block tables and slots.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from potok.backends.api import BackendInfo, Sampled, SampleRows, StepInputs

#: From all tokens of a request so far (prompt and output) to the id that should come next.
Script = Callable[[Sequence[int]], int]

UNWRITTEN = -1


def _nothing(inputs: StepInputs) -> None:
    """The hook that does nothing."""


def _never(history: Sequence[int]) -> bool:
    return False


class ScriptedBackend:
    """script: chooses each id; when the request's bias makes that one impossible, the next larger possible id is taken.

    on_step: called first in each step; it may sleep, or raise to break the engine.
    fails: rows for which it is true come back as -1, as when logits are not finite.
    seconds_per_step, seconds_per_token: how long a step pretends to take.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int = 49152,
        context_length: int = 8192,
        block_size: int = 32,
        on_step: Callable[[StepInputs], None] = _nothing,
        fails: Callable[[Sequence[int]], bool] = _never,
        seconds_per_step: float = 0.0,
        seconds_per_token: float = 0.0,
    ) -> None:
        self._script = script
        self._on_step = on_step
        self._fails = fails
        self._seconds_per_step = seconds_per_step
        self._seconds_per_token = seconds_per_token
        self._slots = np.full((0, block_size), UNWRITTEN, np.int32)
        self.info = BackendInfo(
            vocab_size=vocab_size,
            context_length=context_length,
            block_size=block_size,
            num_blocks=0,
            kv_bytes_per_token=4,
            threads=1,
            isa="scripted",
            notes=(),
        )

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        self._slots = np.full((num_blocks, self.info.block_size), UNWRITTEN, np.int32)
        self.info = replace(self.info, num_blocks=num_blocks)

    def step(self, inputs: StepInputs, rows: SampleRows) -> Sampled:
        self._on_step(inputs)
        pause = self._seconds_per_step + self._seconds_per_token * len(inputs.tokens)
        if pause > 0:
            time.sleep(pause)
        self._write(inputs)
        histories = [self._history(inputs, int(row)) for row in inputs.out_rows]
        ids = [self._choose(history, rows, s) for s, history in enumerate(histories)]
        return self._sampled(ids, rows, histories)

    def kv_block(self, block: int) -> memoryview:
        slots: npt.NDArray[np.int32] = self._slots[block]
        return slots.view(np.uint8).data

    def close(self) -> None:
        """Nothing to free."""

    def _write(self, inputs: StepInputs) -> None:
        size = self.info.block_size
        for source, target in inputs.copies:
            self._slots[target] = self._slots[source]
        for b in range(len(inputs.q_indptr) - 1):
            span = slice(inputs.q_indptr[b], inputs.q_indptr[b + 1])
            table = inputs.kv_blocks[inputs.kv_indptr[b] : inputs.kv_indptr[b + 1]]
            positions = inputs.positions[span]
            self._slots[table[positions // size], positions % size] = inputs.tokens[span]

    def _history(self, inputs: StepInputs, row: int) -> list[int]:
        """Tokens of [0, position of `row`], read from the slots as attention would."""
        b = int(np.searchsorted(inputs.q_indptr, row, side="right")) - 1
        table = inputs.kv_blocks[inputs.kv_indptr[b] : inputs.kv_indptr[b + 1]]
        history: list[int] = self._slots[table].reshape(-1)[: inputs.positions[row] + 1].tolist()
        assert len(history) == inputs.positions[row] + 1, "the block table does not reach the token's own position"
        assert UNWRITTEN not in history, f"slot {history.index(UNWRITTEN)} is read before it is written"
        return history

    def _choose(self, history: Sequence[int], rows: SampleRows, s: int) -> int:
        if self._fails(history):
            return -1
        impossible: set[int] = set()
        if rows.biases is not None:
            ids, values = rows.biases.of(s)
            impossible.update(ids[np.isneginf(values)].tolist())
        token = self._script(history)
        while token in impossible:
            token = (token + 1) % self.info.vocab_size
        return token

    def _sampled(self, ids: list[int], rows: SampleRows, histories: list[list[int]]) -> Sampled:
        """Alternatives are the ids that follow the chosen one, each less probable than the one before."""
        ranks = np.arange(rows.width, dtype=np.int32)
        hashes = [_hash(history) for history in histories] if rows.want_hashes else []
        return Sampled(
            ids=np.array(ids, np.int32),
            logprob=np.full(len(ids), -0.5, np.float32),
            top_ids=((np.array(ids, np.int32)[:, None] + ranks) % self.info.vocab_size).astype(np.int32),
            top_logprobs=np.tile(-0.5 - ranks.astype(np.float32), (len(ids), 1)),
            hashes=np.array(hashes, np.uint64),
        )


def _hash(history: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(np.array(history, np.int32).tobytes(), digest_size=8).digest(), "little")
