"""What a request remembers for its sampler: which tokens its penalties see, and when its stop ids become possible."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from potok.protocol import Sampling
from potok.sampling.rows import SampleRows
from potok.sampling.state import RowBuilder, RowState, build_rows

PROMPT = [5, 3, 5, 9]


def seen(state: RowState) -> dict[int, int]:
    lists = build_rows([state], array("i", [0]), False).seen
    if lists is None:
        return {}
    assert len(set(lists.ids.tolist())) == len(lists.ids)
    return dict(zip(lists.ids.tolist(), lists.values.tolist(), strict=True))


def biases(state: RowState) -> dict[int, float]:
    lists = build_rows([state], array("i", [0]), False).biases
    return {} if lists is None else dict(zip(lists.ids.tolist(), lists.values.tolist(), strict=True))


def plain_of(rows: SampleRows) -> tuple[object, ...]:
    """The same, comparable."""
    lists = [None if some is None else [part.tolist() for part in some] for some in (rows.seen, rows.biases)]
    return *rows[:4], *lists


def test_a_repetition_penalty_sees_prompt_and_output() -> None:
    state = RowState(Sampling(repetition_penalty=1.1), PROMPT)
    assert seen(state) == {3: 0, 5: 0, 9: 0}
    for token in (5, 7, 5):
        state.push(token)
    assert seen(state) == {3: 0, 5: 2, 7: 1, 9: 0}


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_the_other_penalties_see_the_output_alone(name: str) -> None:
    state = RowState(Sampling(**{name: 0.5}), PROMPT)
    assert seen(state) == {}
    for token in (5, 7, 5):
        state.push(token)
    assert seen(state) == {5: 2, 7: 1}


def test_without_penalties_nothing_is_kept() -> None:
    state = RowState(Sampling(temperature=1), PROMPT)
    state.push(5)
    assert seen(state) == {}


@pytest.mark.parametrize("distinct", [3, 1000])
def test_rebuilding_from_the_output_gives_the_same_rows(distinct: int) -> None:
    sampling = Sampling(
        repetition_penalty=2, frequency_penalty=1, logit_bias=((4, 1.0),), stop_ids=(2, 4), min_tokens=700
    )
    output = np.random.default_rng(distinct).integers(0, distinct, 1400).tolist()
    state = RowState(sampling, PROMPT)
    for i, token in enumerate(output):
        if i % 350 == 0 or i in (699, 701):
            rebuilt = RowState(sampling, PROMPT, output[:i])
            assert seen(state) == seen(rebuilt)
            assert biases(state) == biases(rebuilt)
        state.push(token)
    counts = np.bincount(output)
    assert {k: v for k, v in seen(state).items() if v} == {k: int(v) for k, v in enumerate(counts) if v}


def test_stop_ids_are_impossible_until_min_tokens() -> None:
    state = RowState(Sampling(logit_bias=((4, 1.5), (6, -2.0)), stop_ids=(2, 4), min_tokens=2), PROMPT)
    early, late = {4: -np.inf, 6: -2.0, 2: -np.inf}, {4: 1.5, 6: -2.0}
    assert biases(state) == early
    state.push(0)
    assert biases(state) == early
    state.push(0)
    assert biases(state) == late


def test_min_tokens_without_stop_ids_and_stop_ids_without_min_tokens_bias_nothing() -> None:
    assert biases(RowState(Sampling(min_tokens=5), PROMPT)) == {}
    assert biases(RowState(Sampling(stop_ids=(1, 2)), PROMPT)) == {}


def test_rows_stand_in_the_order_given_each_with_its_own_part() -> None:
    samplings = [
        Sampling(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**64 - 1, choice=2, logprobs=4),
        Sampling(presence_penalty=1, frequency_penalty=-1, repetition_penalty=2, logit_bias=((8, -1.0), (7, 3.0))),
        Sampling(logit_bias=((1, 2.0),)),
        Sampling(presence_penalty=2),
    ]
    states = [RowState(s, PROMPT, [9, 9]) for s in samplings]
    rows = build_rows(states, array("i", [10, 20, 30, 40]), True)
    table = rows.table
    assert table["temperature"].tolist() == [0.5, 0, 0, 0]
    assert table["top_k"].tolist() == [3, 0, 0, 0]
    assert table["top_p"].tolist() == [0.25, 1, 1, 1]
    assert table["min_p"].tolist() == [0.125, 0, 0, 0]
    assert table["seed"].tolist() == [2**64 - 1, 0, 0, 0]
    assert table["choice"].tolist() == [2, 0, 0, 0]
    assert rows.position.tolist() == [10, 20, 30, 40]
    assert table["presence"].tolist() == [0, 1, 0, 2]
    assert table["frequency"].tolist() == [0, -1, 0, 0]
    assert table["repetition"].tolist() == [1, 2, 1, 1]
    assert table["logprobs"].tolist() == [4, -1, -1, -1]
    assert rows.seen is not None and rows.biases is not None
    assert rows.seen.indptr.tolist() == [0, 0, 3, 3, 4]
    assert rows.seen.ids.tolist() == [3, 5, 9, 9]
    assert rows.seen.values.tolist() == [0, 0, 2, 2]
    assert rows.biases.indptr.tolist() == [0, 0, 2, 3, 3]
    assert rows.biases.ids.tolist() == [8, 7, 1]
    assert rows.biases.values.tolist() == [-1, 3, 2]
    assert rows.want_hashes and rows.width == 4


def test_a_step_may_sample_nothing() -> None:
    rows = build_rows([], array("i"), False)
    assert rows.table.shape == (0,) and (rows.width, rows.seen, rows.biases) == (0, None, None)


def test_rows_built_step_by_step_are_those_built_anew() -> None:
    """Requests come and go, with penalties, biases, min_tokens and without; the steps of each kind repeat."""
    random = np.random.default_rng(0)
    plain = [RowState(Sampling(temperature=t, logprobs=i), PROMPT) for i, t in enumerate((0.0, 0.5, 1.0))]
    special = [
        RowState(Sampling(presence_penalty=1), PROMPT),
        RowState(Sampling(stop_ids=(2,), min_tokens=9, logit_bias=((4, 1.0),)), PROMPT),
        RowState(Sampling(logit_bias=((8, -1.0),)), PROMPT),
    ]
    builder = RowBuilder()
    shared, states = 0, plain[:1]
    before = build_rows([], array("i"), False)
    for step in range(300):
        if step % 5 == 0:
            states = random.permutation([*plain, *special])[: random.integers(0, 4)].tolist()
        positions = array("i", range(step, step + len(states)))
        want_hashes = step % 7 == 0
        rows = builder.build(states, positions, want_hashes)
        assert plain_of(rows) == plain_of(build_rows(states, positions, want_hashes))
        shared += len(states) > 0 and rows.settings is before.settings
        before = rows
        for state in states:
            state.push(int(random.integers(0, 20)))
    assert shared > 50
