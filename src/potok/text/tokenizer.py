"""Tokenizer: text to ids and ids to bytes, as the model file describes it.

Byte-level BPE only (`tokenizer.ggml.model` "gpt2"). The merging is done by the `tokenizers` library; here is what a
GGUF file adds: how text is cut into words, which tokens are control tokens, where the begin id goes, which ids end an
answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import tokenizers
from tokenizers.models import BPE

from potok.errors import ClientError, LoadError
from potok.text.byte_level import BYTE_OF_CHAR, token_to_bytes
from potok.text.pretokenizers import FAMILIES, Family
from potok.text.spellings import Spellings

#: UTF-8 bytes of one text. Far above any context; below it the word cutters of the library cannot run out of steps.
MAX_TEXT_BYTES = 8 * 2**20

#: Characters that NFC makes one of, at most.
MAX_COMPOSED_CHARS = 4

#: Longer text is tokenised in parts of about this many characters, which bounds memory and lets other threads run.
PART_CHARS = 1 << 16

#: Control tokens with these spellings end a turn or a text, in whatever file they occur.
END_SPELLINGS = frozenset(
    [
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<|eos|>",
        "</s>",
        "<｜end▁of▁sentence｜>",
    ]
)

_MODEL = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_ADD_BOS = "tokenizer.ggml.add_bos_token"
_BOS = "tokenizer.ggml.bos_token_id"
_EOS = "tokenizer.ggml.eos_token_id"
_OTHER_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5


class Tokenizer:
    """Safe to use from several threads at once.

    vocab_size: entries of the file's token list; the model may have more rows (padding), which spell nothing.
    bos_id, eos_id: or None. add_bos: a completions prompt begins with bos_id. end_ids: all ids that end an answer.
    max_chars_per_token: no token stands for more characters of a text.
    control: spellings of the control tokens. whole_text: id -> text of tokens whose bytes are complete UTF-8 alone;
    filled as tokens are met, so that turning a usual id into text is one look-up.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        merges: Sequence[str],
        family: Family,
        *,
        bos_id: int | None,
        eos_id: int | None,
        add_bos: bool,
        end_ids: Iterable[int],
    ) -> None:
        """types: per token, as in `tokenizer.ggml.token_type`. end_ids: ends beside the control tokens that mark one.

        Raises LoadError.
        """
        self._tokens = tokens
        self._control_ids = frozenset(i for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL))
        self._unused_ids = frozenset(i for i, kind in enumerate(types) if kind == _UNUSED)
        self.control = Spellings({tokens[i]: i for i in sorted(self._control_ids, reverse=True)})
        # Control tokens are no part of what words are made from: no text can reach them.
        plain = {i: tokens[i] for i, kind in enumerate(types) if kind not in (_UNKNOWN, _CONTROL, _UNUSED)}
        vocabulary = {token: i for i, token in plain.items()}
        if len(vocabulary) != len(plain):
            raise LoadError(_duplicate(plain, vocabulary))
        added = [tokens[i] for i, kind in enumerate(types) if kind == _USER_DEFINED]
        self._library = _library(vocabulary, merges, family, added)
        self._cut = None if any(family.cut.search(spelling) for spelling in added) else family.cut
        self._missing_bytes = bytes(byte for char, byte in BYTE_OF_CHAR.items() if char not in vocabulary)
        self._bytes: dict[int, bytes] = {}
        self.whole_text: dict[int, str] = {}
        self.vocab_size = len(tokens)
        self.max_chars_per_token = max(map(len, tokens), default=1) * (MAX_COMPOSED_CHARS if family.nfc else 1)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.add_bos = add_bos
        marked = (token for spelling, token in self.control.ids.items() if spelling in END_SPELLINGS)
        self.end_ids = frozenset([*end_ids, *marked])

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """Raises LoadError naming the key when the file's tokenizer is missing, broken or of a kind not supported."""
        family = _family(metadata)
        tokens = _strings(metadata, _TOKENS)
        types = metadata.get(_TYPES)
        types = [1] * len(tokens) if types is None else [int(kind) for kind in types]
        if len(types) != len(tokens):
            raise LoadError(f"{_TYPES} has {len(types)} entries, but {_TOKENS} has {len(tokens)}.")
        bos_id, eos_id, *ends = (_token_id(metadata, key, len(tokens)) for key in (_BOS, _EOS, *_OTHER_ENDS))
        add_bos = bool(metadata.get(_ADD_BOS, family.add_bos))
        if add_bos and bos_id is None:
            raise LoadError(f"a prompt must begin with the begin token ({_ADD_BOS}), but {_BOS} is missing.")
        end_ids = [token for token in (eos_id, *ends) if token is not None]
        merges = _strings(metadata, _MERGES)
        return cls(tokens, types, merges, family, bos_id=bos_id, eos_id=eos_id, add_bos=add_bos, end_ids=end_ids)

    def encode(self, text: str, field: str = "prompt") -> list[int]:
        """Ids of plain text: no begin id, and what looks like a control token is text like any other.

        Raises ClientError, blaming `field`, for text that cannot be written in this vocabulary.
        """
        self._check(text, field)
        ids: list[int] = []
        for part in self._parts(text):
            # A batch of one: this form of the call lets other threads run, and leaves out the offsets.
            ids += self._library.encode_batch_fast([part], add_special_tokens=False)[0].ids
        return ids

    def encode_prompt(self, text: str, field: str = "prompt") -> list[int]:
        """Ids of a whole prompt as a caller wrote it: control spellings are control tokens, begin id as the file says.

        A prompt that spells the begin token itself does not get a second one.
        """
        ids = self.encode_pieces(self.control.split(text), field)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_pieces(self, pieces: Iterable[str | int], field: str = "prompt") -> list[int]:
        """Ids of plain text with control ids between, as `control.split` gives them."""
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self.encode(piece, field)
        return ids

    def is_control(self, token: int) -> bool:
        return token in self._control_ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for ids that the file does not name or does not use."""
        known = self._bytes.get(token)
        if known is not None:
            return known
        if not 0 <= token < self.vocab_size or token in self._unused_ids:
            return b""
        spelling = self._tokens[token]
        data = spelling.encode("utf-8", "replace") if token in self._control_ids else token_to_bytes(spelling)
        self._bytes[token] = data
        text = data.decode("utf-8", "replace")
        if text.encode() == data:
            self.whole_text[token] = text
        return data

    def token_text(self, token: int) -> str:
        """A token alone as text; U+FFFD stands for bytes that are only a part of a character."""
        text = self.whole_text.get(token)
        return self.token_bytes(token).decode("utf-8", "replace") if text is None else text

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of all ids at once; U+FFFD stands for what is not UTF-8."""
        shown = (token for token in ids if not (skip_special and token in self._control_ids))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def _check(self, text: str, field: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ClientError(
                f"{field} has U+{ord(text[error.start]):04X} at character {error.start}, half of a surrogate pair; "
                "send whole characters.",
                field,
                "invalid_text",
            ) from None
        if len(data) > MAX_TEXT_BYTES:
            raise ClientError(
                f"{field} has {len(data)} bytes of text; at most {MAX_TEXT_BYTES} are tokenised.", field, "too_long"
            )
        if self._missing_bytes and len(data.translate(None, self._missing_bytes)) != len(data):
            at, char = next((i, c) for i, c in enumerate(text) if not set(c.encode()).isdisjoint(self._missing_bytes))
            raise ClientError(
                f"{field} has U+{ord(char):04X} at character {at}, which this model's vocabulary cannot spell; "
                "remove it.",
                field,
                "invalid_text",
            )

    def _parts(self, text: str) -> Iterator[str]:
        """Cuts long text where a word ends anyway; text without such a place (one giant word) stays whole."""
        start = 0
        while self._cut is not None and len(text) - start > PART_CHARS:
            place = self._cut.search(text, start + PART_CHARS)
            if place is None:
                break
            yield text[start : place.start()]
            start = place.start()
        if start < len(text):
            yield text[start:]


def _library(
    vocabulary: dict[str, int], merges: Sequence[str], family: Family, added: Sequence[str]
) -> tokenizers.Tokenizer:
    pairs = []
    for i, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not (left and right):
            raise LoadError(f"{_MERGES}[{i}] is {merge!r:.40}; a merge is two tokens with a space between.")
        pairs.append((left, right))
    try:
        library = tokenizers.Tokenizer(BPE(vocabulary, pairs, ignore_merges=family.whole_words))
    except Exception as error:  # the library has no error class of its own
        raise LoadError(f"{_MERGES}: {error}.") from error
    library.pre_tokenizer = family.split()
    normalizer = family.normalizer()
    if normalizer is not None:
        library.normalizer = normalizer
    if added:
        library.add_tokens([tokenizers.AddedToken(token, normalized=False, special=False) for token in added])
    return library


def _family(metadata: Mapping[str, Any]) -> Family:
    kind = metadata.get(_MODEL)
    if kind == "llama":
        raise LoadError(f"{_MODEL}: tokenizer kind 'llama' (SentencePiece) is not supported; use one of kind 'gpt2'.")
    if kind != "gpt2":
        raise LoadError(f"{_MODEL}: tokenizer kind {kind!r:.60} is not supported; use one of kind 'gpt2'.")
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise LoadError("tokenizer.ggml.add_space_prefix true is not supported with tokenizer kind 'gpt2'.")
    pre = metadata.get(_PRE)
    if not isinstance(pre, str) or pre not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise LoadError(f"{_PRE}: pre-tokenizer {pre!r:.60} is not supported; supported are {known}.")
    return FAMILIES[pre]


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise LoadError(f"{key} is {'missing' if value is None else 'not a list of strings'}.")
    return value


def _token_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise LoadError(f"{key} must be a token id from 0 to {vocab_size - 1}, not {value!r:.40}.")
    return value


def _duplicate(plain: Mapping[int, str], vocabulary: Mapping[str, int]) -> str:
    first, token = next((i, token) for i, token in plain.items() if vocabulary[token] != i)
    return f"{_TOKENS}[{first}] and [{vocabulary[token]}] are the same token, {token!r:.40}."
