"""A plan in float64 over dequantised weights, as textbooks write it: the meaning of a model.

One whole sequence at a time, nothing rounded to less. Independent of the backends and of transformers.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from potok.model.config import ModelConfig
from potok.model.families import FAMILIES
from potok.model.plan import Node, Op, RopeKind
from potok.weights.formats import dequantize
from potok.weights.gguf import GGUFFile

F64 = npt.NDArray[np.float64]


def logits_float64(file: GGUFFile, config: ModelConfig, ids: list[int], rows: list[int]) -> F64:
    """The logits [len(rows), vocab] of the positions `rows` of the sequence `ids`."""
    plan = FAMILIES[config.architecture](config)

    @cache
    def weight(name: str) -> F64:
        return dequantize(file.tensors[name].type, file.tensors[name].data).astype(np.float64)

    rotation = _rotation(config, len(ids), weight("rope_freqs.weight") if config.rope_factors else 1.0, plan.rope)
    values: dict[int, Any] = {}
    for node in plan.nodes:
        args = [values[i] for i in node.inputs]
        match node.op:
            case Op.EMBED:
                out: Any = weight(node.weights[0])[ids]
            case Op.RMS_NORM:
                mean = (args[0] ** 2).mean(axis=1, keepdims=True)
                out = args[0] / np.sqrt(mean + config.norm_eps) * weight(node.weights[0])
            case Op.LINEAR:
                out = _linear(node, args, weight)
            case Op.ROPE_KV:
                out = _heads(args[0], config, rotation)
            case Op.ATTENTION:
                out = _attention(args[0], config)
            case Op.SWIGLU:
                gate, up = np.split(args[0], 2, axis=1)
                out = gate / (1 + np.exp(-gate)) * up
            case Op.GATHER:
                out = args[0][rows]
        values[node.output] = out
    return values[plan.nodes[-1].output]


def _linear(node: Node, args: list[F64], weight: Any) -> F64:
    parts = [args[0] @ weight(name).T for name in node.weights]
    parts = [part + weight(bias) for part, bias in zip(parts, node.biases, strict=True)] if node.biases else parts
    return np.concatenate(parts, axis=1) + (args[1] if len(args) == 2 else 0.0)


def _rotation(config: ModelConfig, length: int, factors: Any, kind: RopeKind) -> Any:
    """A function that turns [length, heads, head_dim] by the positions 0, 1, 2, ..."""
    half = config.rope_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half) / half) / factors
    turn = np.exp(1j * np.arange(length)[:, None] / config.rope_scale * frequencies)[:, None, :]
    if kind is RopeKind.HALVES:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)

    def rotate(x: F64) -> F64:
        turned = (x[..., first] + 1j * x[..., second]) * turn
        out = x.copy()
        out[..., first], out[..., second] = turned.real, turned.imag
        return out

    return rotate


def _heads(qkv: F64, c: ModelConfig, rotate: Any) -> SimpleNamespace:
    q, k, v = np.split(qkv.reshape(len(qkv), -1, c.head_dim), [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
    return SimpleNamespace(q=rotate(q), k=rotate(k), v=v)


def _attention(x: SimpleNamespace, c: ModelConfig) -> F64:
    group = c.num_heads // c.num_kv_heads
    k, v = np.repeat(x.k, group, axis=1), np.repeat(x.v, group, axis=1)
    scores = np.einsum("ihd,jhd->hij", x.q, k) / np.sqrt(c.head_dim)
    scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights, v).reshape(len(v), -1)
