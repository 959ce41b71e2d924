"""The plan in numpy: the readable definition of what a step computes. Correct before anything, and slow.

Nothing here depends on how many rows a step has: every operation is elementwise over rows, or a chain that is written
out, or a sum of whole numbers. So rows may stand side by side in one array and still be computed alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from potok.backends.api import BackendInfo, Sampled, SampleRows, StepInputs
from potok.backends.reference.arithmetic import LANES, fma, sum_tree
from potok.backends.reference.attention import Stored, attend, rope_table, rotate, store
from potok.backends.reference.linear import FloatWeight, Weight, load_weight
from potok.model.config import ModelConfig
from potok.model.families import FAMILIES
from potok.model.plan import Node, Op, Plan
from potok.model.precision import kv_bytes_per_token
from potok.sampling.math import exp_f32
from potok.sampling.reference import sample_rows
from potok.sampling.rows import F32, I32
from potok.weights.formats import dequantize
from potok.weights.gguf import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"


class ReferenceBackend:
    """activation_bits: 8 or 16 (docs/numerics.md, item 1). allocate() comes before the first step."""

    def __init__(
        self, file: GGUFFile, config: ModelConfig, *, activation_bits: int, block_size: int, kv_dtype: str = "f16"
    ) -> None:
        self._config = config
        self._kv_dtype = kv_dtype
        self._plan: Plan = FAMILIES[config.architecture](config)
        self._tensors = file.tensors
        self._vectors: dict[str, F32] = {}
        self._weights: dict[str, Weight] = {}
        for node in self._plan.nodes:
            for name in (*node.biases, *(node.weights if node.op is Op.RMS_NORM else ())):
                if name:
                    self._vectors[name] = dequantize(file.tensors[name].type, file.tensors[name].data)
            if node.op is Op.LINEAR:
                for name in node.weights:
                    self._weights[name] = load_weight(file.tensors[name], activation_bits)
        self._keys = self._values = Stored(np.empty(0, np.float32), np.empty(0, np.float32))
        self._cos: F32 = np.empty((0, 0), np.float32)
        self._sin: F32 = self._cos
        self.info = BackendInfo(
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            block_size=block_size,
            num_blocks=0,
            kv_bytes_per_token=kv_bytes_per_token(config, kv_dtype),
            threads=1,
            isa="numpy",
            notes=self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        expanded = {
            name: weight.values.nbytes
            for name, weight in self._weights.items()
            if isinstance(weight, FloatWeight) and self._tensors[name].type.name not in ("F32", "F16")
        }
        if not expanded:
            return ()
        formats = sorted({self._tensors[name].type.name for name in expanded})
        size = sum(expanded.values()) / 1e6
        return (f"{len(expanded)} tensors in {', '.join(formats)} are expanded to float32: {size:.0f} MB",)

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """KV memory, and rotations for positions [0, max_model_len). What nobody wrote is NaN, so reading it shows."""
        c = self._config
        shape = (c.num_layers, num_blocks, self.info.block_size, c.num_kv_heads, c.head_dim)
        self._keys, self._values = (
            Stored(np.full(shape, np.nan, np.float32), np.full(shape[:-1], np.nan, np.float32)) for _ in range(2)
        )
        factors = np.ones(c.rope_dim // 2)
        if c.rope_factors:
            tensor = self._tensors[ROPE_FACTORS]
            factors = dequantize(tensor.type, tensor.data).astype(np.float64)
        self._cos, self._sin = rope_table(c, factors, max_model_len)
        self.info = replace(self.info, num_blocks=num_blocks)

    def step(self, inputs: StepInputs, rows: SampleRows) -> Sampled:
        return sample_rows(self.logits(inputs), rows)

    def logits(self, inputs: StepInputs) -> F32:
        """Writes the step's KV and gives the logits of the sampled rows, [S, vocab]."""
        for source, target in inputs.copies:
            for part in (*self._keys, *self._values):
                part[:, target] = part[:, source]
        blocks = blocks_of_rows(inputs, self.info.block_size)
        values: dict[int, F32] = {}
        # Not-finite activations become not-finite logits of their own rows, which the sampler reports.
        with np.errstate(invalid="ignore", over="ignore"):
            for node in self._plan.nodes:
                values[node.output] = self._compute(node, [values[i] for i in node.inputs], inputs, blocks)
        return values[self._plan.nodes[-1].output]

    def _compute(self, node: Node, args: list[F32], inputs: StepInputs, blocks: I32) -> F32:
        match node.op:
            case Op.EMBED:
                tensor = self._tensors[node.weights[0]]
                return dequantize(tensor.type, tensor.data[inputs.tokens])
            case Op.RMS_NORM:
                return rms_norm(args[0], self._vectors[node.weights[0]], np.float32(self._config.norm_eps))
            case Op.LINEAR:
                return self._linear(node, *args)
            case Op.ROPE_KV:
                return self._rope_kv(args[0], node.layer, inputs.positions, blocks)
            case Op.ATTENTION:
                return self._attention(args[0], node.layer, inputs)
            case Op.SWIGLU:
                return swiglu(*np.split(args[0], 2, axis=1))
            case Op.GATHER:
                return args[0][inputs.out_rows]

    def _linear(self, node: Node, x: F32, residual: F32 | None = None) -> F32:
        outputs = []
        for i, name in enumerate(node.weights):
            y = self._weights[name].product(x)
            if node.biases and node.biases[i]:
                y = y + self._vectors[node.biases[i]]
            outputs.append(y)
        out = np.concatenate(outputs, axis=1)
        return out if residual is None else out + residual

    def _rope_kv(self, qkv: F32, layer: int, positions: I32, blocks: I32) -> F32:
        """Writes rotated keys, and values, as they are stored; gives the rotated and scaled queries [T, H * D]."""
        c = self._config
        heads = qkv.reshape(len(qkv), -1, c.head_dim)
        q, k, v = np.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        cos, sin = self._cos[positions], self._sin[positions]
        slots = positions % self.info.block_size
        for memory, x in ((self._keys, rotate(k, cos, sin, self._plan.rope)), (self._values, v)):
            for part, new in zip(memory, store(x, self._kv_dtype), strict=True):
                part[layer, blocks, slots] = new
        scale = np.float32(1) / np.sqrt(np.float32(c.head_dim))
        scaled: F32 = rotate(q, cos, sin, self._plan.rope) * scale
        return scaled.reshape(len(qkv), -1)

    def _attention(self, q: F32, layer: int, inputs: StepInputs) -> F32:
        c = self._config
        out = np.empty_like(q)
        for b in range(len(inputs.q_indptr) - 1):
            table = inputs.kv_blocks[inputs.kv_indptr[b] : inputs.kv_indptr[b + 1]]
            keys, values = (
                Stored(
                    x.levels[layer, table].reshape(-1, c.num_kv_heads, c.head_dim),
                    x.scales[layer, table].reshape(-1, c.num_kv_heads),
                )
                for x in (self._keys, self._values)
            )
            rows = slice(inputs.q_indptr[b], inputs.q_indptr[b + 1])
            heads = q[rows].reshape(-1, c.num_heads, c.head_dim)
            out[rows] = attend(heads, inputs.positions[rows], keys, values).reshape(len(heads), -1)
        return out


