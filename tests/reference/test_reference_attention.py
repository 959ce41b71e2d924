"""Attention of the reference: near float64, one row at a time or many, and blind to what a row may not see."""

from __future__ import annotations

import numpy as np
import pytest

from potok.backends.reference.attention import Stored, attend, store

HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture(scope="module")
def sequence() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [n, H, D] for every position; k, v [n, H_kv, D] in float16."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1100, HEADS, DIM)).astype(np.float32)
    k, v = rng.standard_normal((2, 1100, KV_HEADS, DIM)).astype(np.float16)
    return q, k, v


def f16(x: np.ndarray) -> Stored:
    return store(x.astype(np.float32), "f16")


POSITIONS = [0, 1, 62, 63, 64, 127, 128, 300, 511, 512, 513, 576, 1023, 1024, 1099]


def test_rows_side_by_side_are_computed_alone(sequence: tuple[np.ndarray, ...]) -> None:
    q, k, v = sequence
    positions = np.array(POSITIONS)
    together = attend(q[positions], positions, f16(k), f16(v))
    for row, p in zip(together, POSITIONS, strict=True):
        assert attend(q[[p]], np.array([p]), f16(k), f16(v))[0].tobytes() == row.tobytes(), p


def test_near_float64(sequence: tuple[np.ndarray, ...]) -> None:
    q, k, v = (x.astype(np.float64) for x in sequence)
    positions = np.array(POSITIONS)
    got = attend(sequence[0][positions], positions, *map(f16, sequence[1:]))
    for row, p in zip(got, POSITIONS, strict=True):
        for h in range(HEADS):
            scores = k[: p + 1, h // 2] @ q[p, h]
            weights = np.exp(scores - scores.max())
            want = weights @ v[: p + 1, h // 2] / weights.sum()
            assert np.abs(row[h] - want).max() < 5e-6


def test_slots_past_the_row_are_never_multiplied(sequence: tuple[np.ndarray, ...]) -> None:
    q, k, v = sequence
    positions = np.array([10, 70])
    poisoned = [x.copy() for x in (k[:128], v[:128])]
    for x in poisoned:
        x[71:] = np.nan
    assert (
        attend(q[positions], positions, *map(f16, poisoned)).tobytes()
        == attend(q[positions], positions, f16(k), f16(v)).tobytes()
    )
