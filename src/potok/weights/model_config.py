"""From a file's metadata and tensor shapes to a ModelConfig whose plan the file can really fill.

Everything is refused by name here, before any weight is touched: unknown architectures, variants that potok would
compute wrongly, missing or misshapen tensors, formats without values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from potok.errors import LoadError
from potok.model.config import ModelConfig
from potok.model.families import FAMILIES
from potok.model.plan import Node, Op, Plan
from potok.weights import codebooks
from potok.weights.formats import supported_formats
from potok.weights.gguf import GGUFFile, Tensor

ROPE_FACTORS = "rope_freqs.weight"

#: Keys `{arch}.*` that change what a model computes, with the value that means "not used".
_VARIANTS: dict[str, Any] = {
    "expert_count": 0,
    "attention.logit_softcapping": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.scale": 0,
    "attention.causal": True,
    "logit_scale": 0,
    "residual_scale": 0,
    "embedding_scale": 0,
    "use_parallel_residual": False,
    "rope.scaling.attn_factor": 1,
}


class _Keys:
    """Checked access to the keys of one architecture. `subject` begins every sentence of an error."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._metadata = file.metadata
        self._prefix = architecture + "."
        self._subject = file.path.name

    def fail(self, key: str, problem: str) -> LoadError:
        return LoadError(f"{self._subject}: key {self._prefix + key!r} {problem}.")

    def get(self, key: str) -> Any:
        return self._metadata.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            value = value.flat[0].item()  # one number per layer, all the same
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing")
        if isinstance(value, np.ndarray):
            raise self.fail(key, "differs between layers, which is not supported")
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"must be an integer from {low} to {high}, not {value!r:.40}")
        return value

    def number(self, key: str, default: float | None = None, or_zero: bool = False) -> float:
        """A positive number, or 0 where or_zero allows it."""
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing")
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not ok or not (value > 0 or (or_zero and value == 0)):
            raise self.fail(key, f"must be a positive number, not {value!r:.40}")
        return float(value)


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's numbers, once everything that its plan needs is known to be there."""
    parts = file.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        raise LoadError(f"{file.path.name}: the model is split over several files; join them with llama-gguf-split.")
    architecture = file.metadata.get("general.architecture")
    if architecture is None:
        raise LoadError(f"{file.path.name}: key 'general.architecture' is missing.")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        served = " and ".join(sorted(FAMILIES))
        raise LoadError(f"{file.path.name}: architecture {architecture!r:.40} is not supported: potok serves {served}.")
    config = _config(file, architecture)
    _check_tensors(file, config, FAMILIES[architecture](config))
    return config


def _config(file: GGUFFile, architecture: str) -> ModelConfig:
    keys = _Keys(file, architecture)
    for key, unused in _VARIANTS.items():
        value = keys.get(key)
        if value is not None and not np.array_equal(value, unused):
            raise keys.fail(key, f"is {value!r:.40}: models with it are not supported")
    embedding = _tensor(file, "token_embd.weight")
    num_heads = keys.integer("attention.head_count", high=2**16)
    num_kv_heads = keys.integer("attention.head_count_kv", num_heads, high=num_heads)
    if num_heads % num_kv_heads:
        raise keys.fail("attention.head_count_kv", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    dim = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", dim // num_heads or 1, high=2**16)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.fail("attention.value_length", f"differs from the key length {head_dim}, which is not supported")
    rope_dim = keys.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    if rope_dim % 2:
        raise keys.fail("rope.dimension_count", f"must be even, not {rope_dim}")
    context_length = keys.integer("context_length")
    window = keys.integer("attention.sliding_window", 0, low=0)
    if 0 < window < context_length:
        raise keys.fail("attention.sliding_window", f"is {window}: models with a sliding window are not supported")
    return ModelConfig(
        architecture=architecture,
        # Every layer has tensors of its own, so this bounds the plan by the file's size.
        num_layers=keys.integer("block_count", high=len(file.tensors)),
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_dim=keys.integer("feed_forward_length"),
        vocab_size=_vocab_size(file, embedding),
        context_length=context_length,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rope_dim=rope_dim,
        tied_embeddings="output.weight" not in file.tensors,
        rope_factors=ROPE_FACTORS in file.tensors,
        rope_scale=_rope_scale(keys),
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
    )


def _rope_scale(keys: _Keys) -> float:
    """Divisor of positions; a factor of 0 is written for "no scaling"."""
    kind = keys.get("rope.scaling.type")
    if kind is not None and not (isinstance(kind, str) and kind in ("none", "linear")):
        raise keys.fail("rope.scaling.type", f"is {kind!r:.40}: only linear scaling is supported")
    if kind == "none":
        return 1.0
    older = keys.number("rope.scale_linear", 0.0, or_zero=True)
    return keys.number("rope.scaling.factor", older, or_zero=True) or 1.0


def _vocab_size(file: GGUFFile, embedding: Tensor) -> int:
    rows = embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise LoadError(
            f"{file.path.name}: key 'tokenizer.ggml.tokens' has {len(tokens)} tokens "
            f"but tensor 'token_embd.weight' has {rows} rows."
        )
    return rows


def _tensor(file: GGUFFile, name: str) -> Tensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise LoadError(f"{file.path.name}: tensor {name!r} is missing.")
    return tensor


def _weight_rows(node: Node, cols: int, config: ModelConfig) -> list[int]:
    """Output columns of each weight of a LINEAR: q, k and v differ, gate and up share alike."""
    if len(node.weights) == 3:
        kv = config.num_kv_heads * config.head_dim
        return [config.num_heads * config.head_dim, kv, kv]
    return [cols // len(node.weights)] * len(node.weights)


def _needed(config: ModelConfig, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the plan reads."""
    needed: dict[str, tuple[int, ...]] = {}
    for node in plan.nodes:
        cols = plan.values[node.output].cols
        if node.op is Op.EMBED:
            needed[node.weights[0]] = (config.vocab_size, cols)
        elif node.op is Op.RMS_NORM:
            needed[node.weights[0]] = (cols,)
        elif node.op is Op.LINEAR:
            k = plan.values[node.inputs[0]].cols
            rows = _weight_rows(node, cols, config)
            needed |= {name: (n, k) for name, n in zip(node.weights, rows, strict=True)}
            needed |= {name: (n,) for name, n in zip(node.biases, rows, strict=bool(node.biases)) if name}
    if config.rope_factors:
        needed[ROPE_FACTORS] = (config.rope_dim // 2,)
    return needed


def _check_tensors(file: GGUFFile, config: ModelConfig, plan: Plan) -> None:
    needed = _needed(config, plan)
    for name, shape in needed.items():
        tensor = _tensor(file, name)
        if tensor.shape != shape:
            raise LoadError(
                f"{file.path.name}: tensor {name!r} has shape {list(tensor.shape)}, but the model needs {list(shape)}."
            )
        if not tensor.type.has_values:
            raise LoadError(
                f"{file.path.name}: tensor {name!r} is stored as {tensor.type.name}, which is not supported: "
                f"use one of {supported_formats()}."
            )
        if tensor.type.has_codebook and not codebooks.installed():
            raise LoadError(
                f"{file.path.name}: tensor {name!r} is stored as {tensor.type.name}, whose codebook comes with another "
                f"package: {codebooks.INSTALL}"
            )
    # A tensor that nothing reads means a variant of the architecture whose answers would be silently wrong.
    unread = [name for name in file.tensors if name not in needed]
    if unread:
        raise LoadError(
            f"{file.path.name}: tensor {unread[0]!r} has no place in the {config.architecture} architecture, "
            "so this variant is not supported."
        )
