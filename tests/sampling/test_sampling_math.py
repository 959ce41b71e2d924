"""exp_f32 and log_f32 against float64, at the ends of their ranges, and in their order."""

from __future__ import annotations

import numpy as np

from potok.sampling.math import EXP_P, LN2_HIGH, LN2_LOW, LOG2_E, ROUND, exp_f32, log_f32
from potok.sampling.reference import weights


def near(centre: float, count: int) -> np.ndarray:
    """`count` consecutive float32 on each side of centre, ascending."""
    bits = np.array([abs(centre)], np.float32).view(np.int32) + np.arange(-count, count, dtype=np.int32)
    values = bits.view(np.float32)
    return values if centre > 0 else -values[::-1]


def test_exp_is_near_float64() -> None:
    x = np.linspace(-87.3, 88, 1_000_000, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(exp_f32(x) - exact) / exact).max() < 1e-7


def test_exp_at_its_ends() -> None:
    x = np.array([0.0, -0.0, -1e-30, 1e-30, -87.4, -1000, -3.4e38, -np.inf], np.float32)
    assert exp_f32(x).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert np.isnan(exp_f32(np.array([np.nan], np.float32))).all()
    smallest = exp_f32(near(-87.3, 1000))
    assert (smallest[smallest > 0] >= np.finfo(np.float32).tiny).all() and (smallest == 0).any()


def test_exp_never_falls_where_the_sampler_uses_it() -> None:
    """Every float from 0 down to -25, below which weights are 0: what is sorted by logit is sorted by weight."""
    first, last = np.array([2.0**-26, 25], np.float32).view(np.int32).tolist()
    chunk = 1 << 17
    before = np.float32(1)  # of everything from -2^-26 to 0
    assert exp_f32(np.array([-(2.0**-26)], np.float32)) == before
    for start in range(first, last, chunk):
        e = exp_f32(-np.arange(start, start + chunk, dtype=np.int32).view(np.float32))
        assert e[0] <= before and (e[1:] <= e[:-1]).all()
        before = e[-1]


def test_exp_never_falls_below() -> None:
    """The rest of the range, at the seams between powers of two and at random places."""
    seams = [(n + 0.5) * np.log(2) for n in range(-126, -35)]
    for centre in [*seams, *np.random.default_rng(0).uniform(-88, -25, 100)]:
        assert (np.diff(exp_f32(near(centre, 2000))) >= 0).all(), centre


def test_log_is_near_float64() -> None:
    for x in (
        np.logspace(-37.9, 38.5, 1_000_000, dtype=np.float32),
        np.linspace(0.5, 2, 1_000_001, dtype=np.float32),
        near(np.sqrt(0.5), 5000),
        near(np.sqrt(2), 5000),
    ):
        exact = np.log(x.astype(np.float64))
        error = np.abs(log_f32(x) - exact)
        assert (error <= 2e-7 * np.abs(exact)).all()


def test_a_weight_is_the_same_whether_its_power_of_two_is_rounded_once_or_twice() -> None:
    """The kernels round z * LOG2_E + ROUND once. That gives another power of two only where the product, rounded, lies
    half-way between two whole numbers; there both must give the same weight."""
    ties = np.array([(k + 0.5) / LOG2_E for k in range(36)])
    z = np.concatenate([near(-tie, 16) for tie in ties])
    twice = (z * LOG2_E + ROUND) - ROUND
    once = (z.astype(np.float64) * LOG2_E + ROUND).astype(np.float32) - ROUND
    r = (z - once * LN2_HIGH) - once * LN2_LOW
    p = np.full_like(r, EXP_P[0])
    for c in EXP_P[1:]:
        p = p * r + c
    e = ((p * (r * r) + r) + np.float32(1)) * np.exp2(once)
    step = np.float32(2.0**-11)
    assert (once != twice).any()
    assert ((e + step) - step == weights(np.concatenate([np.zeros(1, np.float32), z]), np.float32(1))[1:]).all()
