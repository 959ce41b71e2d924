"""Products with weights: one chain of fused multiply-adds per output, groups of k ascending."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from potok.backends.reference.arithmetic import fma
from potok.model.precision import Activation, activation_of, chain_group
from potok.sampling.rows import F32, F64
from potok.weights.formats import dequantize, parts
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
    """w = level * scale + minimum. levels: int8 [G, E, N], groups of E = 16 or 32; scales, minimums: float32 [G, N],
    minimums may be missing. limit: one of LIMITS.
    """

    levels: npt.NDArray[np.int8]
    scales: F32
    minimums: F32 | None
    limit: int

    def product(self, x: F32) -> F32:
        q, d = quantize(x, self.limit)
        per_scale = GROUP // self.levels.shape[1]  # groups of weights to one of activations: 1 or 2
        q = q.reshape(len(x), *self.levels.shape[:2])
        total = np.zeros((len(x), self.levels.shape[2]), np.float32)
        for g, levels in enumerate(self.levels):
            # Whole numbers far below 2^53: float64 adds them exactly, in whatever order the library chooses.
            dots = (q[:, g] @ levels.astype(np.float64)).astype(np.float32)
            d_a = d[:, g // per_scale, None]
            if self.minimums is not None:
                total = fma(self.minimums[g], d_a * q[:, g].sum(axis=-1, keepdims=True).astype(np.float32), total)
            total = fma(self.scales[g] * d_a, dots, total)
        return total


def quantize(x: F32, limit: int) -> tuple[F64, F32]:
    """[R, K] -> whole numbers q float64 [R, G, 32] and scales d [R, G]."""
    groups = x.reshape(len(x), x.shape[1] // GROUP, GROUP)
    amax = np.abs(groups).max(axis=-1)
    bound = np.float32(limit)
    inverse = np.divide(bound, amax, out=np.zeros_like(amax), where=amax > 0)
    q = np.rint(groups * inverse[..., None]).astype(np.float64)
    return q, amax / bound


def load_weight(tensor: Tensor, activation_bits: int) -> Weight:
    """The tensor in the form whose product is its definition; activation_bits as in potok.model.precision."""
    name = tensor.type.name
    activation = activation_of(tensor.name, name, activation_bits)
    if activation is Activation.F32:
        return FloatWeight(np.ascontiguousarray(dequantize(tensor.type, tensor.data).T))
    levels, scales, minimums = parts(tensor.type, tensor.data)
    group = chain_group(name)
    scales = np.repeat(scales, levels.shape[2] // group, axis=1)
    levels = levels.reshape(len(levels), -1, group)
    return IntegerWeight(
        np.ascontiguousarray(levels.transpose(1, 2, 0)),
        np.ascontiguousarray(scales.T),
        None if minimums is None else np.ascontiguousarray(minimums.T),
        LIMITS[activation],
    )
