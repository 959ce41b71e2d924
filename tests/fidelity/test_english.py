"""The served model beside the float model over English prose, through the scheduler, several requests at once."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from float64_plan import logits_float64
from make_model import make_model

from potok.bench.fidelity import A8, A16, DEFAULT, FLOAT, INT8_KV, Setting, compare, log_probabilities, passages
from potok.text.tokenizer import Tokenizer
from potok.weights.default_model import find_default_model
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config

ENGLISH = Path(__file__).parent / "english"
PASSAGES_OF_EACH = 1


def prose() -> list[list[int]]:
    """The ids of each text."""
    tokenizer = Tokenizer.from_metadata(GGUFFile.open(find_default_model()).metadata)
    return [tokenizer.encode(lzma.decompress(path.read_bytes()).decode()) for path in sorted(ENGLISH.glob("*.txt.xz"))]


def test_there_is_enough_of_it() -> None:
    """For the figures in docs/numerics.md, which are of all passages."""
    whole = [passage for ids in prose() for passage in passages(ids)]
    assert sum(map(len, whole)) > 22_000
    assert {len(passage) for passage in whole} == {512}
    assert sum(path.stat().st_size for path in ENGLISH.iterdir()) < 60_000


def test_near_the_float_model() -> None:
    model = str(find_default_model())
    settings = (DEFAULT, A16, INT8_KV)
    some = [passage for ids in prose() for passage in passages(ids)[:PASSAGES_OF_EACH]]
    comparison = compare(FLOAT.build(model), [setting.build(model) for setting in settings], some)
    default, a16, int8_kv = comparison.fidelity
    print(comparison)
    assert default.mean_kl <= 2e-3
    assert abs(default.of_float - 1) <= 0.005
    assert a16.mean_kl <= 1e-5
    assert abs(a16.of_float - 1) <= 1e-4
    assert abs(int8_kv.of_float - 1) <= 0.01
    assert a16.mean_kl < default.mean_kl < int8_kv.mean_kl
    assert a16.same_top > 0.998


def float64_log_probabilities(file: GGUFFile, ids: list[int]) -> npt.NDArray[np.float64]:
    """[len(ids) - 1, vocab]: of what may follow each position but the last."""
    logits = logits_float64(file, read_config(file), ids[:-1], list(range(len(ids) - 1)))
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("setting", "least", "most"), [(FLOAT, 0, 1e-4), (A16, 1e-3, 0.05), (A8, 0.1, 1)], ids=["float32", "A16", "A8"]
)
def test_every_position_is_seen_once_and_rounded_as_the_setting_says(
    tmp_path: Path, setting: Setting, least: float, most: float
) -> None:
    path = make_model(tmp_path / "tiny.gguf", "tiny-llama")
    file = GGUFFile.open(path)
    texts = np.random.default_rng(3).integers(0, 501, (3, 50)).tolist()
    exact = [float64_log_probabilities(file, ids) for ids in texts]
    seen, error = np.zeros((3, 49), int), np.zeros((3, 49))
    engine = setting.build(str(path), budget=20)
    for _ in log_probabilities(engine, texts[:1]):
        pass  # a text that comes again is computed again
    for n, start, rows in log_probabilities(engine, texts):
        at = slice(start, start + len(rows))
        seen[n, at] += 1
        error[n, at] = np.abs(rows - exact[n][at]).max(axis=1)
    assert (seen == 1).all()
    assert least <= error.max() <= most


def test_figures_are_those_of_their_definitions(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "tiny.gguf", "tiny-llama"))
    file = GGUFFile.open(path)
    texts = np.random.default_rng(4).integers(0, 501, (5, 60)).tolist()
    comparison = compare(FLOAT.build(path, budget=64), [FLOAT.build(path, budget=7), A8.build(path, 30)], texts)

    served = [np.empty((59, 501)) for _ in texts]
    for n, start, rows in log_probabilities(A8.build(path), texts):
        served[n][start : start + len(rows)] = rows
    exact = np.concatenate([float64_log_probabilities(file, ids) for ids in texts])
    q, follow = np.concatenate(served), np.array(texts)[:, 1:].reshape(-1)
    kl = (np.exp(exact) * (exact - q)).sum(axis=1)
    losses = [-x[np.arange(len(x)), follow].mean() for x in (exact, q)]

    same, a8 = comparison.fidelity
    assert same == replace(same, mean_kl=0, p99_kl=0, same_top=1, of_float=1), "the steps were cut otherwise"
    assert comparison.positions == len(exact) == 5 * 59
    assert comparison.float_perplexity == pytest.approx(np.exp(losses[0]), rel=1e-4)
    assert a8.perplexity == pytest.approx(np.exp(losses[1]), rel=1e-4)
    assert a8.of_float == pytest.approx(np.exp(losses[1] - losses[0]), rel=1e-4)
    assert a8.mean_kl == pytest.approx(kl.mean(), rel=1e-3)
    assert a8.p99_kl == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert a8.same_top == (q.argmax(axis=1) == exact.argmax(axis=1)).mean()
