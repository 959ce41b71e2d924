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
from collections.abc import Callable, Collection, Iterator
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

    def __init__(self, spellings: Collection[str], literals: Collection[str], names: Collection[str]) -> None:
        """spellings: of control tokens. literals: text in the template. names: the fields that it reads."""
        bare = {spelling.lstrip() or spelling for spelling in spellings}
        beginnings = {text[:size] for text in bare for size in range(1, len(text) + 1)}
        longest = max(map(len, bare), default=0)
        self._triggers = frozenset(text[0] for text in bare)
        sought = [
            text for text in literals if not self._triggers.isdisjoint(text) and _harmless(text, beginnings, bare)
        ]
        self._sought = frozenset(sought)
        alternatives = [*map(re.escape, sorted(sought, key=len, reverse=True)), *map(re.escape, sorted(self._triggers))]
        self._search = re.compile("|".join(alternatives)) if self._triggers else None
        self._own = frozenset(literals) | frozenset(names)
        self._marks_starts = any(text[-size:] in beginnings for text in literals for size in range(1, longest) if text)

    def protect(self, value: Any, mark: str) -> Any:
        """A copy of JSON-like data with every string marked, keys included."""
        search = self._search
        if search is None:
            return value

        def one(text: str) -> str:
            if not self._triggers.isdisjoint(text):
                text = search.sub(lambda found: found[0] if found[0] in self._sought else found[0] + mark, text)
            if self._marks_starts and text not in self._own:
                body = text.lstrip()
                text = text[: len(text) - len(body)] + mark + body if body else text
            return text

        return map_strings(value, one)


def _harmless(literal: str, beginnings: Collection[str], bare: Collection[str]) -> bool:
    """No control spelling begins inside, neither wholly nor up to the end of the literal."""
    for start in range(len(literal)):
        tail = literal[start:]
        if tail in beginnings or any(tail[:size] in bare for size in range(1, len(tail) + 1)):
            return False
    return True


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like data with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


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
