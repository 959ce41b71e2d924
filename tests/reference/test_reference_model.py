"""Whole 2-layer models in the reference: near the float64 meaning, and the same bits whoever else is in the step."""

from __future__ import annotations

from array import array
from pathlib import Path

import float64_model
import numpy as np
import pytest
from make_model import make_model

from potok.backends.inputs import pack
from potok.backends.reference.backend import ReferenceBackend
from potok.core.batch import Batch, Segment
from potok.core.request import Request
from potok.core.scheduler import Limits, Scheduler
from potok.model.config import ModelConfig
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config


def load(folder: Path, shape: str, format: str | None = None) -> tuple[GGUFFile, ModelConfig]:
    file = GGUFFile.open(make_model(folder / "tiny.gguf", shape, format))
    return file, read_config(file)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 501, length).tolist()


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


# Root mean square of the error over that of the logits. 16 bits and float32 leave the rounding of KV to float16.
@pytest.mark.parametrize(
    ("shape", "format", "activation_bits", "bound"),
    [
        ("tiny-llama", "Q4_1", 8, 4e-2),
        ("tiny-llama", "Q4_1", 16, 2e-3),
        ("tiny-llama", "Q8_0", 8, 2e-3),
        ("tiny-llama", "F16", 8, 2e-3),
        ("tiny-llama", "Q5_0", 8, 4e-2),
        ("tiny-llama-64", "F32", 8, 2e-3),
        ("tiny-llama-256", "Q4_K_M", 8, 4e-2),
        ("tiny-llama-256", "Q2_K", 8, 4e-2),
        ("tiny-llama-256", "IQ2_XS", 8, 2e-3),
        ("tiny-qwen2", "Q4_1", 16, 2e-3),
    ],
)
def test_logits_are_near_float64(tmp_path: Path, shape: str, format: str, activation_bits: int, bound: float) -> None:
    file, config = load(tmp_path, shape, format)
    tokens = prompt(70)  # more than one tile of attention
    backend = ReferenceBackend(file, config, activation_bits=activation_bits, block_size=16)
    backend.allocate(5, 80)
    parts = [Segment(0, start, tokens[start : start + 35], range(5), True) for start in (0, 35)]
    got = np.concatenate([backend.logits(pack(Batch(1, (part,)), 16)) for part in parts])
    want = float64_model.logits(file, config, tokens)[[34, 69]]
    error = relative_error(got, want)
    assert error < bound, error
    if activation_bits == 8 and format == "Q4_1":
        assert error > 4e-3, "8-bit activations were not used"


def serve(
    file: GGUFFile, config: ModelConfig, prompts: list[list[int]], budget: int, block_size: int, blocks: int
) -> tuple[dict[int, list[bytes]], int]:
    """Greedy outputs of all prompts together: the bytes of each sampled row's logits, and the preemptions."""
    backend = ReferenceBackend(file, config, activation_bits=8, block_size=block_size)
    backend.allocate(blocks, 128)
    scheduler = Scheduler(Limits(8, budget, 128, block_size), blocks, checked=True)
    rows: dict[int, list[bytes]] = {}
    for id, tokens in enumerate(prompts):
        request = Request(id, array("i", tokens), len(tokens), 10)
        assert scheduler.submit(request) is None
        rows[id] = []
    while (batch := scheduler.schedule(0)) is not None:
        out = backend.logits(pack(batch, block_size))
        assert np.isfinite(out).all(), "a slot was read that nobody had written"
        for segment, row in zip([s for s in batch.segments if s.sample], out, strict=True):
            rows[segment.id].append(row.tobytes())
        scheduler.commit(batch, out.argmax(axis=-1).tolist(), 1)
    return rows, scheduler.counters.preemptions


def test_a_row_depends_on_its_request_alone(tmp_path: Path) -> None:
    file, config = load(tmp_path, "tiny-llama", "Q4_1")
    prompts = [prompt(n, seed=n) for n in (1, 7, 16, 33)]
    alone = {id: serve(file, config, [tokens], 64, 32, 4)[0][0] for id, tokens in enumerate(prompts)}
    for budget, block_size, blocks, preempts in [(100, 32, 8, False), (5, 16, 16, False), (9, 8, 6, True)]:
        rows, preemptions = serve(file, config, prompts, budget, block_size, blocks)
        assert rows == alone, (budget, block_size)
        assert (preemptions > 0) == preempts


def test_formats_without_a_kernel_are_named_with_their_cost(tmp_path: Path) -> None:
    file, config = load(tmp_path, "tiny-llama-256", "BF16")
    backend = ReferenceBackend(file, config, activation_bits=8, block_size=32)
    (note,) = backend.info.notes
    assert "tensors in BF16 are expanded to float32" in note


def test_a_row_that_is_not_finite_keeps_its_neighbours_clean(tmp_path: Path) -> None:
    file, config = load(tmp_path, "tiny-llama", "Q4_1")
    backend = ReferenceBackend(file, config, activation_bits=8, block_size=16)
    backend.allocate(4, 64)
    good = Segment(0, 0, prompt(5), (0,), True)
    bad = Segment(1, 20, prompt(5), (1, 2), True)  # nobody wrote its first 20 slots
    (alone,) = backend.logits(pack(Batch(1, (good,)), 16))
    together = backend.logits(pack(Batch(2, (good, bad)), 16))
    assert together[0].tobytes() == alone.tobytes() and np.isfinite(alone).all()
    assert not np.isfinite(together[1]).any()
