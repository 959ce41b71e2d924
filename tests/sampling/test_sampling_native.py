"""The kernels give the bits of the definition: every table, every vocabulary size, ordinary and absurd rows."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from sampling_kit import SAMPLERS, difference

from potok._native import supported_isas
from potok.protocol import Sampling
from potok.sampling import reference
from potok.sampling.rows import SETTINGS, Lists, SampleRows
from potok.sampling.state import RowState, build_rows

ISAS = supported_isas()
Rng = np.random.Generator


def random_logits(rng: Rng, count: int, vocab: int) -> np.ndarray:
    """[count, vocab]: normal rows of many widths, with ties, plateaus, outliers, and numbers that are none."""
    x = (rng.standard_normal((count, vocab)) * rng.choice([0.01, 1, 3, 30, 1000], (count, 1))).astype(np.float32)
    for row in x:
        match rng.integers(8):
            case 0:
                row[:] = np.round(row)
            case 1:
                row[:] = row[0]
            case 2:
                row[:] = np.clip(row, -1, 1)
            case 3:
                row[rng.integers(vocab)] = rng.choice([50, 1e30, -1e30, 3.4e38, -3.4e38])
            case 4:
                row[:] = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
            case 5 if rng.random() < 0.3:
                row[rng.integers(vocab)] = rng.choice([np.nan, np.inf, -np.inf])
    return x


def random_csr(rng: Rng, count: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """(indptr, ids): distinct ids a row, half of the rows without any."""
    sizes = rng.integers(0, min(vocab, 200) + 1, count) * rng.integers(0, 2, count)
    ids = [rng.choice(vocab, n, replace=False) for n in sizes]
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32), np.concatenate(ids).astype(np.int32)


def random_rows(rng: Rng, count: int, vocab: int) -> SampleRows:
    def floats(*values: float) -> np.ndarray:
        return rng.choice(values, count).astype(np.float32)

    def ints(*values: int) -> np.ndarray:
        return rng.choice(values, count).astype(np.int32)

    seen_indptr, seen_ids = random_csr(rng, count, vocab)
    bias_indptr, bias_ids = random_csr(rng, count, vocab)
    bias_values = rng.choice([-np.inf, -100, 100, 1.5, -3], len(bias_ids)).astype(np.float32)
    settings = np.zeros(count, SETTINGS)
    settings["temperature"] = floats(0, 1e-6, 1e-5, 1e-3, 0.1, 0.7, 1, 1, 1, 2, 2, 100, 1e30)
    settings["top_k"] = ints(0, -1, 1, 2, 40, 100, 1000, 5000, vocab, vocab + 1, 2**31 - 1)
    settings["top_p"] = floats(1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.9999999, 1, 1, 1)
    settings["min_p"] = floats(0, 0, 0, 1e-30, 1e-10, 1e-4, 0.05, 0.5, 1)
    settings["seed"] = rng.integers(0, 2**64, count, dtype=np.uint64)
    settings["choice"] = rng.integers(0, 128, count, dtype=np.int32)
    settings["presence"] = floats(0, -2, 0.5, 2)
    settings["frequency"] = floats(0, -2, 0.3, 2)
    settings["repetition"] = floats(1, 0.01, 1.1, 5, 100)
    settings["logprobs"] = ints(-1, 0, 1, 5, 20)
    return SampleRows(
        settings=settings.tobytes(),
        position=array("i", rng.integers(0, 2**31 - 1, count)),
        width=max(0, settings["logprobs"].max()),
        want_hashes=bool(rng.integers(2)),
        seen=Lists(seen_indptr, seen_ids, rng.integers(0, 4, len(seen_ids), dtype=np.int32)),
        biases=Lists(bias_indptr, bias_ids, bias_values),
    )


@pytest.mark.parametrize(
    ("vocab", "count"),
    [
        (1, 50),
        (2, 100),
        (63, 200),
        (64, 200),
        (65, 200),
        (127, 200),
        (512, 200),
        (4097, 200),
        (49152, 100),
        (151936, 8),
        (262144, 4),
    ],
)
def test_random_rows(vocab: int, count: int) -> None:
    rng = np.random.default_rng(vocab)
    logits, rows = random_logits(rng, count, vocab), random_rows(rng, count, vocab)
    before = logits.copy()
    expected = reference.sample_rows(logits, rows)
    assert logits.tobytes() == before.tobytes()
    for isa in ISAS:
        assert difference(expected, SAMPLERS[isa](logits, rows)) is None, isa


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("width", [1.0, 3.0])
def test_rows_like_those_of_a_model(temperature: float, width: float) -> None:
    """No penalties, one temperature, a peaked head over a wide tail: every depth of the order is drawn from."""
    count, vocab = 42, 49152
    rng = np.random.default_rng(int(10 * temperature + width))
    logits = (width * rng.standard_normal((count, vocab))).astype(np.float32)
    for row in logits:
        row[rng.choice(vocab, 50, replace=False)] += np.linspace(12, 2, 50)
    filters = [(0, 1, 0), (0, 0.95, 0), (40, 0.9, 0), (1000, 0.999, 0), (3000, 1, 0), (0, 1, 0.01), (0, 0.9, 0.001)]
    chosen = [filters[i % len(filters)] for i in range(count)]
    samplings = [
        Sampling(temperature=temperature, top_k=k, top_p=p, min_p=min_p, seed=i, logprobs=i % 7 - 1)
        for i, (k, p, min_p) in enumerate(chosen)
    ]
    rows = build_rows([RowState(s, ()) for s in samplings], array("i", range(count)), want_hashes=True)
    expected = reference.sample_rows(logits, rows)
    assert len(set(expected.ids.tolist())) > 5
    for isa in ISAS:
        assert difference(expected, SAMPLERS[isa](logits, rows)) is None, isa
