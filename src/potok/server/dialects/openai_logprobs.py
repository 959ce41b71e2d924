"""Log-probabilities in OpenAI's two shapes: parallel lists for completions, a list of entries for chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from potok.text.assembler import TokenLogprob

#: JSON has no infinity; this stands for "impossible".
FLOOR = -9999.0


def _spelling(token: TokenLogprob) -> str:
    """A token's text; where its bytes are only part of a character, the bytes, so that no two tokens look the same."""
    if "\ufffd" not in token.text:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [{**_entry(token), "top_logprobs": [_entry(top) for top in token.top]} for token in tokens]}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": _spelling(token), "logprob": max(token.logprob, FLOOR), "bytes": list(token.bytes)}


def completion_logprobs(tokens: Sequence[TokenLogprob], offsets: Offsets) -> dict[str, Any]:
    """offsets: of the choice's text so far; it is moved on."""
    return {
        "tokens": [_spelling(token) for token in tokens],
        "token_logprobs": [max(token.logprob, FLOOR) for token in tokens],
        # The chosen token is always among them, so there may be one more than was asked for.
        "top_logprobs": [{_spelling(t): max(t.logprob, FLOOR) for t in (*token.top, token)} for token in tokens],
        "text_offset": [offsets.next(token.bytes) for token in tokens],
    }


def echoed_logprobs(first: TokenLogprob, rest: Sequence[TokenLogprob], offsets: Offsets) -> dict[str, Any]:
    """Of a prompt that stands before its answer: its first token has no log-probability, since nothing precedes it."""
    lists = {"tokens": [_spelling(first)], "token_logprobs": [None], "top_logprobs": [None]}
    lists["text_offset"] = [offsets.next(first.bytes)]
    return joined(lists, completion_logprobs(rest, offsets))


def joined(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    return {name: values + right[name] for name, values in left.items()}


def prompt_logprobs(positions: Sequence[TokenLogprob | None], count: int) -> list[dict[str, Any] | None]:
    """As vLLM has them: per token of the prompt, by id, the `count` best there and the token itself."""
    return [None if position is None else _by_id(position, count) for position in positions]


def _by_id(position: TokenLogprob, count: int) -> dict[str, Any]:
    """rank: null for a token that is not among those asked for."""
    table = {str(t.token_id): _ranked(t, rank) for rank, t in enumerate(position.top[:count], start=1)}
    table.setdefault(str(position.token_id), _ranked(position, None))
    return table


def _ranked(token: TokenLogprob, rank: int | None) -> dict[str, Any]:
    return {"logprob": max(token.logprob, FLOOR), "rank": rank, "decoded_token": token.text}


class Offsets:
    """Where each token begins in the text of its choice: the number of the character that its first byte is part of."""

    def __init__(self, characters: int = 0) -> None:
        """characters: that stand before the first token."""
        self._characters = characters

    def next(self, token: bytes) -> int:
        """The offset of the next token; UTF-8 continuation bytes (10xxxxxx) begin no character."""
        inside = bool(token) and token[0] & 0xC0 == 0x80 and self._characters > 0
        offset = self._characters - inside
        self._characters += sum(byte & 0xC0 != 0x80 for byte in token)
        return offset
