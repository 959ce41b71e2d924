"""Tensors of a file into the native executor, packed as their kernels take them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from potok._native import Replay
from potok.model.precision import INTEGER_FORMATS, Activation, ActivationRule
from potok.weights.bits import U8
from potok.weights.formats import FORMATS, dequantize
from potok.weights.gguf import GGUFFile, Tensor
from potok.weights.rewritten import REWRITTEN, rewritten

#: Bits of an element once packed (csrc/kernels/packed.h), scales included, of formats that are packed as they are,
#: but for a list of levels, 32 bytes for each 16 rows;
_OWN_FORM = {
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 5.5,
    "Q5_1": 6,
    "Q8_0": 8.5,
    "IQ4_NL": 4.5,
    "Q2_K": 2.625,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 8.5625,
    "Q3_K": 4.5625,
    "IQ4_XS": 4.5625,
    "LISTED": 6,
    "LISTED_K": 4.5625,
}
#: and of every format of a file.
PACKED = {
    format.name: _OWN_FORM[REWRITTEN.get(format.name, format).name] for format in FORMATS.values() if format.has_values
}
_F32 = FORMATS[0]
_PANEL = 16  # rows that are packed together
_ELEMENTS = 1 << 20  # that a thread rewrites at a time: which takes some 8 MB


class WeightLoader:
    """Adds each tensor once; remembers which take more memory than in the file because they are rewritten."""

    def __init__(self, replay: Replay, file: GGUFFile, activation_bits: int, rule: ActivationRule) -> None:
        self._replay = replay
        self._file = file
        self._activation_bits = activation_bits
        self._rule = rule
        self._index: dict[str, int] = {}
        self._rewritten: Counter[str] = Counter()
        self._bytes = [0.0, 0.0]  # of the rewritten tensors: in the file, in memory

    def activation(self, name: str) -> Activation:
        return self._rule(name, self._file.tensors[name].type.name, self._activation_bits)

    def weight(self, name: str) -> int:
        """A matrix [n, k] -> its native index."""
        if name not in self._index:
            self._index[name] = self._add(name, self._file.tensors[name])
        return self._index[name]

    def vector(self, name: str) -> int:
        """A vector, as float32 -> its native index."""
        if name not in self._index:
            tensor = self._file.tensors[name]
            self._index[name] = self._replay.add_vector(dequantize(tensor.type, tensor.data).reshape(-1))
        return self._index[name]

    def _add(self, name: str, tensor: Tensor) -> int:
        index = self._pack(tensor, self.activation(name))
        # The file's bytes have been read for the last time; without this a load would hold the weights twice.
        self._file.release_memory()
        return index

    def _pack(self, tensor: Tensor, activation: Activation) -> int:
        n, k = tensor.shape
        source = tensor.type
        as_floats = source.name in INTEGER_FORMATS and activation is Activation.F32
        target = _F32 if as_floats else REWRITTEN.get(source.name, source)
        index = self._replay.add_weight(target.id, int(activation), n, k)
        if target is source:
            self._replay.pack_rows(index, target.id, 0, tensor.data)
        else:
            for first, rows in self._converted(tensor, as_floats):
                self._replay.pack_rows(index, target.id, first, rows)
        if source.name in REWRITTEN and not as_floats:
            self._rewritten[source.name] += 1
            self._bytes[0] += tensor.data.nbytes
            self._bytes[1] += n * k * PACKED[source.name] / 8
        return index

    def _converted(self, tensor: Tensor, as_floats: bool) -> Iterator[tuple[int, U8]]:
        """Rows in the format that they are packed as, and the place of the first. All threads work, a part each."""
        n, k = tensor.shape
        step = max(1, _ELEMENTS // k // _PANEL) * _PANEL

        def convert(first: int) -> tuple[int, U8]:
            rows = tensor.data[first : first + step]
            if as_floats:
                return first, dequantize(tensor.type, rows).view(np.uint8)
            return first, rewritten(tensor.type, rows)[1]

        threads = self._replay.threads
        with ThreadPoolExecutor(threads, "potok-rewrite") as pool:
            ahead: deque[Future[tuple[int, U8]]] = deque()
            for first in range(0, n, step):
                ahead.append(pool.submit(convert, first))
                if len(ahead) > threads:  # no more than these in memory
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def notes(self) -> tuple[str, ...]:
        """One sentence about what rewriting costs, when there was any."""
        if not self._rewritten:
            return ()
        kinds = ", ".join(f"{n} {name}" for name, n in sorted(self._rewritten.items()))
        before, after = (b / 2**20 for b in self._bytes)
        return (f"wider levels for {kinds} tensors: {before:.1f} MiB became {after:.1f} MiB",)
