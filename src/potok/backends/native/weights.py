"""Tensors of a file into the native executor: packed where a kernel takes them so, else expanded to float32."""

from __future__ import annotations

from collections import Counter

import numpy as np

from potok._native import Replay
from potok.model.precision import INTEGER_FORMATS, Activation, ActivationRule
from potok.weights.formats import dequantize
from potok.weights.gguf import GGUFFile, Tensor

#: Formats that are packed (csrc/kernels/packed.h), and the bits of an element once packed, scales included.
PACKED = {
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 5.5,
    "Q5_1": 6,
    "Q8_0": 8.5,
    "IQ4_NL": 8.5,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 8.5625,
    "Q3_K": 8.5625,
    "IQ4_XS": 8.5625,
}
_F32_ID = 0


class WeightLoader:
    """Adds each tensor once; remembers what had to be expanded for want of a kernel."""

    def __init__(self, replay: Replay, file: GGUFFile, activation_bits: int, rule: ActivationRule) -> None:
        self._replay = replay
        self._file = file
        self._activation_bits = activation_bits
        self._rule = rule
        self._index: dict[str, int] = {}
        self._expanded: Counter[str] = Counter()
        self._bytes = [0, 0]  # of the expanded tensors: in the file, in memory

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
        index = self._pack(name, tensor)
        # The file's bytes have been read for the last time; without this a load would hold the weights twice.
        self._file.release_memory()
        return index

    def _pack(self, name: str, tensor: Tensor) -> int:
        _, k = tensor.shape
        format, activation = tensor.type.name, self.activation(name)
        if format in PACKED and not (format in INTEGER_FORMATS and activation is Activation.F32):
            return self._replay.add_weight(tensor.type.id, int(activation), k, tensor.data)
        values = dequantize(tensor.type, tensor.data)
        if format not in PACKED:
            self._expanded[format] += 1
            self._bytes[0] += tensor.data.nbytes
            self._bytes[1] += values.nbytes
        return self._replay.add_weight(_F32_ID, int(Activation.F32), k, values.view(np.uint8))

    def notes(self) -> tuple[str, ...]:
        """One sentence about the cost of expansion, when there was any."""
        if not self._expanded:
            return ()
        kinds = ", ".join(f"{n} {name}" for name, n in sorted(self._expanded.items()))
        before, after = (b / 2**20 for b in self._bytes)
        return (f"no kernel yet for {kinds} tensors: expanded to float32, {before:.0f} MiB became {after:.0f} MiB",)
