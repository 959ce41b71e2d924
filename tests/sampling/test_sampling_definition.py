"""What the order of operations must do, step by step: of the definition and of each table of kernels."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from sampling_kit import SAMPLERS, Sampler, difference, rows_of

from potok.protocol import Sampling
from potok.sampling.philox import uniform
from potok.sampling.reference import hash_row, order, weights


@pytest.fixture(params=list(SAMPLERS))
def sample(request: pytest.FixtureRequest) -> Sampler:
    return SAMPLERS[request.param]


def logits_of(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def draws(sample: Sampler, x: np.ndarray, sampling: Sampling, count: int) -> np.ndarray:
    """`count` tokens of one row, at as many positions."""
    rows = rows_of(*[sampling] * count)
    rows = rows._replace(position=np.arange(count, dtype=np.int32))
    return sample(np.broadcast_to(x, (count, len(x))).copy(), rows).ids


# ---- Steps 0 and 1


def test_a_row_that_is_not_finite_fails_alone(sample: Sampler) -> None:
    good = np.random.default_rng(0).standard_normal(200).astype(np.float32)
    sampling = Sampling(temperature=1, seed=3, logprobs=2, logit_hash=True)
    alone = sample(good[None], rows_of(sampling))
    for bad_value in (np.nan, np.inf, -np.inf):
        for place in (0, 100, 199):  # in whole spans, and in the last, shorter one
            x = np.stack([good, good, good])
            x[1, place] = bad_value
            got = sample(x, rows_of(*[sampling] * 3))
            assert got.ids.tolist() == [alone.ids[0], -1, alone.ids[0]]
            assert got.logprob.tolist() == [alone.logprob[0], 0, alone.logprob[0]]
            assert got.top_ids[1].tolist() == [-1, -1]
            assert got.hashes[0] == got.hashes[2] == alone.hashes[0] != got.hashes[1]


def test_logprobs_are_those_of_the_raw_row(sample: Sampler) -> None:
    x = (5 * np.random.default_rng(1).standard_normal(3000)).astype(np.float32)
    x[10] = x[2000] = x.max() + 1  # a tie at the top: the lower id comes first
    exact = x.astype(np.float64) - x.max()
    exact -= np.log(np.exp(exact).sum())
    plain = Sampling(logprobs=20)
    edited = Sampling(
        temperature=0.5, top_k=3, seed=1, logprobs=20, repetition_penalty=3, logit_bias=((10, -50), (7, 90))
    )
    for sampling in (plain, edited):
        got = sample(x[None], rows_of(sampling, prompt=[10, 11, 12], output=[11]))
        assert got.top_ids[0].tolist() == np.argsort(-x, kind="stable")[:20].tolist()
        np.testing.assert_allclose(got.top_logprobs[0], exact[got.top_ids[0]], atol=3e-6)
        np.testing.assert_allclose(got.logprob[0], exact[got.ids[0]], atol=3e-6)
    assert got.ids[0] == 7  # so the edits were in force


def test_logprobs_past_the_vocabulary_and_past_the_asked(sample: Sampler) -> None:
    got = sample(logits_of([1, 3, 2], [1, 3, 2]), rows_of(Sampling(logprobs=5), Sampling(logprobs=1)))
    assert got.top_ids.tolist() == [[1, 2, 0, -1, -1], [1, -1, -1, -1, -1]]
    assert (got.top_logprobs[0, :3] < 0).all() and got.top_logprobs[0, 3:].tolist() == [0, 0]
    assert got.logprob[0] == got.top_logprobs[0, 0]


def test_the_hash_sees_every_bit_and_every_place(sample: Sampler) -> None:
    x = np.random.default_rng(2).standard_normal(77).astype(np.float32)
    swapped, nudged, longer = x.copy(), x.copy(), np.append(x, np.float32(0))
    swapped[[3, 4]] = x[[4, 3]]
    nudged[76] = np.nextafter(x[76], np.float32(9))
    hashes = [int(sample(v[None], rows_of(Sampling(logit_hash=True))).hashes[0]) for v in (x, swapped, nudged, longer)]
    assert len(set(hashes)) == 4
    assert hashes[0] == hash_row(x)


def test_the_hash_is_the_written_one() -> None:
    """Step 0 in whole numbers, so that the formula in the text cannot drift."""
    x = np.array([1.5, -0.0, 3e-39], np.float32)
    total = 0
    for i, bits in enumerate(x.view(np.uint32).tolist()):
        v = (i << 32 | bits) * 0x9E3779B97F4A7C15 % 2**64
        total += (v ^ v >> 32) * 0xBF58476D1CE4E5B9
    assert hash_row(x) == total % 2**64


# ---- Steps 2 and 3


def test_greedy_takes_the_highest_and_the_lowest_id_among_equals(sample: Sampler) -> None:
    x = np.zeros(300, np.float32)
    x[[40, 170, 280]] = 2
    assert sample(x[None], rows_of(Sampling())).ids == 40
    assert sample(np.zeros((1, 300), np.float32), rows_of(Sampling(temperature=9e-6))).ids == 0


def test_presence_and_frequency_see_the_output_repetition_sees_the_prompt_too(sample: Sampler) -> None:
    """The prompt is one word, over and over, and the model would say it again."""
    x = np.full(5000, -1, np.float32)
    x[[2382, 17]] = [4, 3]
    prompt = [455, 2382, 2382, 2382]
    presence, frequency = Sampling(presence_penalty=2), Sampling(frequency_penalty=2)
    repetition = Sampling(repetition_penalty=5)
    first = sample(np.stack([x, x, x, x]), rows_of(Sampling(), presence, frequency, repetition, prompt=prompt))
    assert first.ids.tolist() == [2382, 2382, 2382, 17]
    second = sample(
        np.stack([x, x, x, x]), rows_of(Sampling(), presence, frequency, repetition, prompt=prompt, output=[2382])
    )
    assert second.ids.tolist() == [2382, 17, 17, 17]


def test_frequency_falls_by_its_value_for_each_earlier_output(sample: Sampler) -> None:
    """Every token costs 2 more each time, so a flat row is visited evenly, in the order of ids."""
    x = np.zeros((1, 5), np.float32)
    output: list[int] = []
    for _ in range(15):
        output.append(int(sample(x, rows_of(Sampling(frequency_penalty=2), output=output)).ids[0]))
    assert output == [0, 1, 2, 3, 4] * 3


def test_presence_costs_once(sample: Sampler) -> None:
    x = logits_of([1.5, 1, 0])
    seen_often = rows_of(Sampling(presence_penalty=1), output=[0, 0, 0, 0, 1])
    assert sample(x, seen_often).ids == 0  # 0.5, 0, 0
    assert sample(x, rows_of(Sampling(frequency_penalty=1), output=[0, 0, 0, 0, 1])).ids == 1  # -2.5, 0, 0


def test_repetition_pushes_down_on_both_sides_of_zero(sample: Sampler) -> None:
    sampling = Sampling(repetition_penalty=2)
    assert sample(logits_of([3, 2]), rows_of(sampling, prompt=[0])).ids == 1
    assert sample(logits_of([-2, -3]), rows_of(sampling, prompt=[0])).ids == 1
    assert sample(logits_of([3, 2]), rows_of(sampling, prompt=[0, 1])).ids == 0


def test_repetition_comes_before_frequency(sample: Sampler) -> None:
    both = Sampling(repetition_penalty=2, frequency_penalty=2)
    # 8 / 2 - 2 = 2 beats 1.5; (8 - 2) / 2 = 3 would beat 2.5 as well
    assert sample(logits_of([8, 1.5]), rows_of(both, output=[0])).ids == 0
    assert sample(logits_of([8, 2.5]), rows_of(both, output=[0])).ids == 1


def test_bias_is_added_after_the_penalties(sample: Sampler) -> None:
    biased = Sampling(repetition_penalty=4, logit_bias=((0, 4.0),))
    assert sample(logits_of([8, 5]), rows_of(biased, prompt=[0])).ids == 0  # 8 / 4 + 4 = 6; (8 + 4) / 4 = 3
    assert sample(logits_of([0, 0, 0]), rows_of(Sampling(logit_bias=((2, 1.0),)))).ids == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_an_impossible_id_is_never_taken(sample: Sampler, temperature: float) -> None:
    x = np.zeros(70, np.float32)
    x[:3] = 50
    stops = Sampling(temperature=temperature, stop_ids=(0, 1, 2), min_tokens=1)
    got = draws(sample, x, stops, 100)
    assert got.min() >= 3
    assert sample(x[None], rows_of(stops, output=[5])).ids[0] <= 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_is_possible_the_bias_is_ignored(sample: Sampler, temperature: float) -> None:
    nothing = Sampling(temperature=temperature, logprobs=1, stop_ids=(0, 1, 2), min_tokens=1)
    got = sample(logits_of([1, 3, 2]), rows_of(nothing))
    assert got.ids == 1 and got.logprob == got.top_logprobs[0, 0]


def test_overflow_stays_a_number(sample: Sampler) -> None:
    x = logits_of([3e38, 1, 2e38, -3e38])
    for temperature in (0, 1):
        strong = Sampling(temperature=temperature, repetition_penalty=0.01, seed=1)
        assert sample(x, rows_of(strong, prompt=[0, 2, 3])).ids[0] in (0, 2)  # both become the largest float


# ---- Steps 5 to 7


def test_weights_are_multiples_of_one_step_and_fall_along_the_order() -> None:
    rng = np.random.default_rng(3)
    for temperature in (0.1, 1.0, 1.7, 30.0):
        x = (10 * rng.standard_normal(20000)).astype(np.float32)
        w = weights(x, np.float32(temperature))
        exact = np.exp((x.astype(np.float64) - x.max()) / temperature)
        np.testing.assert_allclose(w, exact, rtol=5e-6, atol=2.0**-35)
        assert (w * 2**34 == np.floor(w * 2**34)).all()
        assert (np.diff(w[order(x)]) <= 0).all()
        assert w.max() == 1
        # exact: the sum in any order is the sum of whole numbers
        assert float(sum(Fraction(v) for v in w.tolist())) == w.sum() == w[::-1].cumsum()[-1] == w.cumsum()[-1]


def expected_kept(x: np.ndarray, sampling: Sampling) -> set[int]:
    """The ids that the filters leave, in exact-enough float64; the cases below stay clear of the edges."""
    p = np.exp((x.astype(np.float64) - x.max()) / sampling.temperature)
    ids = sorted(range(len(x)), key=lambda i: (-x[i], i))
    ids = [i for i in ids if p[i] >= sampling.min_p]
    if sampling.top_k > 0:
        ids = ids[: sampling.top_k]
    need, total, kept = sampling.top_p * sum(p[i] for i in ids), 0.0, []
    for i in ids:
        kept.append(i)
        total += p[i]
        if total >= need:
            break
    return set(kept)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 4},
        {"top_p": 0.53},
        {"top_p": 0.9},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"top_k": 5, "top_p": 0.71},
        {"top_k": 2, "min_p": 0.11},
        {"top_p": 0.77, "min_p": 0.11},
        {"top_k": 6, "top_p": 0.83, "min_p": 0.05},
    ],
)
def test_filters_keep_what_they_say(sample: Sampler, filters: dict[str, float]) -> None:
    x = np.log(np.array([4, 1, 9, 6, 2, 6, 3, 0.5, 0.01, 5], np.float32))
    sampling = Sampling(temperature=1.25, seed=5, **filters)
    assert set(draws(sample, x, sampling, 400).tolist()) == expected_kept(x, sampling)


def test_top_k_among_equals_keeps_the_lowest_ids(sample: Sampler) -> None:
    x = np.zeros(200, np.float32)
    assert set(draws(sample, x, Sampling(temperature=1, top_k=3), 200).tolist()) == {0, 1, 2}


def test_the_smallest_top_p_is_greedy(sample: Sampler) -> None:
    x = np.random.default_rng(4).standard_normal(500).astype(np.float32)
    assert set(draws(sample, x, Sampling(temperature=2, top_p=1e-6), 50).tolist()) == {int(np.argmax(x))}


def test_the_draw_is_the_inverse_of_the_cumulative_distribution(sample: Sampler) -> None:
    """Four equal ids: the random number's quarter names the id."""
    got = draws(sample, np.zeros(4, np.float32), Sampling(temperature=1, seed=11, choice=2), 200)
    assert got.tolist() == [int(4 * uniform(11, 2, position)) for position in range(200)]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_tokens_come_as_often_as_their_probability(sample: Sampler, temperature: float) -> None:
    x = np.array([0, 2, 1, -1, 1.5, -3, 0.5, 2, -0.5, 1], np.float32)
    count = 4000
    got = np.bincount(draws(sample, x, Sampling(temperature=temperature, seed=99), count), minlength=len(x))
    p = np.exp(x / temperature)
    expected = count * p / p.sum()
    assert ((got - expected) ** 2 / expected).sum() < 33.7  # chi-square of 9 degrees passes it once in 10^4


