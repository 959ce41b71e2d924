"""The numbers that define one model: read from the file's metadata by weights, consumed by families."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes in elements, positions in tokens. rope_dim: rotated dimensions of each head (<= head_dim, even)."""

    architecture: str
    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_dim: int
    tied_embeddings: bool  # the output projection is token_embd.weight
    rope_factors: bool = False  # the file has rope_freqs.weight: per-frequency divisors (Llama 3 scaling)
    rope_scale: float = 1.0  # linear scaling: positions are divided by it
    qkv_bias: bool = False
