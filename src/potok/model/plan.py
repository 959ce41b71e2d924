"""A model as a flat list of operations, recorded once and replayed by interpreters.

Rows of a value are T (tokens of the step) or S (sampled rows); columns are fixed at record time. No control flow.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Rows(Enum):
    T = "T"
    S = "S"


class Op(IntEnum):
    EMBED = 0  # tokens -> [T, dim]                                    weights: (embedding,)
    RMS_NORM = 1  # x / sqrt(mean(x^2) + eps) * w                       weights: (w,)
    LINEAR = 2  # concatenation over weights of x @ w.T (+ bias) (+ residual)
    ROPE_KV = 3  # qkv -> q rotated; rotated k, and v, are written to the cache
    ATTENTION = 4  # causal, grouped queries, K and V read only from the cache
    SWIGLU = 5  # [gate | up] -> silu(gate) * up
    GATHER = 6  # keeps the rows whose logits are wanted: T -> S


@dataclass(frozen=True, slots=True)
class Value:
    id: int
    rows: Rows
    cols: int


@dataclass(frozen=True, slots=True)
class Node:
    """inputs: value ids; for LINEAR (x,) or (x, residual). weights: tensor names. biases: "" where there is none."""

    op: Op
    inputs: tuple[int, ...]
    output: int
    weights: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    layer: int = -1


class RopeKind(Enum):
    """Which two elements of a head turn together: (2i, 2i+1), or (i, i + rope_dim/2)."""

    INTERLEAVED = "interleaved"
    HALVES = "halves"


@dataclass(frozen=True, slots=True)
class Plan:
    """The last node's output is the logits [S, vocab]."""

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    rope: RopeKind

    def dump(self) -> str:
        """One line per node, for goldens and for reading."""
        lines = []
        for n in self.nodes:
            out = self.values[n.output]
            args = ", ".join([f"%{i}" for i in n.inputs] + list(n.weights) + [b for b in n.biases if b])
            layer = f" layer={n.layer}" if n.layer >= 0 else ""
            lines.append(f"%{out.id}: [{out.rows.value}, {out.cols}] = {n.op.name.lower()}({args}){layer}")
        return "\n".join(lines) + "\n"
