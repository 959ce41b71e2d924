"""Chunks of scripted ids to the text, the ids and the end of one choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from potok.finish import Finish
from potok.params import SamplingParams
from potok.protocol import Chunk, TokenLogprobs
from potok.text.assembler import LOWEST_LOGPROB, ChoiceAssembler, Part, TokenLogprob
from potok.text.stops import StopStrings
from potok.text.tokenizer import Tokenizer

# A B CD EF G H I J K and X in the default model's vocabulary.
A, B, CD, EF, G, H, II, J, K, X = 49, 50, 6998, 9434, 55, 56, 57, 58, 59, 72
ALPHABET = [A, B, CD, EF, G, H, II, J, K]
END = 2


def run(
    tokenizer: Tokenizer, ids: list[int], finish: Finish | None = None, size: int = 1, **params: Any
) -> tuple[list[Part], Part]:
    """All parts, up to the one that is done, of a script in chunks of `size`; and what they amount to."""
    assembler = ChoiceAssembler(tokenizer, SamplingParams(**params))
    parts: list[Part] = []
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        parts.append(assembler.push(Chunk(1, chunk, finish if start + size >= len(ids) else None)))
        if parts[-1].done:
            assert assembler.push(Chunk(1, [A], None)) == Part("", [])
            break
    text = "".join(part.text for part in parts)
    return parts, Part(
        text, [i for part in parts for i in part.token_ids], None, parts[-1].finish_reason, parts[-1].stop_reason
    )


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_stop_string_over_several_tokens(tokenizer: Tokenizer, size: int) -> None:
    parts, whole = run(tokenizer, ALPHABET, size=size, stop=["DEFGHIJ"])
    assert whole == Part("ABC", ALPHABET[:8], None, "stop", "DEFGHIJ")
    assert not any("D" in part.text for part in parts)


@pytest.mark.parametrize("size", [1, 2, 20])
def test_stop_string_that_almost_matches(tokenizer: Tokenizer, size: int) -> None:
    script = [A, B, CD, EF, G, X, K]
    parts, whole = run(tokenizer, script, Finish.LENGTH, size, stop=["DEFGHIJ"])
    assert whole == Part("ABCDEFGXK", script, None, "length", None)
    if size == 1:
        assert [part.text for part in parts] == ["A", "B", "C", "", "", "DEFGX", "K"]


def test_the_first_stop_string_wins(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, ALPHABET, stop=["CD", "DEFG"])[1] == Part("AB", ALPHABET[:3], None, "stop", "CD")


def test_stop_string_can_be_included(tokenizer: Tokenizer) -> None:
    _, whole = run(tokenizer, ALPHABET, stop=["DEFGHIJ"], include_stop_str_in_output=True)
    assert whole == Part("ABCDEFGHIJ", ALPHABET[:8], None, "stop", "DEFGHIJ")


def test_held_back_text_comes_with_the_end(tokenizer: Tokenizer) -> None:
    parts, whole = run(tokenizer, ALPHABET, Finish.LENGTH, stop=["KZ"])
    assert whole == Part("ABCDEFGHIJK", ALPHABET, None, "length", None)
    assert all(part.text for part in parts)


def test_held_back_text_comes_with_an_end_id(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, [A, K, END], Finish.STOP, stop=["KZ"])[1] == Part("AK", [A, K, END], None, "stop", None)


def test_stop_string_in_the_last_allowed_token_is_a_stop(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, [A, CD], Finish.LENGTH, stop=["D"])[1] == Part("AC", [A, CD], None, "stop", "D")


def test_stop_string_made_of_a_broken_character(tokenizer: Tokenizer) -> None:
    whole = run(tokenizer, [A, 10813], Finish.LENGTH, stop=["A\ufffd"])[1]
    assert whole == Part("", [A, 10813], None, "stop", "A\ufffd")


def test_stop_strings_begin_after_min_tokens(tokenizer: Tokenizer) -> None:
    script = [A, B, A, B, A, B]
    assert run(tokenizer, script, stop=["AB"], min_tokens=2)[1] == Part("AB", script[:4], None, "stop", "AB")
    assert run(tokenizer, script, stop=["BA"], min_tokens=2)[1].text == "ABA"


# --- End ids and stop ids


@pytest.mark.parametrize("end", [0, 2])
@pytest.mark.parametrize("skip", [True, False])
def test_end_ids_end_without_being_seen(tokenizer: Tokenizer, end: int, skip: bool) -> None:
    _, whole = run(tokenizer, [A, end], Finish.STOP, skip_special_tokens=skip)
    assert whole == Part("A", [A, end], None, "stop", None)


def test_an_end_id_that_is_an_ordinary_token_is_not_seen_either(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.eot_token_id": CD})
    assert CD in tokenizer.end_ids
    _, whole = run(tokenizer, [A, CD], Finish.STOP, include_stop_str_in_output=True)
    assert whole == Part("A", [A, CD], None, "stop", None)


def test_ignored_end_ids_are_control_tokens_like_others(tokenizer: Tokenizer) -> None:
    script = [A, END, B]
    assert run(tokenizer, script, Finish.LENGTH, ignore_eos=True)[1] == Part("AB", script, None, "length", None)
    shown = run(tokenizer, script, Finish.LENGTH, ignore_eos=True, skip_special_tokens=False)[1].text
    assert shown == "A<|im_end|>B"


def test_stop_ids_are_named_and_shown_only_on_request(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, [A, CD], Finish.STOP, stop_token_ids=[CD])[1] == Part("A", [A, CD], None, "stop", CD)
    shown = run(tokenizer, [A, CD], Finish.STOP, stop_token_ids=[CD], include_stop_str_in_output=True)[1]
    assert shown == Part("ACD", [A, CD], None, "stop", CD)


def test_an_end_id_that_is_also_a_stop_id(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, [A, END], Finish.STOP, stop_token_ids=[END])[1].stop_reason is None
    assert run(tokenizer, [A, END], Finish.STOP, stop_token_ids=[END], ignore_eos=True)[1].stop_reason == END


def test_finish_without_tokens(tokenizer: Tokenizer) -> None:
    assembler = ChoiceAssembler(tokenizer, SamplingParams())
    assert assembler.push(Chunk(0, [], Finish.LENGTH)) == Part("", [], None, "length", None)


# --- Split characters


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([10813, 230, 131], "\U0001f336"),
        ([115], "\ufffd"),
        ([10813, 230], "\ufffd"),
        ([10813, 230, 455], "\ufffdred"),
        ([85, 151, 219], "e\u0301"),
    ],
)
def test_split_characters_are_the_same_in_any_chunks(
    tokenizer: Tokenizer, ids: list[int], text: str, size: int
) -> None:
    parts, whole = run(tokenizer, ids, Finish.LENGTH, size)
    assert whole == Part(text, ids, None, "length", None)
    if text == "\U0001f336":
        assert [part.text for part in parts if part.text] == [text]


# --- Log-probabilities


def test_logprobs_follow_their_tokens(tokenizer: Tokenizer) -> None:
    assembler = ChoiceAssembler(tokenizer, SamplingParams(logprobs=2, stop=["CD"]))
    first = assembler.push(Chunk(1, [10813], None, [TokenLogprobs(-0.5, [10813, A], [-0.5, -math.inf])]))
    assert first.logprobs == [
        TokenLogprob(
            10813,
            "\ufffd",
            b"\xf0\x9f",
            -0.5,
            [TokenLogprob(10813, "\ufffd", b"\xf0\x9f", -0.5), TokenLogprob(A, "A", b"A", LOWEST_LOGPROB)],
        )
    ]
    three = [TokenLogprobs(-1.0, [], []), TokenLogprobs(-2.0, [], []), TokenLogprobs(-3.0, [], [])]
    cut = assembler.push(Chunk(1, [A, CD, B], None, three))
    assert cut.token_ids == [A, CD]
    assert cut.logprobs is not None
    assert [(one.token_id, one.text, one.logprob) for one in cut.logprobs] == [(A, "A", -1.0), (CD, "CD", -2.0)]


def test_no_logprobs_unless_asked_for(tokenizer: Tokenizer) -> None:
    chunk = Chunk(1, [A], None, [TokenLogprobs(-0.5, [], [])])
    assert ChoiceAssembler(tokenizer, SamplingParams()).push(chunk).logprobs is None
    assert ChoiceAssembler(tokenizer, SamplingParams(logprobs=0)).push(chunk).logprobs is not None


# --- Sharing and cost


def test_choices_share_compiled_stops(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=["CD"], include_stop_str_in_output=True)
    stops = StopStrings(params.stop)
    choices = [ChoiceAssembler(tokenizer, params, stops) for _ in range(3)]
    assert [choice.push(Chunk(1, [A, CD])).text for choice in choices] == ["ACD"] * 3


@pytest.mark.parametrize("stop", [[], ["\n\n", "USER:"]])
def test_a_token_costs_little(
    tokenizer: Tokenizer, stop: list[str], lines_run: Callable[[Callable[[], object]], int]
) -> None:
    """100 streams of 10 tokens a second must be nothing: about 1 us and 25 lines of Python for each."""
    chunks = [Chunk(1, [i]) for i in tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 200)]
    assembler = ChoiceAssembler(tokenizer, SamplingParams(stop=stop))

    def push_all() -> None:
        for chunk in chunks:
            assembler.push(chunk)

    assert lines_run(push_all) < 40 * len(chunks)
