"""The incremental detokenizer against decoding all bytes at once."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_kit import CHAR_OF_BYTE, small_metadata

from potok.text.detokenizer import Detokenizer
from potok.text.tokenizer import Tokenizer


def deltas(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    """What each token gave, and last what the end gave."""
    stream = Detokenizer(tokenizer, skip_special)
    return [*map(stream.push, ids), stream.finish()]


FAMILY = [10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117]


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ([10813, 230, 131], ["\U0001f336"]),
        ([23274, 115, 40993, 179, 120, 248], None),
        ([85, 151, 219], ["e", "\u0301"]),
        (FAMILY, None),
        ([115], ["\ufffd"]),
        ([10813, 230], ["\ufffd"]),
        ([10813, 230, 455], ["\ufffdred"]),
        ([19556, 2, 905], ["Hello", " world"]),
        ([10813, 2, 230, 131], ["\U0001f336"]),
        ([], []),
    ],
)
def test_split_characters(tokenizer: Tokenizer, ids: list[int], shown: list[str] | None) -> None:
    parts = [part for part in deltas(tokenizer, ids) if part]
    assert "".join(parts) == tokenizer.decode(ids)
    if shown is not None:
        assert parts == shown
    else:
        assert "\ufffd" not in "".join(parts)


def test_three_ideographs_and_a_family_of_emoji(tokenizer: Tokenizer) -> None:
    ideographs = "".join(deltas(tokenizer, [23274, 115, 40993, 179, 120, 248]))
    assert len(ideographs) == 3
    assert all("\u3000" < char < "\ua000" for char in ideographs)
    family = "".join(deltas(tokenizer, FAMILY))
    assert [ord(char) for char in family if char != "\u200d"] == [0x1F469, 0x1F469, 0x1F467]
    assert family.count("\u200d") == 2


def test_control_tokens_can_be_shown(tokenizer: Tokenizer) -> None:
    assert "".join(deltas(tokenizer, [1, 19556, 2], skip_special=False)) == "<|im_start|>Hello<|im_end|>"
    assert "".join(deltas(tokenizer, [1, 19556, 2])) == "Hello"


BYTES = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=3),
        st.characters(exclude_categories=["Cs"]).map(str.encode),
        st.sampled_from([b"\xf0\x9f", b"\x8c", b"\xb6", b"\xe4\xb8", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90", b"a"]),
    ),
    max_size=20,
)


@given(BYTES, st.lists(st.integers(0, 40), max_size=4))
def test_joined_deltas_are_the_bytes_decoded_at_once(tokens: list[bytes], control_at: list[int]) -> None:
    """Every chunk of bytes is a token of its own, so that characters break at every place."""
    spellings = ["".join(CHAR_OF_BYTE[byte] for byte in token) for token in dict.fromkeys(tokens)]
    metadata = small_metadata()
    known = metadata["tokenizer.ggml.tokens"]
    known += [spelling for spelling in spellings if spelling not in known]
    metadata["tokenizer.ggml.token_type"] = [3] * 3 + [1] * (len(known) - 3)
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = [known.index("".join(CHAR_OF_BYTE[byte] for byte in token)) for token in tokens]
    whole = b"".join(tokens).decode("utf-8", "replace")
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == whole == tokenizer.decode(ids)
    # Nothing is held back that is complete: after each token, all but an unfinished character has been shown.
    for i in range(len(ids)):
        so_far = b"".join(tokens[: i + 1])
        shown = "".join(parts[: i + 1])
        assert whole.startswith(shown)
        assert len(so_far.decode("utf-8", "replace")) - len(shown) <= 1
    for at in sorted(control_at, reverse=True):
        ids.insert(at, 2)
    assert "".join(deltas(tokenizer, ids)) == whole


def test_time_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    ids = [10813, 230, 131, 905, 115] * 4000

    def seconds(count: int) -> float:
        start = time.process_time()
        deltas(tokenizer, ids[:count])
        return time.process_time() - start

    assert min(seconds(20_000) for _ in range(3)) < 20 * min(seconds(2_000) for _ in range(3))