def blocks_of_rows(inputs: StepInputs, block_size: int) -> I32:
    """[T]: the KV block that each row writes."""
    segments = np.repeat(np.arange(len(inputs.q_indptr) - 1), np.diff(inputs.q_indptr))
    blocks: I32 = inputs.kv_blocks[inputs.kv_indptr[segments] + inputs.positions // block_size]
    return blocks


def rms_norm(x: F32, weight: F32, eps: np.float32) -> F32:
    """[R, K], [K] -> [R, K]. The sum of squares has 16 running sums; missing elements of the last 16 are 0."""
    lanes = np.zeros((len(x), LANES), np.float32)
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))
    for k in range(0, padded.shape[1], LANES):
        v = padded[:, k : k + LANES]
        lanes = fma(v, v, lanes)
    mean = sum_tree(lanes) / np.float32(x.shape[1])
    out: F32 = x * (np.float32(1) / np.sqrt(mean + eps))[:, None] * weight
    return out


def swiglu(gate: F32, up: F32) -> F32:
    """silu(gate) * up. silu(g) = g / (1 + exp(-g)), written with exp(-|g|) so that it never overflows."""
    e = exp_f32(-np.abs(gate))
    out: F32 = gate * (np.where(gate < 0, e, np.float32(1)) / (np.float32(1) + e)) * up
    return out
