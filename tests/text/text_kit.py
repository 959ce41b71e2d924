"""A vocabulary small enough to read: every byte, a few words, a few control tokens."""

from __future__ import annotations

from typing import Any

from potok.text.byte_level import BYTE_OF_CHAR
from potok.text.tokenizer import Tokenizer

CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NORMAL, CONTROL_TYPE, USER_DEFINED, UNUSED = 1, 3, 4, 5


def small_metadata(
    pre: str = "smollm",
    *,
    words: tuple[str, ...] = (),
    control: tuple[str, ...] = CONTROL,
    added: tuple[str, ...] = (),
    without_bytes: bytes = b"",
    **keys: Any,
) -> dict[str, Any]:
    """Tokenizer metadata: control tokens first, then a token per byte, then the merges' results, then `added`.

    words: ASCII words, each built by merging from the left. Two words may share beginnings.
    keys: further entries, without the prefix "tokenizer.ggml.".
    """
    tokens = list(control)
    types = [CONTROL_TYPE] * len(tokens)
    tokens += [CHAR_OF_BYTE[byte] for byte in range(256) if byte not in without_bytes]
    merges = []
    for word in words:
        spelt = "".join(CHAR_OF_BYTE[byte] for byte in word.encode())
        for size in range(2, len(spelt) + 1):
            if spelt[:size] not in tokens:
                tokens.append(spelt[:size])
                merges.append(f"{spelt[: size - 1]} {spelt[size - 1]}")
    types += [NORMAL] * (len(tokens) - len(types))
    tokens += added
    types += [USER_DEFINED] * len(added)
    metadata: dict[str, Any] = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges,
        "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False,
    } | keys  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def small_tokenizer(pre: str = "smollm", **arguments: Any) -> Tokenizer:
    return Tokenizer.from_metadata(small_metadata(pre, **arguments))


def spelt(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The tokens as text, one by one."""
    return [tokenizer.token_text(token) for token in ids]
