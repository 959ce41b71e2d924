"""The definition and the kernels: the same logits bit for bit, on every ISA, over whole models."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
from make_model import make_model

from potok._native import supported_isas
from potok.backends.api import Backend
from potok.backends.inputs import pack
from potok.backends.native.backend import NativeBackend
from potok.backends.reference.backend import ReferenceBackend
from potok.core.batch import Batch, Segment
from potok.protocol import Sampling
from potok.sampling.state import RowState, build_rows
from potok.weights.default_model import find_default_model
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config
from potok.weights.rewritten import REWRITTEN

#: Two requests, three steps: a first token, a chunk that crosses a tile of attention, a decoding step.
LONG = (1, 67, 1)
SHORT = (1, 9, 1)  # float chains are slow here


def run(backend: Backend, vocab: int, chunks: tuple[int, ...]) -> list[object]:
    rng = np.random.default_rng(0)
    tables = range(3, 12), range(20, 29)
    start, seen = 0, []
    for n in chunks:
        segments = [Segment(id, start, rng.integers(0, vocab, n).tolist(), tables[id], True) for id in (0, 1)]
        start += n
        sampling = Sampling(temperature=0.8, top_k=20, seed=7, logprobs=3)
        rows = build_rows([RowState(sampling, [0])] * 2, array("i", [start] * 2), True)
        out = backend.step(pack(Batch(1, tuple(segments)), 16), rows)
        seen.append([x.tolist() for x in (out.hashes, out.ids, out.logprob, out.top_ids, out.top_logprobs)])
    return seen


def compare(
    path: Path,
    activation_bits: int,
    chunks: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    kv_dtype: str = "f16",
) -> None:
    file = GGUFFile.open(path)
    config = read_config(file)
    reference = ReferenceBackend(file, config, activation_bits=activation_bits, block_size=16, kv_dtype=kv_dtype)
    reference.allocate(32, 144)
    want = run(reference, config.vocab_size, chunks)
    for isa in supported_isas():
        monkeypatch.setenv("POTOK_ISA", isa)
        native = NativeBackend(
            file, config, threads=2, activation_bits=activation_bits, block_size=16, kv_dtype=kv_dtype
        )
        native.allocate(32, 144)
        assert native.info.isa == isa
        assert run(native, config.vocab_size, chunks) == want, isa


@pytest.mark.parametrize(
    ("shape", "format", "activation_bits", "chunks"),
    [
        ("tiny-llama", "Q4_1", 8, LONG),
        ("tiny-llama", "Q4_1", 16, LONG),
        ("tiny-llama", "Q8_0", 8, LONG),
        ("tiny-llama", "F16", 8, SHORT),
        ("tiny-llama-64", "F32", 8, SHORT),
        ("tiny-qwen2", "Q4_1", 8, LONG),
        *(("tiny-llama-256", name, 8, LONG) for name in ("Q4_K_M", "Q5_K", "Q3_K", "IQ4_XS")),
        *(("tiny-llama", name, 8, LONG) for name in ("Q4_0", "Q5_0", "Q5_1", "IQ4_NL")),
        ("tiny-llama-256", "Q5_K", 16, LONG),
        ("tiny-llama", "BF16", 8, SHORT),
        *(("tiny-llama-256", "Q2_K", bits, LONG) for bits in (8, 16)),
        *(("tiny-llama-256", name, 8, LONG) for name in REWRITTEN),
    ],
)
def test_tiny_models(
    tmp_path: Path,
    shape: str,
    format: str,
    activation_bits: int,
    chunks: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare(make_model(tmp_path / "tiny.gguf", shape, format), activation_bits, chunks, monkeypatch)


@pytest.mark.parametrize("kv_dtype", ["f32", "int8"])
def test_every_element_type_of_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
    compare(make_model(tmp_path / "tiny.gguf", "tiny-llama-64", "Q8_0"), 8, LONG, monkeypatch, kv_dtype)


def test_a_few_tokens_of_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(find_default_model(), 8, (3, 1), monkeypatch)
