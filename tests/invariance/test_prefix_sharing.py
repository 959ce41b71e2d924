"""A hit in the prefix cache is invisible: the hashes of raw logits are those of a request that was computed alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_model import make_model
from solo import Model, Setting, random_prompt, submit
from test_invariance import alone

from potok.protocol import Submit
from potok.weights.gguf import GGUFFile


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen2", "tiny-llama/Q8_0"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    shape, _, format = str(request.param).partition("/")
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return Model(GGUFFile.open(make_model(path, shape, format or None)))


def prompt(model: Model, seed: int, length: int) -> list[int]:
    return random_prompt(np.random.default_rng(seed), length, model.vocab_size)


def check(model: Model, requests: list[Submit], arrivals: dict[int, list[Submit]], setting: Setting) -> int:
    """All answers equal those alone; returns how many tokens came from the cache."""
    answers, stats = model.serve(arrivals, setting)
    for request in requests:
        assert answers[request.id] == alone(model, request, setting.kv_dtype), f"request {request.id}"
    return stats.prefix_hit_tokens


@pytest.mark.parametrize("kv_dtype", ["f16", "int8"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_warm_at_every_edge_of_a_block(tiny: Model, block_size: int, kv_dtype: str) -> None:
    """One after the other, each with a little more of the first one's prompt."""
    stem = prompt(tiny, 1, 3 * block_size)
    edges = [block_size + i for i in (-1, 0, 1)] + [2 * block_size + i for i in (-1, 0, 1)]
    requests = [submit(0, stem, 3)]
    requests += [submit(i, stem[:n] + prompt(tiny, i, 9), 5) for i, n in enumerate(edges, 1)]
    requests += [submit(100 + i, stem[:n], 5) for i, n in enumerate(edges)]
    arrivals = {12 * i: [request] for i, request in enumerate(requests)}
    hits = check(tiny, requests, arrivals, Setting(block_size=block_size, kv_dtype=kv_dtype))
    assert hits == sum(edges) + sum(n - 1 for n in edges)


def test_a_hundred_with_one_prompt_in_the_same_steps(tiny: Model) -> None:
    stem = prompt(tiny, 1, 200)
    requests = [submit(i, stem + prompt(tiny, i, i % 7), 12, temperature=0.5 * (i % 2), seed=i) for i in range(60)]
    assert check(tiny, requests, {0: requests}, Setting(budget=96)) >= 59 * 180


def test_choices_of_one_prompt(tiny: Model) -> None:
    stem = prompt(tiny, 2, 75)
    requests = [submit(i, stem, 20, temperature=1.0, seed=3, choice=i) for i in range(4)]
    assert check(tiny, requests, {0: requests}, Setting()) == 3 * 74


def test_dialogues_in_a_pool_that_holds_a_third_of_them(tiny: Model) -> None:
    """Histories are dropped and come back; turns of many users are mixed."""
    rng = np.random.default_rng(4)
    arrivals: dict[int, list[Submit]] = {}
    requests: list[Submit] = []
    for user in range(9):
        history = prompt(tiny, 50 + user, 40)
        for turn in range(4):
            history = history + random_prompt(rng, 25, tiny.vocab_size)
            requests.append(submit(len(requests), history, 6, seed=user))
            arrivals.setdefault(30 * turn + int(rng.integers(0, 12)), []).append(requests[-1])
    assert check(tiny, requests, arrivals, Setting(num_blocks=26, block_size=16, budget=48)) > 200


@pytest.mark.parametrize("num_blocks", [40, 34, 28])
def test_preempted_several_times_beside_a_shared_prefix(tiny: Model, num_blocks: int) -> None:
    stem = prompt(tiny, 6, 90)
    requests = [
        submit(i, stem + prompt(tiny, i, 20), 150, seed=i, temperature=0.7, frequency_penalty=0.5) for i in range(5)
    ]
    answers, stats = tiny.serve({0: requests}, Setting(num_blocks=num_blocks, block_size=16))
    assert stats.preemptions > 0 and stats.prefix_hit_tokens >= 4 * 90
    for request in requests:
        assert answers[request.id] == alone(tiny, request)


def test_a_stop_inside_a_block_leaves_nothing_that_was_not_computed(tiny: Model) -> None:
    """The next turn goes on from where an answer was cut; so does one after an answer that was cancelled."""
    first = submit(0, prompt(tiny, 8, 21), 4)
    answers, _ = tiny.serve({0: [first]}, Setting(block_size=16))
    goes_on = submit(1, [*first.prompt, *answers[0].tokens, *prompt(tiny, 9, 30)], 6)
    assert check(tiny, [goes_on], {0: [first], 10: [goes_on]}, Setting(block_size=16)) == 16


def test_different_salts_share_nothing(tiny: Model) -> None:
    stem = prompt(tiny, 10, 100)
    plain = submit(0, stem, 4)
    salted = Submit(1, stem, 4, plain.sampling, salt="x")
    assert check(tiny, [plain, salted], {0: [plain], 10: [salted]}, Setting()) == 0


def test_off_means_off(tmp_path: Path) -> None:
    model = Model(GGUFFile.open(make_model(tmp_path / "model.gguf", "tiny-llama")))
    requests = [submit(i, prompt(model, 1, 100), 4) for i in range(2)]
    assert check(model, requests, {0: requests}, Setting(prefix_caching=False)) == 0
