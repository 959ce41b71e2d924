"""A pool that is too small, requests that never fit, and answers that are cut: nobody hangs, and nothing shows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from make_model import make_model
from solo import Answer, Model, Setting, random_prompt, submit
from test_invariance import alone

from potok.finish import Finish
from potok.protocol import Cancel, Sampling, Submit
from potok.weights.gguf import GGUFFile

#: 64 blocks of 16: 1024 tokens.
SMALL = Setting(num_blocks=64, block_size=16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(GGUFFile.open(make_model(tmp_path_factory.mktemp("models") / "model.gguf", "tiny-llama")))


def prompt(model: Model, seed: int, length: int) -> list[int]:
    return random_prompt(np.random.default_rng(seed), length, model.vocab_size)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.7}])
@pytest.mark.parametrize("copies", [2, 6])
def test_requests_that_fill_the_pool_together(tiny: Model, copies: int, sampling: dict[str, Any]) -> None:
    """480 tokens in and 300 out, of which the pool holds one and a third at a time."""
    requests = [submit(i, prompt(tiny, i, 480), 300, **sampling) for i in range(copies)]
    turns = tiny.serve_turns({0: requests}, SMALL)
    for request in requests:
        assert turns.answers[request.id] == alone(tiny, request)
    assert 1 <= turns.stats[-1].preemptions < 3 * copies
    idle = [stats.running == 0 and stats.waiting > 0 for stats in turns.stats]
    assert not any(now and then for now, then in pairwise(idle)), "somebody waits while nobody runs"


def test_what_can_never_fit_is_refused_and_nobody_waits_for_it(tiny: Model) -> None:
    small = Setting(num_blocks=32, block_size=16)
    too_long, other = submit(0, prompt(tiny, 0, 700), 5), submit(1, prompt(tiny, 1, 20), 5)
    grows = submit(2, prompt(tiny, 2, 400), 400)
    answers, stats = tiny.serve({0: [too_long, grows], 1: [other]}, small)
    for refused in (too_long, grows):
        assert answers[refused.id] == Answer(finish=Finish.ERROR)
    assert answers[other.id] == alone(tiny, other)
    assert stats.kv_blocks_used == 0 and stats.waiting == 0


def test_answers_that_are_cut_inside_a_block_and_continued(tiny: Model) -> None:
    """Fifty users cut an answer at some token, as a stop string or a closed connection does, and go on from there."""
    rng = np.random.default_rng(12)
    arrivals: dict[int, list[Submit | Cancel]] = {}
    continued = []
    for i in range(50):
        first = submit(2 * i, prompt(tiny, 100 + i, 21), 40)
        seen = int(rng.integers(1, 40))
        said = alone(tiny, first).tokens[:seen]
        then = submit(2 * i + 1, [*first.prompt, *said, *prompt(tiny, 200 + i, 30)], 4)
        start = int(rng.integers(0, 60))
        arrivals.setdefault(start, []).append(first)
        # The first token comes in the turn of the request; a turn later its sender may know.
        arrivals.setdefault(start + seen + int(rng.integers(0, 2)), []).append(Cancel(first.id))
        arrivals.setdefault(start + seen + int(rng.integers(0, 4)), []).append(then)
        continued.append(then)
    answers, stats = tiny.serve(arrivals, Setting(block_size=16, num_blocks=400))
    for request in continued:
        assert answers[request.id] == alone(tiny, request)
    assert stats.prefix_hit_tokens >= 50 * 16, "each goes on from a block of the answer that was cut"


SEEDED = {"temperature": 1.0, "seed": 7}


def others(model: Model, num: int, first_id: int = 10) -> list[Submit]:
    return [submit(first_id + i, prompt(model, i, 9 + 13 * i), 60, temperature=1.0, seed=7) for i in range(num)]


@pytest.mark.parametrize("first", [True, False])
def test_a_seed_gives_the_same_tokens_whoever_else_is_there(tiny: Model, first: bool) -> None:
    request = submit(0, prompt(tiny, 7, 30), 32, **SEEDED)
    twin = submit(1, request.prompt, 32, **SEEDED)
    mine, neighbours = [request, twin], others(tiny, 7)
    answers, _ = tiny.serve({0: mine, 3: neighbours} if first else {0: neighbours, 3: mine}, Setting())
    assert answers[0] == answers[1] == alone(tiny, request)
    assert len(set(answers[0].tokens)) > 16, "it was sampled"


def test_a_seed_gives_the_same_tokens_after_preemptions(tiny: Model) -> None:
    request = submit(9, prompt(tiny, 7, 30), 100, **SEEDED)
    elders = others(tiny, 3, first_id=0)
    answers, stats = tiny.serve({0: [*elders, request]}, Setting(num_blocks=14, block_size=16))
    assert stats.preemptions > 0
    for one in [request, *elders]:
        assert answers[one.id] == alone(tiny, one)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_penalties_stay_with_their_request(tiny: Model, order: tuple[int, ...]) -> None:
    """A greedy request beside two with strong penalties, of which one ends early; rows move up, penalties with them."""
    same = prompt(tiny, 20, 25)
    requests = [
        submit(0, same, 40),
        submit(1, same, 20, presence_penalty=-2.0, frequency_penalty=-2.0, repetition_penalty=0.2),
        submit(2, same, 40, logit_bias=((3, -100.0), (5, 40.0))),
    ]
    answers, _ = tiny.serve({0: [requests[i] for i in order]}, Setting())
    for request in requests:
        assert answers[request.id] == alone(tiny, request)
    assert answers[0].tokens[:20] != answers[1].tokens and 5 in answers[2].tokens


def test_a_short_prompt_again_says_what_was_found_or_why_nothing_was(tiny: Model) -> None:
    short, longer = prompt(tiny, 30, 10), prompt(tiny, 31, 40)
    requests = [submit(i, p, 3) for i, p in enumerate([short, short, longer, longer])]
    rated = Submit(4, longer, 3, Sampling(prompt_logprobs=0))
    arrivals = {10 * i: [request] for i, request in enumerate([*requests, rated])}
    _, stats = tiny.serve(arrivals, Setting(block_size=16))
    assert (stats.prefix_queries, stats.prefix_hits) == (5, 1)
    assert stats.prefix_misses == {"too_short": 2, "differs": 1, "skipped": 1, "evicted": 0}
