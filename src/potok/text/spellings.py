"""Finding the spellings of control tokens in text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from potok.errors import LoadError

#: Groups within groups of the search pattern, well below what Python's recursion allows.
MAX_DEPTH = 50


class Spellings:
    """A fixed set of spellings, each with an id; splits text at them, leftmost first, the longest where several fit."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """Raises LoadError for spellings that cannot be searched for."""
        self.ids = dict(ids)
        if "" in self.ids:
            raise LoadError(f"tokenizer.ggml.tokens[{self.ids['']}]: a control token with an empty spelling.")
        self._search = re.compile(_pattern(sorted(self.ids), 0)) if self.ids else None

    def split(self, text: str) -> Iterator[str | int]:
        """Text between spellings (never empty) and the ids of spellings, in order."""
        start = 0
        if self._search is not None:
            for match in self._search.finditer(text):
                if match.start() > start:
                    yield text[start : match.start()]
                yield self.ids[match[0]]
                start = match.end()
        if start < len(text):
            yield text[start:]


def _pattern(words: Iterable[str], depth: int) -> str:
    """A regular expression for sorted words that shares their beginnings: a search does not try them one by one."""
    if depth > MAX_DEPTH:
        raise LoadError(f"tokenizer.ggml.tokens: more than {MAX_DEPTH} control tokens begin with each other.")
    branches = []
    for _, group in groupby(words, key=lambda word: word[:1]):
        same = list(group)
        if same[0] == "":
            continue
        head = _common_head(same[0], same[-1])
        tails = [word[len(head) :] for word in same]
        if tails == [""]:
            branches.append(re.escape(head))
        else:
            # Greedy: a longer word is tried before the one that ends here.
            branches.append(f"{re.escape(head)}(?:{_pattern(tails, depth + 1)})" + ("?" if tails[0] == "" else ""))
    return "|".join(branches)


def _common_head(first: str, last: str) -> str:
    """What a whole sorted list begins with, from its first and last word."""
    size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:size]
