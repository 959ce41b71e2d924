"""The tokenizer against ids of the original one, and against the plain definition of byte-level BPE."""

from __future__ import annotations

import threading
import time
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_kit import CHAR_OF_BYTE, UNUSED, small_metadata, small_tokenizer, spelt

from potok.errors import ClientError, LoadError
from potok.text import tokenizer as tokenizer_module
from potok.text.byte_level import token_to_bytes
from potok.text.tokenizer import MAX_TEXT_BYTES, Tokenizer

# Ids from the Hugging Face tokenizer of the default model.
PARITY = [
    ("Hello", [19556]),
    ("Hello world", [19556, 905]),
    ("1234567", [33, 34, 35, 36, 37, 38, 39]),
    ("  two  spaces", [216, 827, 216, 5600]),
    ("\n\n\nx", [1116, 198, 104]),
    ("I'll don't", [57, 3060, 1326, 982]),
    ("a\tb", [81, 197, 82]),
    ("\u00e9", [2756]),
    ("e\u0301", [85, 151, 219]),
    ("\u00bd", [16738]),
    ("\u0663", [164, 113]),
    ("\U0001f336", [10813, 230, 131]),
    (" na\u00efve caf\u00e9", [15486, 46494, 37366]),
    ("\ufeffHi", [186, 136, 140, 26843]),
    ("", []),
]


