"""The cost model: it finds what steps cost, follows a machine that changes, and its inverse is one."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from potok.core.cost import SPREADS, CostModel, Work, non_negative, prompt_context

#: Of a small model on two cores, in us: a step, a row, a sampled row, a token read, a prompt's row and token.
TRUE = (2_400.0, 850.0, 280.0, 0.55, 0.64)


def us(work: Work) -> float:
    return sum(c * x for c, x in zip(TRUE, (1, *work), strict=True))


def steps(rng: random.Random, n: int, depth: int = 300) -> list[Work]:
    """Decoding, and now and then a chunk of a prompt; so deep."""
    found = []
    for _ in range(n):
        rows = rng.choice([1, 2, 8, 8, 8, 32, 100])
        context = sum(rng.randint(1, depth) for _ in range(rows))
        chunk = rng.randint(16, 128) if rng.random() < 0.3 else 0
        start = rng.randint(0, depth)
        found.append(Work(rows + chunk, rows, context, prompt_context(start, chunk)))
    return found


def errors(model: CostModel, works: list[Work], rng: random.Random, noise: float, speed: float = 1.0) -> list[float]:
    """Relative errors of each expectation, before the step that it is about is seen."""
    found = []
    for work in works:
        took = us(work) * speed * rng.lognormvariate(0, noise)
        found.append(abs(model.step_us(work) / took - 1))
        model.observe(work, round(took))
    return sorted(found)


def p90(sorted_errors: list[float]) -> float:
    return sorted_errors[int(0.9 * len(sorted_errors))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("first_guess", [0.0, 300.0, 900.0, 3_000.0])
def test_nine_of_ten_steps_are_foreseen_within_15_percent(seed: int, first_guess: float) -> None:
    rng = random.Random(seed)
    model = CostModel(first_guess)
    errors(model, steps(rng, 200), rng, 0.05)
    assert p90(errors(model, steps(rng, 300), rng, 0.05)) < 0.15


def test_prompt_that_gets_deeper_than_anything_seen_is_foreseen_all_the_way() -> None:
    rng = random.Random(1)
    model = CostModel(900.0)
    errors(model, steps(rng, 200), rng, 0.05)
    deep = [Work(8 + 64, 8, 8 * (200 + i), prompt_context(64 * i, 64)) for i in range(100)]
    assert p90(errors(model, deep, rng, 0.05)) < 0.15


@pytest.mark.parametrize("speed", [0.6, 2.0])
def test_machine_that_changes_its_speed_is_followed_in_thirty_steps(speed: float) -> None:
    rng = random.Random(2)
    model = CostModel(900.0)
    errors(model, steps(rng, 400), rng, 0.03)
    errors(model, steps(rng, 30), rng, 0.03, speed)
    assert p90(errors(model, steps(rng, 200), rng, 0.03, speed)) < 0.15


@pytest.mark.parametrize("speed", [0.87, 1.15])
def test_small_change_of_speed_is_followed_in_six_steps(speed: float) -> None:
    rng = random.Random(3)
    model = CostModel(900.0)
    errors(model, steps(rng, 405), rng, 0.0)
    errors(model, steps(rng, 6), rng, 0.0, speed)
    assert errors(model, steps(rng, 5), rng, 0.0, speed)[-1] < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_first_prompts_ever_are_foreseen_after_four(seed: int) -> None:
    rng = random.Random(seed)
    model = CostModel(300.0)
    errors(model, [Work(8, 8, 8 * (200 + i), 0) for i in range(64 + seed)], rng, 0.02)
    found = []
    for i in range(12):
        prompt, alone = Work(72, 8, 8 * 300, prompt_context(64 * i + 1000, 64)), Work(8, 8, 8 * 300, 0)
        found += errors(model, [prompt], rng, 0.0)
        errors(model, [alone], rng, 0.0)
    assert sum(found[4:]) / 8 < 0.045


def test_hiccup_changes_little() -> None:
    rng = random.Random(3)
    model = CostModel(900.0)
    errors(model, steps(rng, 400), rng, 0.03)
    work = Work(8, 8, 1000, 0)
    before = model.step_us(work)
    model.observe(work, 5_000_000)
    assert model.step_us(work) < 1.25 * before


def test_spread_is_what_three_of_four_stay_below() -> None:
    rng = random.Random(4)
    model = CostModel(900.0)
    errors(model, steps(rng, 500), rng, 0.15)
    above = 0
    for work in steps(rng, 1000):
        took = us(work) * rng.lognormvariate(0, 0.15)
        above += took > model.spread * model.step_us(work)
        model.observe(work, round(took))
    assert 170 <= above <= 330


@pytest.mark.parametrize(("noise", "spread"), [(0.0, SPREADS[0]), (3.0, SPREADS[1])])
def test_spread_stays_within_reason(noise: float, spread: float) -> None:
    rng = random.Random(7)
    model = CostModel(900.0)
    errors(model, steps(rng, 1000), rng, noise)
    assert SPREADS[0] <= model.spread <= SPREADS[1] and abs(model.spread - spread) < 0.1


def test_what_a_token_of_a_prompt_takes_is_not_unlearnt_while_there_is_none() -> None:
    rng = random.Random(8)
    model = CostModel(850.0)
    for i in range(200):  # a step costs far more than its only row
        work = Work(1, 1, 50 + i, 0)
        model.observe(work, round((20_000 + us(work)) * rng.lognormvariate(0, 0.05)))
    assert 0.5 < model.prompt_us(0, 100) / (850 * 100) < 2


def test_solving_anew_changes_nothing_at_once() -> None:
    """What follows the machine's speed, and what the equations say, are not to be applied both."""
    rng = random.Random(9)
    model = CostModel(900.0)
    errors(model, steps(rng, 400), rng, 0.0)
    errors(model, steps(rng, 60), rng, 0.0, 2.0)
    assert errors(model, steps(rng, 200), rng, 0.0, 2.0)[-1] < 0.15


