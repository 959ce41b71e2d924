"""Stop strings against a definition that looks at the whole text after every character."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potok.text.stops import StopMatcher, StopStrings


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the stop string begins that is complete first (the longest of several at once), and which it is."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            longest = max(here, key=len)
            return end - len(longest), longest
    return None


def held_back(text: str, stops: list[str]) -> int:
    """Characters at the end of text with which some stop string begins."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


WORDS = st.text("abc", min_size=1, max_size=5)


@given(st.lists(WORDS, min_size=1, max_size=4), st.lists(st.text("abcd", max_size=4), max_size=12), st.booleans())
def test_matches_the_plain_definition(stops: list[str], pushes: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    shown, seen = "", ""
    for text in pushes:
        shown += matcher.push(text)
        seen += text
        met = first_stop(seen, stops)
        if met is not None:
            start, stop = met
            assert matcher.matched == stop
            assert shown == seen[:start] + (stop if include else "")
            assert matcher.push("abcd") == matcher.finish() == ""
            return
        assert matcher.matched is None
        assert shown == seen[: len(seen) - held_back(seen, stops)]
    assert shown + matcher.finish() == seen


@given(st.lists(WORDS, min_size=1, max_size=4), st.text("abcd", max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_the_cut_into_pushes_changes_nothing(stops: list[str], text: str, cuts: list[int]) -> None:
    def run(parts: list[str]) -> tuple[str, str | None]:
        matcher = StopMatcher(stops)
        return "".join([*map(matcher.push, parts), matcher.finish()]), matcher.matched

    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert run([text]) == run(list(text)) == run([text[a:b] for a, b in pairwise(edges)])


def test_held_text_is_released_as_soon_as_it_cannot_match() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.push(text) for text in ["AB", "CD", "EF", "G", "X", "K"]] == ["AB", "C", "", "", "DEFGX", "K"]


def test_several_streams_share_compiled_stops() -> None:
    stops = StopStrings(["END"])
    one, other = StopMatcher(stops), StopMatcher(stops, include=True)
    assert (one.push("xEN"), other.push("E"), one.push("D"), other.push("NDy")) == ("x", "", "", "END")
    assert one.matched == other.matched == "END"


def test_an_empty_stop_string_is_no_stop_string() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_long_repetitive_stops_cost_no_more_per_character(lines_run: Callable[[Callable[[], object]], int]) -> None:
    """The worst that a request may ask for: 16 stop strings of 1024 characters that almost match all the time."""
    stops = StopStrings(["a" * (1008 + i) + "b" for i in range(15)] + ["a" * 1000 + "c"])

    def push(count: int) -> None:
        matcher = StopMatcher(stops)
        for _ in range(count):
            matcher.push("aaaa")

    def seconds(count: int) -> float:
        start = time.process_time()
        push(count)
        return time.process_time() - start

    push(1)
    assert min(seconds(4000) for _ in range(3)) < 30 * min(seconds(400) for _ in range(3))
    assert lines_run(lambda: push(4000)) < 4000 * 100
