"""The tiny models are worth testing with, and the two ways to turn a head are the same up to the order of rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from float64_plan import logits_float64
from make_model import SHAPES, make_model

from potok.weights.formats import dequantize
from potok.weights.gguf import GGUFFile, Tensor
from potok.weights.model_config import read_config


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("tiny")])
def test_tokens_depend_on_their_past_and_do_not_repeat(tmp_path: Path, shape: str) -> None:
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", shape))
    config = read_config(file)
    ids = np.random.default_rng(5).integers(0, config.vocab_size, 64).tolist()
    other = [(ids[0] + 1) % config.vocab_size, *ids[1:]]
    rows = list(range(64))
    logits, changed = logits_float64(file, config, ids, rows), logits_float64(file, config, other, rows)
    assert np.isfinite(logits).all()
    assert 1 < logits.std() < 5
    assert np.sqrt(np.mean((logits[-1] - changed[-1]) ** 2)) > 0.1  # 63 tokens later
    best = logits.argmax(axis=1)
    assert np.mean(best == ids) < 0.1
    assert len(set(best.tolist())) > 30


def halves_together(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from (0, 1), (2, 3), ... to all first elements, then all second ones."""
    n, row_bytes = tensor.data.shape
    data = tensor.data.reshape(num_heads, n // num_heads // 2, 2, row_bytes).swapaxes(1, 2).reshape(n, row_bytes)
    return replace(tensor, data=data)


def test_halves_and_neighbours_turn_alike(tmp_path: Path) -> None:
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama"))
    config = read_config(file)
    tensors = dict(file.tensors)
    for i in range(config.num_layers):
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            weight = f"blk.{i}.attn_{name}.weight"
            tensors[weight] = halves_together(tensors[weight], heads)
    ids = list(range(40, 60))
    neighbours = logits_float64(file, config, ids, [0, 7, 19])
    halves = logits_float64(replace(file, tensors=tensors), replace(config, architecture="qwen2"), ids, [0, 7, 19])
    np.testing.assert_allclose(halves, neighbours, rtol=0, atol=1e-10)


def test_rope_factors_slow_the_rotation_down(tmp_path: Path) -> None:
    """With factors of f everywhere, position f * p turns as position p does without them: linear scaling by f."""
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama-64"))
    config = read_config(file)
    factors = file.tensors["rope_freqs.weight"]
    eights = np.full(factors.shape, 8, "<f4").view(np.uint8)
    assert dequantize(factors.type, factors.data).max() == 32
    divided = replace(file, tensors={**file.tensors, factors.name: replace(factors, data=eights)})
    scaled = replace(config, rope_factors=False, rope_scale=8.0)
    ids = list(range(40, 60))
    np.testing.assert_allclose(
        logits_float64(divided, config, ids, [19]), logits_float64(file, scaled, ids, [19]), rtol=0, atol=1e-10
    )
