"""Synthetic models: the same bytes for the same seed, sane numbers, llama-quantize's mix, a working vocabulary."""

from pathlib import Path

import numpy as np
import pytest
from make_model import SHAPES, make_model, tokenizer_metadata
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from potok.weights.formats import FORMATS, dequantize
from potok.weights.gguf import GGUFFile

WITH_VALUES = [format.name for format in FORMATS.values() if format.has_values]


def test_seeds(tmp_path: Path) -> None:
    first = make_model(tmp_path / "a.gguf", "tiny-llama", seed=1).read_bytes()
    assert make_model(tmp_path / "b.gguf", "tiny-llama", seed=1).read_bytes() == first
    assert make_model(tmp_path / "c.gguf", "tiny-llama", seed=2).read_bytes() != first


@pytest.mark.parametrize("format", WITH_VALUES)
def test_weights_have_the_spread_of_an_initialisation(tmp_path: Path, format: str) -> None:
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama-256", format))
    tensor = file.tensors["blk.1.ffn_up.weight"]
    assert tensor.type.name == format
    values = dequantize(tensor.type, tensor.data)
    assert values.std() == pytest.approx(1 / np.sqrt(256), rel=0.15)
    assert abs(values.mean()) < 0.15 * values.std()


def test_mixed_formats_of_small_rows_fall_back_as_llama_quantize_does(tmp_path: Path) -> None:
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-qwen2", "Q4_K_M"))
    used = {name: t.type.name for name, t in file.tensors.items()}
    assert used["token_embd.weight"] == "Q8_0"
    assert used["blk.0.attn_q.weight"] == used["blk.0.ffn_up.weight"] == used["blk.0.ffn_down.weight"] == "Q5_0"
    assert used["blk.1.attn_v.weight"] == used["blk.1.ffn_down.weight"] == "Q8_0"
    assert used["blk.0.attn_q.bias"] == used["blk.0.attn_norm.weight"] == "F32"


def test_tiny_models_are_small(tmp_path: Path) -> None:
    for shape in ("tiny-llama", "tiny-llama-64", "tiny-qwen2"):
        assert make_model(tmp_path / f"{shape}.gguf", shape).stat().st_size < 300_000


@pytest.mark.parametrize(
    ("pre", "vocab", "eos"),
    [
        ("smollm", SHAPES["tiny-llama"].vocab, 2),
        ("qwen2", SHAPES["tiny-qwen2"].vocab, 500),
        ("qwen2", SHAPES["qwen2.5-0.5b"].vocab, 151645),
        ("llama-bpe", SHAPES["llama-3.2-1b"].vocab, 128009),
    ],
)
def test_vocabulary(pre: str, vocab: int, eos: int) -> None:
    metadata = tokenizer_metadata(pre, vocab)
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert len(tokens) == len(set(tokens)) == len(metadata["tokenizer.ggml.token_type"]) == vocab
    assert metadata["tokenizer.ggml.eos_token_id"] == eos
    ids = {token: id for id, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab=ids, merges=[tuple(merge.split(" ")) for merge in merges]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert bpe.encode("and the").tokens[-1] == "Ġthe"
    bpe.decoder = decoders.ByteLevel()
    anything = "".join(map(chr, range(0x250))) + "€ and the water 𐍈"
    assert bpe.decode(bpe.encode(anything).ids) == anything
    reachable = {left + right for left, right in (merge.split(" ") for merge in merges)}
    normal = {t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 1}
    assert len(normal - reachable) == 256  # the bytes