@pytest.mark.parametrize("start", [0, 100, 6000])
@pytest.mark.parametrize("room_us", [1, 900, 5_000, 60_000, 900_000])
def test_tokens_in_a_time_take_no_longer(start: int, room_us: int) -> None:
    rng = random.Random(5)
    model = CostModel(900.0)
    errors(model, steps(rng, 200), rng, 0.05)
    n = model.tokens_in(room_us, start)
    assert model.prompt_us(start, n) <= room_us * (1 + 1e-9)
    assert model.prompt_us(start, n + 1) > room_us
    for n in range(1, 300):
        exact = model.prompt_us(start, n)
        assert (model.tokens_in(exact * (1 - 1e-9), start), model.tokens_in(exact * (1 + 1e-9), start)) == (n - 1, n)


def test_before_anything_is_known_there_is_no_bound() -> None:
    model = CostModel()
    assert not model.known and model.step_us(Work(5, 5, 50, 0)) == 0 and model.tokens_in(1, 0) >= 10**6
    assert model.tokens_in(0, 0) == model.tokens_in(-5, 0) == 0
    model.observe(Work(5, 5, 50, 0), 5_000)
    assert model.known and 4_000 < model.step_us(Work(5, 5, 50, 0)) < 6_000


def test_constrained_least_squares_against_all_subsets() -> None:
    """Minimises |Xc - 1|^2 over c >= 0: the best is the unconstrained one of some subset of the variables."""
    rng = np.random.default_rng(6)
    for _ in range(200):
        x = rng.uniform(-1, 2, (12, 4))
        subsets = [s for n in range(1, 5) for s in itertools.combinations(range(4), n)]
        losses = [1.0 * len(x)]
        for columns in map(list, subsets):
            c, *_ = np.linalg.lstsq(x[:, columns], np.ones(12), rcond=None)
            if c.min() >= 0:
                losses.append(float(((x[:, columns] @ c - 1) ** 2).sum()))
        a, b = x.T @ x, x.sum(0)
        found = non_negative([a[i, : i + 1].tolist() for i in range(4)], b.tolist())
        assert found is not None and min(found) >= 0
        # Dropping one after the other is not always the best there is, but never far from it.
        assert ((x @ found - 1) ** 2).sum() <= 1.1 * min(losses) + 1e-3
    assert non_negative([[0.0], [0.0, 0.0]], [0.0, 0.0]) is None


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_whatever_steps_take_something_can_be_expected(first: int) -> None:
    """Also when what one part of the work costs is all that they show."""
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        model = CostModel(rng.choice([0.0, 500.0]))
        for _ in range(60):
            rows = rng.choice([1, 5, 64, 512])
            sampled, decode = rng.choice([0, 1, rows]), rng.choice([0, rng.randrange(10_000)])
            work = Work(rows, sampled, decode, rng.choice([0, prompt_context(rng.randrange(4_000), rows)]))
            model.observe(work, rng.choice([rng.randrange(10**6), 1_000 * sampled, decode, work.prompt_context // 100]))
            assert 0 <= model.step_us(work) < 10**12 and model.tokens_in(1_000, 5) >= 0
