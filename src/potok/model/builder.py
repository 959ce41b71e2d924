"""Records a plan: each method is one operation of the vocabulary in plan.Op."""

from __future__ import annotations

from collections.abc import Sequence

from potok.model.config import ModelConfig
from potok.model.plan import Node, Op, Plan, RopeKind, Rows, Value


class Builder:
    def __init__(self, config: ModelConfig, rope: RopeKind) -> None:
        self.config = config
        self._rope = rope
        self._nodes: list[Node] = []
        self._values: list[Value] = []

    def _record(
        self,
        op: Op,
        inputs: Sequence[Value],
        rows: Rows,
        cols: int,
        weights: Sequence[str] = (),
        biases: Sequence[str] = (),
        layer: int = -1,
    ) -> Value:
        value = Value(len(self._values), rows, cols)
        self._values.append(value)
        ids = tuple(v.id for v in inputs)
        self._nodes.append(Node(op, ids, value.id, tuple(weights), tuple(biases), layer))
        return value

    def embed(self, weight: str) -> Value:
        return self._record(Op.EMBED, (), Rows.T, self.config.dim, (weight,))

    def rms_norm(self, x: Value, weight: str) -> Value:
        return self._record(Op.RMS_NORM, (x,), x.rows, x.cols, (weight,))

    def linear(
        self,
        x: Value,
        weights: Sequence[str],
        cols: int,
        biases: Sequence[str] = (),
        residual: Value | None = None,
    ) -> Value:
        """Products with several weights [n_i, x.cols], side by side: [rows, sum(n_i) = cols]."""
        inputs = (x,) if residual is None else (x, residual)
        return self._record(Op.LINEAR, inputs, x.rows, cols, weights, biases)

    def rope_kv(self, qkv: Value, layer: int) -> Value:
        c = self.config
        return self._record(Op.ROPE_KV, (qkv,), Rows.T, c.num_heads * c.head_dim, layer=layer)

    def attention(self, q: Value, layer: int) -> Value:
        return self._record(Op.ATTENTION, (q,), Rows.T, q.cols, layer=layer)

    def swiglu(self, gate_up: Value) -> Value:
        return self._record(Op.SWIGLU, (gate_up,), gate_up.rows, gate_up.cols // 2)

    def gather(self, x: Value) -> Value:
        return self._record(Op.GATHER, (x,), Rows.S, x.cols)

    def plan(self) -> Plan:
        return Plan(tuple(self._nodes), tuple(self._values), self._rope)
