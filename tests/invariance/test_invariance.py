"""A token depends on its request alone: the hash of its raw logits is the same however the request is served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_model import make_model
from solo import Answer, Model, Setting, random_prompt, submit

from potok.protocol import Submit
from potok.weights.default_model import find_default_model
from potok.weights.gguf import GGUFFile

SUBJECT = 0
FIRST_NEIGHBOUR = 1


@pytest.fixture(
    scope="module", params=["tiny-llama", "tiny-qwen2", "tiny-llama-64/F16", "tiny-llama/Q8_0", "tiny-llama-256/Q2_K"]
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    shape, _, format = str(request.param).partition("/")
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return Model(GGUFFile.open(make_model(path, shape, format or None)))


@pytest.fixture(scope="module")
def default_model() -> Model:
    return Model(GGUFFile.open(find_default_model()))


def subject(vocab: int, prompt: int = 70, count: int = 40) -> Submit:
    return submit(SUBJECT, random_prompt(np.random.default_rng(7), prompt, vocab), count)


def neighbours(vocab: int, num: int, longest: int = 150) -> list[Submit]:
    """Of mixed lengths, greedy and not."""
    rng = np.random.default_rng(num)
    return [
        submit(
            FIRST_NEIGHBOUR + i,
            random_prompt(rng, int(rng.integers(1, longest)), vocab),
            int(rng.integers(1, 60)),
            temperature=0.8 * (i % 2),
            seed=i,
        )
        for i in range(num)
    ]


def alone(model: Model, request: Submit, kv_dtype: str = "f16") -> Answer:
    # A pool no larger than the longest of the requests here: its free blocks are poisoned at every step.
    answers, _ = model.serve({0: [request]}, Setting(max_num_seqs=1, threads=1, kv_dtype=kv_dtype, num_blocks=64))
    assert len(answers[request.id].hashes) == len(answers[request.id].tokens) > 0
    return answers[request.id]


@pytest.mark.parametrize("num", [1, 3, 7, 31, 99])
def test_among_neighbours(tiny: Model, num: int) -> None:
    request = subject(tiny.vocab_size)
    answers, _ = tiny.serve({0: [*neighbours(tiny.vocab_size, num), request]}, Setting())
    assert answers[SUBJECT] == alone(tiny, request)


def test_the_neighbours_too(tiny: Model) -> None:
    others = neighbours(tiny.vocab_size, 9)
    answers, _ = tiny.serve({0: others}, Setting())
    for request in others:
        assert answers[request.id] == alone(tiny, request)


@pytest.mark.parametrize("budget", [1, 16, 64, 512])
def test_whatever_the_budget(tiny: Model, budget: int) -> None:
    request = subject(tiny.vocab_size, prompt=300)
    others = neighbours(tiny.vocab_size, 15 if budget > 1 else 0)
    answers, _ = tiny.serve({0: [request, *others]}, Setting(budget=budget))
    assert answers[SUBJECT] == alone(tiny, request)


def test_neighbours_arriving_midway(tiny: Model) -> None:
    request = subject(tiny.vocab_size)
    others = neighbours(tiny.vocab_size, 12)
    arrivals = {0: [request]} | {3 * i + 2: [other] for i, other in enumerate(others)}
    answers, _ = tiny.serve(arrivals, Setting(budget=64))
    assert answers[SUBJECT] == alone(tiny, request)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_and_block_sizes(tiny: Model, block_size: int, threads: int) -> None:
    request = subject(tiny.vocab_size, prompt=600)
    setting = Setting(block_size=block_size, threads=threads, budget=100)
    answers, _ = tiny.serve({0: [request, *neighbours(tiny.vocab_size, 5)]}, setting)
    assert answers[SUBJECT] == alone(tiny, request)


def test_many_steps_on_more_threads_than_cores(tiny: Model) -> None:
    """Threads that lose their core come late to a step, or find that it is over; hundreds of steps, none torn."""
    request = subject(tiny.vocab_size, prompt=20, count=300)
    answers, _ = tiny.serve({0: [request]}, Setting(threads=6))
    assert answers[SUBJECT] == alone(tiny, request)


def test_after_preemption(tiny: Model) -> None:
    """A pool that holds neither both long requests nor all neighbours: everybody is preempted, nobody notices."""
    vocab = tiny.vocab_size
    rng = np.random.default_rng(5)
    requests = [
        submit(i, random_prompt(rng, 100, vocab), 200, seed=i, temperature=0.7, frequency_penalty=0.5) for i in range(4)
    ]
    answers, stats = tiny.serve({0: requests}, Setting(num_blocks=24))
    assert stats.preemptions > 0
    for request in requests:
        assert answers[request.id] == alone(tiny, request)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_with_keys_and_values_in_bytes(tiny: Model, block_size: int) -> None:
    request = subject(tiny.vocab_size, prompt=600)
    setting = Setting(block_size=block_size, budget=50, kv_dtype="int8", num_blocks=1400 // block_size)
    answers, _ = tiny.serve({0: [*neighbours(tiny.vocab_size, 9), request]}, setting)
    assert answers[SUBJECT] == alone(tiny, request, "int8")
    assert answers[SUBJECT] != alone(tiny, request)


def test_seeded_samples_repeat_and_differ_by_choice(tiny: Model) -> None:
    prompt = random_prompt(np.random.default_rng(1), 20, tiny.vocab_size)
    requests = [submit(i, prompt, 32, temperature=1.0, seed=7, choice=i % 2) for i in range(4)]
    answers, _ = tiny.serve({0: requests}, Setting())
    assert answers[0] == answers[2] and answers[1] == answers[3]
    assert answers[0].tokens != answers[1].tokens


def test_default_model_among_a_hundred(default_model: Model) -> None:
    request = subject(default_model.vocab_size, prompt=40, count=12)
    others = neighbours(default_model.vocab_size, 99, longest=12)
    answers, stats = default_model.serve({0: others[:50], 2: [request], 4: others[50:]}, Setting(budget=160))
    assert answers[SUBJECT] == alone(default_model, request)
    assert stats.steps < 120, "a hundred requests shared the steps"


@pytest.mark.parametrize("block_size", [16, 64])
def test_default_model_chunks_and_blocks(default_model: Model, block_size: int) -> None:
    request = subject(default_model.vocab_size, prompt=90, count=4)
    setting = Setting(block_size=block_size, budget=16, threads=1)
    answers, _ = default_model.serve({0: [request, *neighbours(default_model.vocab_size, 2, longest=20)]}, setting)
    assert answers[SUBJECT] == alone(default_model, request)


@pytest.mark.parametrize("activation_bits", [8, 16])
def test_tables_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activation_bits: int) -> None:
    """The fastest table of this machine against the scalar one, whole answers."""
    for shape, format in [
        ("tiny-llama", None),
        ("tiny-qwen2", "Q8_0"),
        ("tiny-llama-64", "F16"),
        ("tiny-llama", "F32"),
    ]:
        file = GGUFFile.open(make_model(tmp_path / "model.gguf", shape, format))
        answers = []
        for isa in ("", "scalar"):
            monkeypatch.setenv("POTOK_ISA", isa)
            model = Model(file, activation_bits)
            answers.append(alone(model, subject(model.vocab_size, prompt=40, count=10)))
        assert answers[0] == answers[1]


def test_tables_agree_on_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for isa in ("", "scalar"):
        monkeypatch.setenv("POTOK_ISA", isa)
        model = Model(GGUFFile.open(find_default_model()))
        answers.append(alone(model, subject(model.vocab_size, prompt=6, count=3)))
    assert answers[0] == answers[1]