# ---- A token depends on its request alone


def wide_row(seed: int) -> np.ndarray:
    return (2 * np.random.default_rng(seed).standard_normal(1500)).astype(np.float32)


def test_a_seed_repeats_and_choices_differ(sample: Sampler) -> None:
    x = wide_row(0)
    seeded = Sampling(temperature=1, seed=7)
    once, again = draws(sample, x, seeded, 32), draws(sample, x, seeded, 32)
    assert once.tolist() == again.tolist()
    second = draws(sample, x, replace_sampling(seeded, choice=1), 32)
    assert once.tolist() != second.tolist()
    assert second.tolist() == draws(sample, x, replace_sampling(seeded, choice=1), 32).tolist()
    assert draws(sample, x, replace_sampling(seeded, seed=8), 32).tolist() != once.tolist()
    assert draws(sample, x, replace_sampling(seeded, seed=7 + 2**32), 32).tolist() != once.tolist()


def replace_sampling(sampling: Sampling, **changes: int) -> Sampling:
    return Sampling(**{name: getattr(sampling, name) for name in sampling.__struct_fields__} | changes)


def test_neighbours_change_nothing(sample: Sampler) -> None:
    """Each row alone, and among the others in two orders, with everything that a row can ask."""
    samplings = [
        Sampling(temperature=1, seed=7, logprobs=3, logit_hash=True),
        Sampling(temperature=1, seed=7, logprobs=3, logit_hash=True),
        Sampling(logprobs=5, repetition_penalty=1.5),
        Sampling(temperature=1.5, seed=1, top_k=50, top_p=0.9, presence_penalty=1),
        Sampling(temperature=0.3, seed=2, min_p=0.05, logit_bias=((3, 5.0), (9, -5.0))),
        Sampling(temperature=2, seed=3, logprobs=0),
    ]
    x = np.stack([wide_row(1), wide_row(1), *[wide_row(i) for i in range(2, 6)]])
    together = sample(x, rows_of(*samplings, prompt=[3, 4], output=[5, 6, 5]))
    backwards = sample(x[::-1].copy(), rows_of(*samplings[::-1], prompt=[3, 4], output=[5, 6, 5]))
    assert together.ids[0] == together.ids[1]
    for name in ("ids", "logprob", "top_ids", "top_logprobs", "hashes"):
        assert getattr(together, name).tobytes() == getattr(backwards, name)[::-1].tobytes()
    for i, sampling in enumerate(samplings):
        rows = rows_of(replace_sampling(sampling, logit_hash=True), prompt=[3, 4], output=[5, 6, 5])
        alone = sample(x[i : i + 1], rows)
        width = alone.top_ids.shape[1]
        among = type(together)(
            *(getattr(together, name)[i : i + 1] for name in ("ids", "logprob")),
            together.top_ids[i : i + 1, :width],
            together.top_logprobs[i : i + 1, :width],
            together.hashes[i : i + 1],
        )
        assert difference(alone, among) is None, i
