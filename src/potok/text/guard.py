"""Keeping message text from becoming control tokens on its way through a chat template.

A template prints text of its own ("<|im_start|>") around text of its users, and afterwards nothing tells the two apart.
So every place in users' text where a control spelling could begin gets a mark behind its first character, before the
template sees it:

    "<|im_end|>"  ->  "<M|im_end|>"        M: a noncharacter that occurs nowhere else in the chat

No spelling can then be made of users' text, not even of several fields that a template joins; the rendered text is
split at the spellings that are left, and the marks are dropped from the rest before it is tokenised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

#: Code points that Unicode reserves for use inside a program.
NONCHARACTERS = tuple(
    map(chr, [*range(0xFDD0, 0xFDF0), *(plane << 16 | low for plane in range(17) for low in (0xFFFE, 0xFFFF))])
)


class Guard:
    """Marks users' text for one template.

    What the template itself looks for in messages ('</think>') is left unmarked, as long as no control spelling can
    begin inside it. Where the template prints the beginning of a spelling just before users' text ('<|' + name), the
    start of users' text is marked too.
    """

    def __init__(
        self, spellings: Collection[str], printed: Collection[str], constants: Collection[str], names: Collection[str]
    ) -> None:
        """spellings: of control tokens. printed, constants, names: see TemplateFacts."""
        bare = {spelling.lstrip() or spelling for spelling in spellings}
        longest = max(map(len, bare), default=0)
        beginnings = {text[:size] for text in bare for size in range(1, len(text))}
        endings = {text[start:] for text in bare for start in range(1, len(text))}
        self._triggers = frozenset(text[0] for text in bare)

        def harmless(constant: str) -> bool:
            """No control spelling begins inside, neither wholly nor up to the end of the constant."""
            starts = [start for start, char in enumerate(constant) if char in self._triggers]
            parts = (constant[start : start + size] for start in starts for size in range(1, longest + 1))
            return bare.isdisjoint(parts) and beginnings.isdisjoint(constant[start:] for start in starts)

        def completes(constant: str) -> bool:
            """Behind the beginning of a control spelling, the constant could go on with it, or finish it."""
            heads = (constant[:size] for size in range(1, longest))
            return not endings.isdisjoint(heads) or any(constant in text for text in bare)

        self._sought = frozenset(c for c in constants if not self._triggers.isdisjoint(c) and harmless(c))
        found = [*sorted(self._sought, key=len, reverse=True), *sorted(self._triggers)]
        self._search = re.compile("|".join(map(re.escape, found))) if found else None
        self._keys = frozenset([*constants, *names])
        self._compared = frozenset(constant for constant in constants if not completes(constant))
        ends = (text[-size:] for text in [*printed, *constants] for size in range(1, longest))
        self._marks_starts = not beginnings.isdisjoint(ends)

    def protect(self, value: Any, mark: str) -> Any:
        """A copy of JSON-like data with every string marked, keys included."""
        if isinstance(value, str):
            return self._protect_text(value, mark, self._compared)
        if isinstance(value, dict):
            return {
                self._protect_text(key, mark, self._keys) if isinstance(key, str) else key: self.protect(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.protect(item, mark) for item in value]
        return value

    def _protect_text(self, text: str, mark: str, known: Collection[str]) -> str:
        """known: texts that the template compares with, whose start is therefore not marked."""
        if self._search is not None and not self._triggers.isdisjoint(text):
            text = self._search.sub(lambda found: found[0] if found[0] in self._sought else found[0] + mark, text)
        if self._marks_starts and text not in known:
            body = text.lstrip()
            text = text[: len(text) - len(body)] + mark + body if body else text
        return text


def strings(value: Any) -> Iterator[str]:
    """Every string in JSON-like data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def is_small(value: Any, limit: int) -> bool:
    """Whether JSON-like data has at most `limit` characters and items in all; looks no further than it must."""
    size, waiting = 0, [value]
    while waiting and size <= limit:
        item = waiting.pop()
        size += len(item) if isinstance(item, str | list | tuple | dict) else 1
        if size <= limit and isinstance(item, list | tuple | dict):
            waiting += item
            if isinstance(item, dict):
                waiting += item.values()
    return size <= limit
