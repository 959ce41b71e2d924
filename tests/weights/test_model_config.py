"""What read_config takes from a file, and that everything it cannot serve is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_model import SHAPES, llama3_rope_factors, make_model

from potok.errors import LoadError
from potok.model.config import ModelConfig
from potok.weights import codebooks
from potok.weights.default_model import find_default_model
from potok.weights.formats import FORMATS, dequantize
from potok.weights.gguf import GGUFFile, Tensor
from potok.weights.model_config import read_config

REMOVED = object()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFFile]:
    folder = tmp_path_factory.mktemp("models")
    return {
        shape: GGUFFile.open(make_model(folder / f"{shape}.gguf", shape))
        for shape in SHAPES
        if shape.startswith("tiny")
    }


def with_keys(file: GGUFFile, **keys: Any) -> GGUFFile:
    """The file with other values of some keys; two underscores in a name stand for a dot."""
    metadata = dict(file.metadata)
    for name, value in keys.items():
        metadata[name.replace("__", ".")] = value
    return replace(file, metadata={name: value for name, value in metadata.items() if value is not REMOVED})


def with_tensor(file: GGUFFile, name: str, **changes: Any) -> GGUFFile:
    return replace(file, tensors={**file.tensors, name: replace(file.tensors[name], **changes)})


def test_default_model() -> None:
    assert read_config(GGUFFile.open(find_default_model())) == ModelConfig(
        architecture="llama",
        num_layers=30,
        dim=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn_dim=1536,
        vocab_size=49152,
        context_length=8192,
        norm_eps=float(np.float32(1e-5)),
        rope_theta=100000.0,
        rope_dim=64,
        tied_embeddings=True,
    )


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("tiny")])
def test_synthetic_models_are_read_as_they_were_asked_for(files: dict[str, GGUFFile], shape: str) -> None:
    s, c = SHAPES[shape], read_config(files[shape])
    assert (c.num_layers, c.dim, c.num_heads, c.num_kv_heads) == (s.layers, s.dim, s.heads, s.kv_heads)
    assert (c.head_dim, c.rope_dim, c.ffn_dim, c.vocab_size) == (s.head_dim, s.head_dim, s.ffn, s.vocab)
    assert (c.context_length, c.rope_theta, c.tied_embeddings) == (s.context, s.rope_theta, s.tied)
    assert (c.rope_factors, c.qkv_bias) == (s.rope_factors, s.architecture == "qwen2")


def test_defaults_where_keys_are_absent(files: dict[str, GGUFFile]) -> None:
    absent = ["attention__key_length", "attention__value_length", "rope__dimension_count", "rope__freq_base"]
    c = read_config(with_keys(files["tiny-llama"], **{f"llama__{name}": REMOVED for name in absent}))
    assert (c.head_dim, c.rope_dim, c.rope_theta, c.rope_scale) == (128 // 4, 128 // 4, 10000.0, 1.0)


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({"llama__rope__scaling__factor": 4.0}, 4.0),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0}, 2.0),
        ({"llama__rope__scale_linear": 8.0}, 8.0),
        ({"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 2.0}, 1.0),
        ({"llama__rope__scaling__factor": 0.0}, 1.0),
    ],
)
def test_linear_rope_scaling(files: dict[str, GGUFFile], keys: dict[str, Any], scale: float) -> None:
    assert read_config(with_keys(files["tiny-llama"], **keys)).rope_scale == scale


def test_one_number_per_layer_is_one_number_when_all_agree(files: dict[str, GGUFFile]) -> None:
    same = np.array([2, 2], np.uint32)
    assert read_config(with_keys(files["tiny-llama"], llama__attention__head_count_kv=same)).num_kv_heads == 2


def test_a_window_that_the_context_never_leaves_changes_nothing(files: dict[str, GGUFFile]) -> None:
    read_config(with_keys(files["tiny-llama"], llama__attention__sliding_window=2048))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba' is not supported: potok serves llama and qwen2."),
        ({"general__architecture": REMOVED}, "key 'general.architecture' is missing"),
        ({"general__architecture": np.zeros(2)}, "architecture array"),
        ({"split__count": 3}, "split over several files"),
        ({"llama__expert_count": 8}, "key 'llama.expert_count' is 8: models with it are not supported"),
        ({"llama__attention__sliding_window": 512}, "key 'llama.attention.sliding_window' is 512"),
        ({"llama__rope__scaling__type": "yarn"}, "key 'llama.rope.scaling.type' is 'yarn': only linear"),
        ({"llama__rope__scaling__type": np.zeros(2)}, "key 'llama.rope.scaling.type' is array"),
        ({"llama__rope__scaling__factor": -1.0}, "key 'llama.rope.scaling.factor' must be a positive number, not -1.0"),
        ({"llama__rope__scaling__attn_factor": 1.2}, "key 'llama.rope.scaling.attn_factor' is 1.2"),
        ({"llama__final_logit_softcapping": 30.0}, "key 'llama.final_logit_softcapping' is 30.0"),
        ({"llama__attention__causal": False}, "key 'llama.attention.causal' is False"),
        ({"llama__block_count": REMOVED}, "key 'llama.block_count' is missing"),
        ({"llama__block_count": 0}, "key 'llama.block_count' must be an integer from 1 to"),
        ({"llama__block_count": 2**31}, "key 'llama.block_count' must be an integer from 1 to"),
        ({"llama__block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
        ({"llama__block_count": 1}, "tensor 'blk.1.attn_norm.weight' has no place in the llama architecture"),
        ({"llama__block_count": True}, "key 'llama.block_count' must be an integer"),
        ({"llama__embedding_length": "128"}, "key 'llama.embedding_length' must be an integer"),
        ({"llama__embedding_length": 64}, "tensor 'token_embd.weight' has shape [501, 128], but the model needs"),
        ({"llama__feed_forward_length": np.array([192, 96])}, "feed_forward_length' differs between layers"),
        ({"llama__feed_forward_length": 128}, "tensor 'blk.0.ffn_gate.weight' has shape [192, 128], but"),
        ({"llama__attention__head_count": 8}, "tensor 'blk.0.attn_q.weight' has shape [128, 128], but"),
        ({"llama__attention__head_count_kv": 3}, "key 'llama.attention.head_count_kv' is 3, which does not divide 4"),
        ({"llama__attention__head_count_kv": 5}, "head_count_kv' must be an integer from 1 to 4, not 5"),
        ({"llama__attention__value_length": 64}, "key 'llama.attention.value_length' differs from the key length 32"),
        ({"llama__rope__dimension_count": 31}, "key 'llama.rope.dimension_count' must be even, not 31"),
        ({"llama__rope__dimension_count": 64}, "dimension_count' must be an integer from 2 to 32, not 64"),
        ({"llama__rope__freq_base": float("nan")}, "key 'llama.rope.freq_base' must be a positive number, not nan"),
        ({"llama__attention__layer_norm_rms_epsilon": REMOVED}, "layer_norm_rms_epsilon' is missing"),
        ({"llama__context_length": REMOVED}, "key 'llama.context_length' is missing"),
        ({"tokenizer__ggml__tokens": ["a"]}, "'tokenizer.ggml.tokens' has 1 tokens but tensor 'token_embd.weight' has"),
    ],
)
def test_refused_keys(files: dict[str, GGUFFile], keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LoadError) as caught:
        read_config(with_keys(files["tiny-llama"], **keys))
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("tiny-llama.gguf: ")


def test_a_missing_tensor_is_named(files: dict[str, GGUFFile]) -> None:
    file = files["tiny-qwen2"]
    for name in file.tensors:
        rest = {n: t for n, t in file.tensors.items() if n != name}
        with pytest.raises(LoadError, match=f"tensor '{name}' is missing"):
            read_config(replace(file, tensors=rest))


def test_a_misshapen_tensor_is_named(files: dict[str, GGUFFile]) -> None:
    file = files["tiny-llama-64"]
    for name, tensor in file.tensors.items():
        if name == "token_embd.weight":
            continue  # its rows are the vocabulary: see the token list above
        with pytest.raises(LoadError, match=f"tensor '{name}' has shape "):
            read_config(with_tensor(file, name, shape=(tensor.shape[0] + 16, *tensor.shape[1:])))


def test_a_format_without_values_is_named(files: dict[str, GGUFFile]) -> None:
    format = next(f for f in FORMATS.values() if f.name == "I16")
    file = with_tensor(files["tiny-llama"], "blk.1.ffn_up.weight", type=format)
    with pytest.raises(LoadError, match=r"tensor 'blk.1.ffn_up.weight' is stored as I16, .* use one of F32"):
        read_config(file)


def test_a_tensor_that_nothing_reads_is_refused(files: dict[str, GGUFFile]) -> None:
    file = files["tiny-llama"]
    extra = replace(file.tensors["output_norm.weight"], name="blk.0.attn_q_norm.weight")
    with pytest.raises(LoadError, match=r"tensor 'blk.0.attn_q_norm.weight' has no place"):
        read_config(replace(file, tensors={**file.tensors, extra.name: extra}))


def test_llama_with_biases_has_biases(files: dict[str, GGUFFile]) -> None:
    """Some llama files carry biases on q, k and v; they are found by their tensors."""
    file, qwen2 = files["tiny-llama"], files["tiny-qwen2"]
    biases: dict[str, Tensor] = {name: t for name, t in qwen2.tensors.items() if name.endswith(".bias")}
    assert read_config(replace(file, tensors={**file.tensors, **biases})).qkv_bias


def test_rope_factors_of_the_synthetic_model_are_those_of_llama_3(files: dict[str, GGUFFile]) -> None:
    tensor = files["tiny-llama-64"].tensors["rope_freqs.weight"]
    values = dequantize(tensor.type, tensor.data)
    np.testing.assert_array_equal(values, np.array(llama3_rope_factors(64, 5e5), np.float32))
    assert values[0] == 1
    assert values[-1] == 32
    assert (np.diff(values) >= 0).all()


def test_a_codebook_that_is_not_installed_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f: GGUFFile.open(make_model(tmp_path / f, "tiny-llama-256", f)) for f in ("IQ3_XXS", "IQ4_XS", "TQ2_0")}
    assert read_config(files["IQ3_XXS"]).num_layers == 2
    monkeypatch.setattr(codebooks, "find_spec", lambda name: None)
    with pytest.raises(
        LoadError, match=r"tensor 'token_embd.weight' is stored as IQ3_XXS, .* pip install 'potok\[iq\]'"
    ):
        read_config(files["IQ3_XXS"])
    for format in ("IQ4_XS", "TQ2_0"):  # have none
        read_config(files[format])


ANY_VALUE = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 300),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.text(max_size=3), max_size=3),
    st.lists(st.integers(0, 300), max_size=3).map(lambda v: np.array(v, np.uint32)),
)


@settings(max_examples=300, deadline=1000)
@given(data=st.data())
def test_any_values_of_the_keys_end_in_a_config_or_a_load_error(
    files: dict[str, GGUFFile], data: st.DataObject
) -> None:
    file = files["tiny-llama"]
    names = [name for name in file.metadata if name.startswith(("llama.", "general."))]
    names += ["split.count", "tokenizer.ggml.tokens", "llama.rope.scaling.type", "llama.rope.scaling.factor"]
    names += ["llama.expert_count", "llama.attention.sliding_window", "llama.rope.scale_linear"]
    changed = {data.draw(st.sampled_from(names)): data.draw(ANY_VALUE) for _ in range(data.draw(st.integers(1, 3)))}
    try:
        config = read_config(replace(file, metadata={**file.metadata, **changed}))
    except LoadError as e:
        assert str(e).startswith(Path("tiny-llama.gguf").name)
    else:
        assert config.dim == 128
        assert config.norm_eps > 0
        assert config.rope_scale > 0
