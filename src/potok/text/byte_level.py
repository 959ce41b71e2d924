"""Byte-level BPE spells every byte as one printable character; this is the way back.

A byte that is a visible character of Latin-1 stands for itself; the other 68 take U+0100, U+0101, ... in order of
the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_VISIBLE = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])


def _byte_of_char() -> Mapping[str, int]:
    hidden = [byte for byte in range(256) if byte not in _VISIBLE]
    table = {chr(byte): byte for byte in _VISIBLE}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return MappingProxyType(table)


#: 256 entries: the character that spells a byte in the vocabulary -> the byte.
BYTE_OF_CHAR = _byte_of_char()


def token_to_bytes(spelling: str) -> bytes:
    """Bytes of a vocabulary entry. One with a character outside the alphabet was added whole, and is its own UTF-8."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in spelling])
    except KeyError:
        return spelling.encode("utf-8", "replace")
