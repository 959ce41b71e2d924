"""Turning a stream of ids into a stream of text, whole characters only."""

from __future__ import annotations

import codecs

from potok.text.tokenizer import Tokenizer

_new_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One stream. The joined answers of `push` and `finish` are the text of all bytes decoded at once.

    A character that is spread over tokens appears with its last byte; each ill-formed sequence, cut where Python's
    decoder cuts it, gives one U+FFFD as soon as it can no longer become a character. Constant time per token.
    """

    __slots__ = ("_bytes", "_hidden", "_open", "_utf8", "_whole")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        """skip_special: control tokens give no text."""
        self._hidden = tokenizer.is_control if skip_special else None
        self._bytes = tokenizer.token_bytes
        self._whole = tokenizer.whole_text
        self._utf8 = _new_utf8("replace")
        self._open = False  # bytes of an unfinished character wait in the decoder

    def push(self, token: int) -> str:
        """Text that this token completes, often empty for parts of characters."""
        if self._hidden is not None and self._hidden(token):
            return ""
        if not self._open:
            text = self._whole.get(token)
            if text is not None:
                return text
        text = self._utf8.decode(self._bytes(token))
        self._open = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """One U+FFFD if the stream ended inside a character, else nothing."""
        if not self._open:
            return ""
        self._open = False
        return self._utf8.decode(b"", True)
