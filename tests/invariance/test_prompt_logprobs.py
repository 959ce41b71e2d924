"""Log-probabilities of a prompt's tokens: equal to those of the same tokens when they were sampled, cold or warm."""

from __future__ import annotations

import numpy as np
import pytest
from make_model import make_model
from solo import Model, Setting, random_prompt, submit

from potok.protocol import Sampling, Submit, TokenLogprobs
from potok.weights.gguf import GGUFFile


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(GGUFFile.open(make_model(tmp_path_factory.mktemp("models") / "model.gguf", "tiny-llama")))


def rate(id: int, prompt: list[int], count: int = 1) -> Submit:
    return Submit(id, prompt, count, Sampling(prompt_logprobs=3))


def cold(model: Model, prompt: list[int]) -> list[TokenLogprobs]:
    answers, _ = model.serve({0: [rate(0, prompt)]}, Setting())
    return answers[0].prompt_logprobs


def test_they_are_those_of_the_tokens_when_they_were_sampled(tiny: Model) -> None:
    start = random_prompt(np.random.default_rng(1), 10, tiny.vocab_size)
    answers, _ = tiny.serve({0: [Submit(0, start, 60, Sampling(temperature=1.0, seed=1, logprobs=3))]}, Setting())
    rated = cold(tiny, start + answers[0].tokens)
    assert len(rated) == 10 + 60 - 1
    assert [r.chosen for r in rated[9:]] == answers[0].logprobs
    assert all(r.top == sorted(r.top, reverse=True) and r.chosen <= 0 for r in rated)


@pytest.mark.parametrize("budget", [1, 7, 64, 512])
def test_whatever_the_chunks_and_the_neighbours(tiny: Model, budget: int) -> None:
    prompt = random_prompt(np.random.default_rng(2), 150, tiny.vocab_size)
    others = [submit(10 + i, random_prompt(np.random.default_rng(i), 20 + i, tiny.vocab_size), 5) for i in range(5)]
    answers, _ = tiny.serve({0: [*others[:3], rate(0, prompt), *others[3:]]}, Setting(budget=budget))
    assert answers[0].prompt_logprobs == cold(tiny, prompt)


def test_on_a_warm_prefix_and_before_one(tiny: Model) -> None:
    """In both orders, and a third time: what was cached is computed again, and what was computed is cached."""
    prompt = random_prompt(np.random.default_rng(3), 100, tiny.vocab_size)
    plain = submit(1, prompt, 4)
    answers, stats = tiny.serve({0: [plain], 9: [rate(2, prompt)], 18: [rate(3, prompt)]}, Setting(block_size=16))
    assert answers[2].prompt_logprobs == answers[3].prompt_logprobs == cold(tiny, prompt)
    assert stats.prefix_hit_tokens == 0 and stats.prefix_misses["skipped"] == 2
    again, stats = tiny.serve({0: [rate(2, prompt)], 9: [plain]}, Setting(block_size=16))
    assert again[1] == answers[1]
    assert stats.prefix_hit_tokens == 96


def test_preempted_requests_are_rated_once(tiny: Model) -> None:
    rng = np.random.default_rng(4)
    requests = [rate(i, random_prompt(rng, 100, tiny.vocab_size), 200) for i in range(4)]
    answers, stats = tiny.serve({0: requests}, Setting(num_blocks=24, budget=40))
    assert stats.preemptions > 0
    for request in requests:
        assert answers[request.id].prompt_logprobs == cold(tiny, request.prompt)
