"""How text is cut into words before the merges, per value of `tokenizer.ggml.pre`.

Each entry is what the original tokenizer of its family does. A name that is not here is refused: a near miss gives
other ids than the model was trained with, and nothing would say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

#: ASCII positions that end a word in every family here: between letter and non-letter, and behind the last digit.
#: Text may be cut there and the parts tokenised alone, with the same ids.
_WORD_ENDS = r"(?<=[A-Za-z])(?=[\x00-@\[-`{-\x7f])|(?<=[0-9])(?=[\x00-/:-\x7f])"

_WORDS_WITH_DIGITS_BY = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
    r"|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


class Family(NamedTuple):
    """split: makes the pre-tokenizer. cut: where long text may be cut (see _WORD_ENDS). nfc: text is composed first.

    whole_words: a word that is itself a token is taken as it stands, without merging.
    add_bos: what holds when the file has no `tokenizer.ggml.add_bos_token`.
    """

    split: Callable[[], pre_tokenizers.PreTokenizer]
    cut: re.Pattern[str] = re.compile(_WORD_ENDS)
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS_WITH_DIGITS_BY.format(digits=digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split("")


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split("{1,3}")


_DIGIT_ENDS = re.compile(_WORD_ENDS + r"|(?<=[0-9])(?=[0-9])")
_LLAMA3 = Family(_llama3, whole_words=True, add_bos=True)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt-2": Family(_gpt2),
        "smollm": Family(_smollm, cut=_DIGIT_ENDS),
        "qwen2": Family(_qwen2, cut=_DIGIT_ENDS, nfc=True),
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
    }
)
