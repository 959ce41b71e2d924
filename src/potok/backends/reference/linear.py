"""Products with weights: one chain of fused multiply-adds per output, groups of k ascending."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from potok.backends.reference.arithmetic import fma
from potok.model.precision import Activation, activation_of
from potok.sampling.rows import F32, F64
from potok.weights.formats import dequantize
from potok.weights.gguf import Tensor

GROUP = 32  # elements that share a scale, of weights and of activations

#: Largest magnitude of a quantised activation.
LIMITS = {Activation.A8: 127, Activation.A16: 32767}


class Weight(Protocol):
    def product(self, x: F32) -> F32:
        """float32 [R, K] -> [R, N]."""
        ...


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """values: float32 [K, N]. Formats without a kernel of their own are used in this form too."""

    values: F32

    def product(self, x: F32) -> F32:
        total = np.zeros((len(x), self.values.shape[1]), np.float32)
        for k, row in enumerate(self.values):
            total = fma(x[:, k, None], row, total)
        return total


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """w = level * scale + minimum. levels: int8 [G, 32, N]; scales, minimums: float32 [G, N], minimums may be missing.

    limit: one of LIMITS.
    """

    levels: npt.NDArray[np.int8]
    scales: F32
    minimums: F32 | None
    limit: int

    def product(self, x: F32) -> F32:
        q, d, s = quantize(x, self.limit)
        total = np.zeros((len(x), self.levels.shape[2]), np.float32)
        for g, levels in enumerate(self.levels):
            # Whole numbers far below 2^53: float64 adds them exactly, in whatever order the library chooses.
            dots = (q[:, g] @ levels.astype(np.float64)).astype(np.float32)
            if self.minimums is not None:
                total = fma(self.minimums[g], s[:, g, None], total)
            total = fma(self.scales[g] * d[:, g, None], dots, total)
        return total


def quantize(x: F32, limit: int) -> tuple[F64, F32, F32]:
    """[R, K] -> whole numbers q float64 [R, G, 32], scales d [R, G], and d * sum(q) [R, G]."""
    groups = x.reshape(len(x), x.shape[1] // GROUP, GROUP)
    amax = np.abs(groups).max(axis=-1)
    bound = np.float32(limit)
    inverse = np.divide(bound, amax, out=np.zeros_like(amax), where=amax > 0)
    q = np.rint(groups * inverse[..., None]).astype(np.float64)
    d = amax / bound
    return q, d, d * q.sum(axis=-1).astype(np.float32)


def load_weight(tensor: Tensor, activation_bits: int) -> Weight:
    """The tensor in the form whose product is its definition; activation_bits as in potok.model.precision."""
    name = tensor.type.name
    activation = activation_of(tensor.name, name, activation_bits)
    if activation is Activation.F32:
        return FloatWeight(np.ascontiguousarray(dequantize(tensor.type, tensor.data).T))
    limit = LIMITS[activation]
    qblocks = tensor.data.reshape(tensor.shape[0], -1, tensor.type.qblock_bytes)
    if name == "Q8_0":  # d half | 32 signed bytes
        return IntegerWeight(_columns(qblocks[..., 2:].view(np.int8)), _halves(qblocks, 0), None, limit)
    # Q4_1: d half | m half | 16 bytes of nibbles, the low ones first
    packed = qblocks[..., 4:]
    levels = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8)
    return IntegerWeight(_columns(levels), _halves(qblocks, 0), _halves(qblocks, 2), limit)


def _columns(levels: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """[N, G, 32] -> [G, 32, N]."""
    return np.ascontiguousarray(levels.transpose(1, 2, 0))


def _halves(qblocks: npt.NDArray[np.uint8], at: int) -> F32:
    """The half at byte `at` of every qblock: uint8 [N, G, bytes] -> float32 [G, N]."""
    halves = np.ascontiguousarray(qblocks[..., at : at + 2]).view("<f2")[..., 0]
    return np.ascontiguousarray(halves.T).astype(np.float32)
