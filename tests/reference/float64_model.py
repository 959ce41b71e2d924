"""The meaning of a model: dequantised weights in float64, one sequence at once, written without the plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from potok.model.config import ModelConfig
from potok.weights.formats import dequantize
from potok.weights.gguf import GGUFFile

F64 = npt.NDArray[np.float64]


def logits(file: GGUFFile, config: ModelConfig, tokens: Sequence[int]) -> F64:
    """[len(tokens), vocab]."""
    c, n = config, len(tokens)

    def w(name: str) -> F64:
        tensor = file.tensors[name]
        return dequantize(tensor.type, tensor.data).astype(np.float64)

    def norm(x: F64, name: str) -> F64:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * w(name)

    def rope(x: F64) -> F64:
        half = c.rope_dim // 2
        frequency = c.rope_theta ** (-np.arange(half) / half)
        if c.rope_factors:
            frequency = frequency / w("rope_freqs.weight")
        turn = np.exp(1j * np.arange(n)[:, None] / c.rope_scale * frequency)[:, None]
        if c.architecture == "llama":
            pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
            return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)
        pairs = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    x = w("token_embd.weight")[np.array(tokens)]
    mask = np.triu(np.full((n, n), -np.inf), 1)
    for i in range(c.num_layers):
        p = f"blk.{i}."
        h = norm(x, p + "attn_norm.weight")
        q, k, v = (
            (h @ w(f"{p}attn_{name}.weight").T + (w(f"{p}attn_{name}.bias") if c.qkv_bias else 0)).reshape(
                n, -1, c.head_dim
            )
            for name in "qkv"
        )
        group = c.num_heads // c.num_kv_heads
        k, v = np.repeat(rope(k), group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", rope(q), k) / np.sqrt(c.head_dim) + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        a = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        x = x + a.reshape(n, -1) @ w(p + "attn_output.weight").T
        h = norm(x, p + "ffn_norm.weight")
        gate = h @ w(p + "ffn_gate.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w(p + "ffn_up.weight").T)) @ w(p + "ffn_down.weight").T
    return norm(x, "output_norm.weight") @ w("token_embd.weight" if c.tied_embeddings else "output.weight").T
