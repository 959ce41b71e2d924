"""What `SamplingParams.check` refuses: everything that is no legal value, whatever a program may put there."""

from __future__ import annotations

from typing import Any

import pytest

from potok.errors import ClientError
from potok.params import BOUNDS, MAY_BE_NONE, SamplingParams

VOCAB = 100
NUMBERS = [name for name in BOUNDS if name != "logit_bias"]
HUGE = 10**5000  # Python does not spell out such a number, and no float holds it


def refused(**fields: Any) -> ClientError:
    with pytest.raises(ClientError) as raised:
        SamplingParams(**fields).check(VOCAB)
    [name] = fields
    assert raised.value.param == name
    assert name.partition("_")[0] in str(raised.value) and len(str(raised.value)) < 200
    return raised.value


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_every_sort(name: str) -> None:
    for value in ("1", True, [], float("nan"), float("inf"), HUGE, -HUGE, 10**400, 1j, "x" * 10**6):
        refused(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_none_where_it_means_something(name: str) -> None:
    if name in MAY_BE_NONE:
        SamplingParams(**{name: None}).check(VOCAB)
    else:
        refused(**{name: None})


@pytest.mark.parametrize("value", [None, 5, [""], [5], [None], ["x" * 1025], ["x"] * 17, {"a"}])
def test_stop(value: Any) -> None:
    refused(stop=value)


def test_stop_token_ids() -> None:
    for value in (5, None, "1", [VOCAB], [-1], [HUGE], [[HUGE]], [True], [1.0], [1] * 129):
        refused(stop_token_ids=value)


def test_logit_bias() -> None:
    for key in (VOCAB, -1, HUGE, "5", True, None):
        refused(logit_bias={key: 1.0})
    for value in (None, 101, HUGE, float("nan"), "1", True):
        refused(logit_bias={5: value})
    for bias in (5, None, [1], dict.fromkeys(range(1025), 1.0)):
        refused(logit_bias=bias)


def test_the_ends_of_every_bound_are_legal() -> None:
    for name in NUMBERS:
        for value in (BOUNDS[name].low, BOUNDS[name].high):
            number = int(value) if BOUNDS[name].integer else value
            fields = {name: number} | ({"max_tokens": None} if name == "min_tokens" else {})
            SamplingParams(**fields).check(VOCAB)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="abc").stop == ["abc"]
