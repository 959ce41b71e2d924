"""KV that was written to a file and read again is the KV that would have been computed: the hashes of logits say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from make_model import make_model
from solo import Answer, Model, Setting, random_prompt, submit
from test_invariance import alone

from potok.protocol import Stats, Submit
from potok.weights.gguf import GGUFFile


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model.gguf", str(request.param))


def load(path: Path) -> Model:
    """A new backend with memory of its own, as after a restart."""
    return Model(GGUFFile.open(path))


def prompt(model: Model, seed: int, length: int) -> list[int]:
    return random_prompt(np.random.default_rng(seed), length, model.vocab_size)


def serve(model: Model, requests: list[Submit], setting: Setting, apart: int = 0) -> Stats:
    """apart: turns between arrivals. All answers equal those alone."""
    arrivals: dict[int, list[Submit]] = {}
    for i, request in enumerate(requests):
        arrivals.setdefault(apart * i, []).append(request)
    answers, stats = model.serve(arrivals, setting)
    for request in requests:
        assert answers[request.id] == expected(model, request, setting), f"request {request.id}"
    return stats


def expected(model: Model, request: Submit, setting: Setting) -> Answer:
    return alone(model, request, setting.kv_dtype)


@pytest.mark.parametrize("kv_dtype", ["f16", "int8", "f32"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_from_disk_after_a_restart(path: Path, tmp_path: Path, block_size: int, kv_dtype: str) -> None:
    setting = Setting(block_size=block_size, kv_dtype=kv_dtype, tier_folder=str(tmp_path), budget=100)
    model = load(path)
    stem = prompt(model, 1, 5 * block_size)
    stats = serve(model, [submit(0, stem, 3)], setting)
    assert stats.tier_written_blocks == stats.tier_blocks == 5
    edges = [block_size, 2 * block_size - 1, 3 * block_size, 3 * block_size + 1, 5 * block_size - 1]
    requests = [submit(0, stem, 6)] + [submit(i, stem[:n] + prompt(model, i, 7), 5) for i, n in enumerate(edges, 1)]
    for request in requests:
        stats = serve(load(path), [request], setting)
        assert stats.tier_read_blocks > 0 and stats.tier_failures == 0
        assert stats.prefix_hit_tokens >= block_size


def test_the_whole_prompt_but_its_last_token(path: Path, tmp_path: Path) -> None:
    setting = Setting(tier_folder=str(tmp_path))
    model = load(path)
    request = submit(0, prompt(model, 1, 320), 8)
    serve(model, [request], setting)
    stats = serve(load(path), [request], setting)
    assert (stats.prompt_tokens, stats.prefix_hit_tokens, stats.tier_hit_tokens) == (1, 319, 319)


def test_after_eviction_and_return(path: Path, tmp_path: Path) -> None:
    """A pool for two of the prompts, which come in turn."""
    setting = Setting(tier_folder=str(tmp_path), block_size=16, num_blocks=28)
    model = load(path)
    prompts = [prompt(model, i, 200 + 16 * i) for i in range(4)]
    requests = [submit(10 * turn + i, prompts[i], 4) for turn in range(3) for i in range(4)]
    stats = serve(model, requests, setting, apart=40)
    assert stats.evicted_blocks > 60 and stats.tier_hit_tokens > 8 * 150


def test_preempted_and_read_again(path: Path, tmp_path: Path) -> None:
    setting = Setting(tier_folder=str(tmp_path), block_size=16, num_blocks=18)
    model = load(path)
    requests = [submit(i, prompt(model, i, 90), 60, seed=i, temperature=0.7) for i in range(4)]
    stats = serve(model, requests, setting)
    assert stats.preemptions > 0 and stats.tier_written_blocks > 10


def test_a_tier_that_is_too_small_for_all(path: Path, tmp_path: Path) -> None:
    setting = Setting(tier_folder=str(tmp_path), block_size=16, num_blocks=28)
    model = load(path)
    backend = model._backend(setting)
    backend.allocate(1, 64)
    setting = replace(setting, tier_bytes=20 * len(backend.kv_block(0)) + 4096 * 20)
    prompts = [prompt(model, i, 200) for i in range(4)]
    requests = [submit(10 * turn + i, prompts[i], 4) for turn in range(3) for i in range(4)]
    stats = serve(model, requests, setting, apart=40)
    assert stats.tier_blocks <= stats.tier_slots < 48 and stats.tier_failures == 0
    assert stats.tier_written_blocks > stats.tier_slots


def test_corrupt_payloads_cost_time_only(path: Path, tmp_path: Path) -> None:
    setting = Setting(tier_folder=str(tmp_path))
    model = load(path)
    request = submit(0, prompt(model, 1, 320), 8)
    serve(model, [request], setting)
    (payloads,) = tmp_path.glob("*.potok")
    data = bytearray(payloads.read_bytes())
    stride = len(data) // 10
    data[4 * stride + 100] ^= 1
    payloads.write_bytes(data)
    stats = serve(load(path), [request], setting)
    assert stats.tier_failures == 1 and stats.prefix_hit_tokens % 32 == 0 and 0 < stats.prefix_hit_tokens < 319
