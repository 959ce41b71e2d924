from __future__ import annotations

import itertools
import statistics

from hypothesis import given
from hypothesis import strategies as st

from potok.bench.workloads import INDEX_WORDS, WORDS, poisson_arrivals, prompt


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(1, 300), st.data())
def test_a_prompt_has_its_length_and_repeats(seed: int, index: int, num_words: int, data: st.DataObject) -> None:
    shared = data.draw(st.integers(0, num_words - 1))
    text = prompt(seed, index, num_words, shared)
    assert len(text.split(" ")) == num_words
    assert text == prompt(seed, index, num_words, shared)


@given(st.integers(0, 100), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 20))
def test_prompts_share_the_asked_words_and_part_right_after(seed: int, one: int, two: int, shared: int) -> None:
    a, b = (prompt(seed, i, shared + 40, shared).split(" ") for i in (one, two))
    assert a[:shared] == b[:shared]
    if one != two:
        assert a[shared : shared + INDEX_WORDS] != b[shared : shared + INDEX_WORDS]


def test_requests_sent_one_after_another_differ_in_their_first_word() -> None:
    firsts = [prompt(3, i, 48).split(" ", 1)[0] for i in range(len(WORDS))]
    assert len(set(firsts)) == len(WORDS)


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS)


def test_arrivals_are_poisson() -> None:
    """Mean and variance of the gaps of an exponential: 1/rate and 1/rate^2, within four standard errors."""
    times = poisson_arrivals(1, rate=50.0, duration_s=200.0)
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 200.0
    assert abs(len(times) - 10_000) < 4 * 100
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert abs(statistics.pstdev(gaps) - 0.02) < 0.002
    assert times == poisson_arrivals(1, rate=50.0, duration_s=200.0)
    assert times != poisson_arrivals(2, rate=50.0, duration_s=200.0)