@pytest.mark.parametrize(("text", "ids"), PARITY)
def test_ids_equal_those_of_the_original_tokenizer(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_vocabulary_and_ends_of_the_default_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
    assert tokenizer.end_ids == {0, 2}
    assert [i for i in range(tokenizer.vocab_size) if tokenizer.is_control(i)] == list(range(17))


def test_control_spellings_are_text_in_plain_text_and_control_tokens_in_a_prompt(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    assert not any(tokenizer.is_control(i) for i in tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.encode_prompt(text)
    assert prompt == [1, *tokenizer.encode("user\nhi"), 2]
    assert tokenizer.decode(prompt) == "user\nhi"
    assert tokenizer.decode(prompt, skip_special=False) == text


# --- Begin and end ids


def test_begin_id_exactly_as_the_file_says(metadata: dict[str, Any]) -> None:
    flagged = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.add_bos_token": True})
    assert flagged.encode("Hello") == [19556]
    assert flagged.encode_prompt("Hello") == [1, 19556]
    assert flagged.encode_prompt("<|im_start|>Hello") == [1, 19556]
    assert flagged.encode_prompt("") == [1]
    assert Tokenizer.from_metadata(metadata).encode_prompt("Hello") == [19556]


def test_begin_flag_without_begin_id_is_refused() -> None:
    with pytest.raises(LoadError, match=r"bos_token_id is missing"):
        small_tokenizer(add_bos_token=True, bos_token_id=None)


def test_llama3_begins_with_bos_unless_the_file_says_no() -> None:
    silent = small_metadata("llama-bpe")
    del silent["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_metadata(silent).add_bos
    assert not small_tokenizer("llama-bpe", add_bos_token=False).add_bos


@pytest.mark.parametrize("key", ["eot_token_id", "eom_token_id", "eos_token_id"])
def test_an_end_id_of_the_file_joins_the_set_and_stays_writable(key: str) -> None:
    tokenizer = small_tokenizer(words=("stop",), **{key: 3 + ord("x")})
    assert tokenizer.end_ids == {0, 2, 3 + ord("x")}
    assert spelt(tokenizer, tokenizer.encode("x")) == ["x"]


def test_only_control_tokens_are_ends_by_their_spelling() -> None:
    assert small_tokenizer(control=("<s>", "<x>", "<|im_end|>", "<|eot_id|>")).end_ids == {2, 3}
    assert small_tokenizer(added=("</s>",)).end_ids == {0, 2}


# --- Words are cut as each family does


def words_of(pre: str, text: str) -> list[str]:
    """Where the family cuts, seen through a vocabulary in which everything within a word merges."""
    letters = (" aaa", "!aaa", " 123", " !!!\n\n", "\n 1", "'ll", "'LL", "aaaa", "1234", "!!!!", "\n\n\n\n", "    ")
    return spelt(tokenizer := small_tokenizer(pre, words=letters), tokenizer.encode(text))


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "1234", ["1234"]),
        ("gpt-2", " 123", [" 123"]),
        ("smollm", " 123", [" ", "1", "2", "3"]),
        ("qwen2", " 123", [" ", "1", "2", "3"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("llama3", "1234", ["123", "4"]),
        ("gpt-2", "!aaa", ["!", "aaa"]),
        ("smollm", "!aaa", ["!", "aaa"]),
        ("qwen2", "!aaa", ["!aaa"]),
        ("llama-bpe", "!aaa", ["!aaa"]),
        ("gpt-2", "a'LL", ["a", "'", "L", "L"]),
        ("gpt-2", "a'll", ["a", "'ll"]),
        ("qwen2", "a'LL", ["a", "'LL"]),
        ("llama-bpe", "a'LL", ["a", "'LL"]),
        ("gpt-2", "   aaa", ["  ", " aaa"]),
        ("smollm", "   aaa", ["  ", " aaa"]),
        ("qwen2", "   aaa", ["  ", " aaa"]),
        ("gpt-2", " !!!\n\n", [" !!!", "\n\n"]),
        ("qwen2", " !!!\n\n", [" !!!\n\n"]),
        ("llama-bpe", " !!!\n\n", [" !!!\n\n"]),
    ],
)
def test_families_cut_words_in_their_own_way(pre: str, text: str, words: list[str]) -> None:
    assert words_of(pre, text) == words


def test_qwen2_composes_characters_first() -> None:
    assert small_tokenizer("qwen2").encode("e\u0301") == small_tokenizer("qwen2").encode("\u00e9")
    assert small_tokenizer("gpt-2").encode("e\u0301") != small_tokenizer("gpt-2").encode("\u00e9")


def test_llama3_takes_a_whole_word_that_is_a_token_without_merging() -> None:
    # "abc" is a token, but no merge leads to it.
    def with_unreachable(pre: str) -> Tokenizer:
        metadata = small_metadata(pre, words=("bc",))
        metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "abc"]
        metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
        return Tokenizer.from_metadata(metadata)

    llama, gpt = with_unreachable("llama-bpe"), with_unreachable("gpt-2")
    assert spelt(llama, llama.encode("abc")) == ["abc"]
    assert spelt(gpt, gpt.encode("abc")) == ["a", "bc"]


def test_no_word_reaches_a_control_token() -> None:
    # Whole words are looked up as they stand here, and "secret" is a control token.
    tokenizer = small_tokenizer("llama-bpe", control=("secret", "<b>", "<e>"))
    assert not any(tokenizer.is_control(i) for i in tokenizer.encode("secret"))
    assert tokenizer.encode_prompt("secret") == [0]


# --- Bytes


def test_byte_alphabet_is_a_bijection_that_keeps_visible_characters() -> None:
    assert sorted(CHAR_OF_BYTE) == list(range(256))
    assert (CHAR_OF_BYTE[ord("A")], CHAR_OF_BYTE[ord(" ")], CHAR_OF_BYTE[ord("\n")]) == ("A", "\u0120", "\u010a")
    assert token_to_bytes("\u0120caf\u00c3\u00a9") == " caf\u00e9".encode()
    assert token_to_bytes("a b") == b"a b"  # a space is outside the alphabet: this token was added as it stands


@given(st.text())
def test_every_text_comes_back_from_its_bytes(text: str) -> None:
    tokenizer = small_tokenizer(words=("the", " the", "ing"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


def test_tokens_that_are_parts_of_characters(tokenizer: Tokenizer) -> None:
    assert [list(tokenizer.token_bytes(i)) for i in (10813, 230, 131)] == [[240, 159], [140], [182]]
    assert [tokenizer.token_text(i) for i in (10813, 230, 131)] == ["\ufffd"] * 3
    assert tokenizer.token_text(905) == tokenizer.token_text(905) == " world"


def test_ids_outside_the_token_list_spell_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([19556, tokenizer.vocab_size + 7]) == "Hello"


def test_unused_entries_spell_nothing_and_are_never_produced() -> None:
    metadata = small_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "PAD"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], UNUSED]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert spelt(tokenizer, tokenizer.encode("PAD")) == ["P", "A", "D"]
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == ""


def test_user_defined_tokens_are_found_in_plain_text() -> None:
    tokenizer = small_tokenizer(added=("<tool_call>", "two words"))
    ids = tokenizer.encode("a<tool_call>two words")
    assert spelt(tokenizer, ids) == ["a", "<tool_call>", "two words"]
    assert tokenizer.decode(ids) == "a<tool_call>two words"


@pytest.mark.parametrize(
    ("text", "named"), [("a\u0004", r"U\+0004 at character 1"), ("\U00050000", r"U\+50000 at character 0")]
)
def test_bytes_that_have_no_token_are_refused_by_name(tokenizer: Tokenizer, text: str, named: str) -> None:
    with pytest.raises(ClientError, match=named) as caught:
        tokenizer.encode(text)
    assert caught.value.param == "prompt"


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ClientError, match=r"U\+D800 at character 2"):
        tokenizer.encode_prompt("ab\ud800")


# --- Long texts


@pytest.mark.parametrize("unit", ["a", " ", "\U0001f336", "<|im_end"])
def test_a_megabyte_takes_no_more_than_its_share(tokenizer: Tokenizer, unit: str) -> None:
    """Processor time, since the machine may be shared: below twice four times 250 kB, and some times 1 MB of prose."""

    def seconds(text: str) -> float:
        start = time.process_time()
        tokenizer.encode_prompt(text)
        return time.process_time() - start

    text = unit * (1_000_000 // len(unit.encode()))
    prose = min(seconds("The quick brown fox jumps over the lazy dog. " * (1_000_000 // 45)) for _ in range(2))
    quarter = min(seconds(text[: len(text) // 4]) for _ in range(2))
    whole = min(seconds(text) for _ in range(2))
    assert whole < 10 * prose
    assert whole < 8 * quarter
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_other_threads_run_while_a_long_text_is_tokenised(tokenizer: Tokenizer) -> None:
    text, done = "lorem 17 ipsum, " * 60_000, threading.Event()
    thread = threading.Thread(target=lambda: (tokenizer.encode(text), done.set()))
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20


ASCII_UNITS = ["a", "B", "7", "12", " ", "  ", "\n", "\r\n", "\t", "'ll", "'", "!", "...", "_", "\x1c", "<tool_call>"]
OTHER_UNITS = ["\u00e9", "e\u0301", "\u0300", "\u4e2d", "\U0001f336", "\u00a0", "\u2003", "\x85", "\u0663", "\u00bd"]
LONG_WORDS = (
    "aa",
    "a7",
    "12",
    "123",
    "  ",
    " a",
    " 1",
    "!a",
    "!\n",
    "...",
    "\n\n",
    " \n",
    "'l",
    "'ll",
    "\r\n",
    "_a",
    "a_",
)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
@pytest.mark.parametrize("added", [(), ("<tool_call>",)])
def test_cutting_long_text_changes_no_id(pre: str, added: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer(pre, words=LONG_WORDS, added=added)

    def check(text: str, size: int) -> None:
        monkeypatch.setattr(tokenizer_module, "PART_CHARS", 10**9)
        whole = tokenizer.encode(text)
        monkeypatch.setattr(tokenizer_module, "PART_CHARS", size)
        assert tokenizer.encode(text) == whole

    for pair in product(ASCII_UNITS + OTHER_UNITS, repeat=2):
        check("".join(pair) * 2, 1)

    @given(st.lists(st.sampled_from(ASCII_UNITS + OTHER_UNITS), max_size=40), st.integers(1, 12))
    def check_mixed(units: list[str], size: int) -> None:
        check("".join(units), size)

    check_mixed()


def test_text_beyond_all_measure_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ClientError, match=f"at most {MAX_TEXT_BYTES}"):
        tokenizer.encode("a" * (MAX_TEXT_BYTES + 1))


# --- Files that cannot be used


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pre": "foo"}, r"tokenizer\.ggml\.pre: pre-tokenizer 'foo' is not supported"),
        ({"pre": "default"}, r"'default' is not supported"),
        ({"pre": None}, r"None is not supported"),
        ({"model": "llama"}, r"tokenizer kind 'llama' \(SentencePiece\) is not supported"),
        ({"model": "bert"}, r"tokenizer kind 'bert' is not supported"),
        ({"model": None}, r"tokenizer kind None is not supported"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens is not a list of strings"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"merges": ["ab"]}, r"tokenizer\.ggml\.merges\[0\] is 'ab'"),
        ({"merges": ["a \u4e2d"]}, r"tokenizer\.ggml\.merges: .*out of vocabulary"),
        ({"token_type": np.ones(5, np.int32)}, r"token_type has 5 entries, but tokenizer\.ggml\.tokens has 259"),
        ({"eos_token_id": 259}, r"eos_token_id must be a token id from 0 to 258, not 259"),
        ({"bos_token_id": -1}, r"bos_token_id must be a token id"),
        ({"bos_token_id": "1"}, r"bos_token_id must be a token id"),
        ({"add_space_prefix": True}, r"add_space_prefix true is not supported"),
        ({"control": ("", "<b>", "<e>")}, r"tokens\[0\]: a control token with an empty spelling"),
        ({"control": tuple("x" * size for size in range(1, 3000))}, r"control tokens begin with each other"),
        ({"added": ("a",)}, r"are the same token, 'a'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError, match=says):
        small_tokenizer(**change)


def test_a_control_spelling_that_merges_lead_to_is_refused() -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.ggml\.merges"):
        small_tokenizer(control=("ab", "<b>", "<e>"), merges=["a b"])


def test_token_types_may_be_numpy_or_absent(metadata: dict[str, Any]) -> None:
    as_array = metadata | {"tokenizer.ggml.token_type": np.asarray(metadata["tokenizer.ggml.token_type"], np.int32)}
    assert Tokenizer.from_metadata(as_array).end_ids == {0, 2}
    untyped = small_metadata()
    del untyped["tokenizer.ggml.token_type"]
    assert Tokenizer.from_metadata(untyped).end_ids == {2}


# --- Spellings


@given(st.sets(st.text("<|ab>", min_size=1, max_size=5), max_size=8), st.text("<|ab>", max_size=30))
def test_spellings_are_found_leftmost_and_longest(words: set[str], text: str) -> None:
    words -= {""}
    spellings = tokenizer_module.Spellings({word: i for i, word in enumerate(sorted(words))})
    expected: list[str | int] = []
    at, plain = 0, ""
    while at < len(text):
        here = [word for word in words if text.startswith(word, at)]
        if not here:
            plain += text[at]
            at += 1
            continue
        if plain:
            expected.append(plain)
            plain = ""
        longest = max(here, key=len)
        expected.append(spellings.ids[longest])
        at += len(longest)
    assert list(spellings.split(text)) == ([*expected, plain] if plain else expected)


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
@pytest.mark.parametrize("text", ["\u1f82" * 9, "\u03b1\u0314\u0300\u0345" * 9, "<s>" * 9, "aaaaaaa" * 9, "b" * 9])
def test_no_token_stands_for_more_characters_than_the_tokenizer_says(pre: str, text: str) -> None:
    small = small_tokenizer(pre, control=("<s>",), words=("\u1f82", "aaaaaaa"))
    assert small.max_chars_per_token == (28 if pre == "qwen2" else 7)
    assert len(text) <= len(small.encode_prompt(text)) * small.max_chars_per_token
