"""Stop strings in a stream: showing all that can be shown, and nothing of a stop string.

The stop strings become one automaton over characters (Aho and Corasick). Its state after some text is the longest end
of that text with which a stop string begins: exactly what has to be held back. Each character costs one look-up or,
spread over the stream, two; neither the number nor the length of the stop strings matters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Compiled stop strings; immutable, and shared by the choices of one call. None may be empty."""

    __slots__ = ("_compiled", "first_chars", "texts")

    def __init__(self, texts: Sequence[str]) -> None:
        if "" in texts:
            raise ValueError("a stop string is empty")
        self.texts = tuple(texts)
        self.first_chars = frozenset(text[0] for text in texts)
        self._compiled: _Automaton | None = None

    @property
    def automaton(self) -> _Automaton:
        """Built when the first character of a stop string is met, which in most streams is never."""
        if self._compiled is None:
            self._compiled = _Automaton(self.texts)
        return self._compiled


class _Automaton:
    """State 0 is the start.

    moves[state]: character -> next state, along stop strings only. retreat[state]: the state of the longest proper end
    of this state's text. depth[state]: its length in characters. match[state]: the longest stop string that ends here.
    """

    __slots__ = ("depth", "match", "moves", "retreat")

    def __init__(self, texts: Sequence[str]) -> None:
        self.moves: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match: list[str | None] = [None]
        for text in texts:
            state = 0
            for char in text:
                following = self.moves[state].get(char)
                if following is None:
                    following = len(self.moves)
                    self.moves[state][char] = following
                    self.moves.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.match.append(None)
                state = following
            self.match[state] = text
        self.retreat = [0] * len(self.moves)
        waiting = deque(self.moves[0].values())
        while waiting:
            state = waiting.popleft()
            for char, following in self.moves[state].items():
                self.retreat[following] = self.step(self.retreat[state], char)
                waiting.append(following)
            if self.match[state] is None:
                self.match[state] = self.match[self.retreat[state]]

    def step(self, state: int, char: str) -> int:
        while True:
            following = self.moves[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.retreat[state]


class StopMatcher:
    """One stream. The stop string that is complete first ends it; where two are complete at once, the longer.

    That is a property of the text alone: how it was cut into pushes changes nothing but when parts of it are shown.
    matched: the stop string, once met. Nothing comes out after it.
    """

    __slots__ = ("_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: Sequence[str] | StopStrings, include: bool = False) -> None:
        """include: the stop string itself is shown too."""
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include = include
        self._held = ""  # a beginning of a stop string, not yet shown
        self._state = 0
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now."""
        if self.matched is not None:
            return ""
        if self._state == 0 and self._stops.first_chars.isdisjoint(text):
            return text
        automaton = self._stops.automaton
        state = self._state
        for i, char in enumerate(text):
            state = automaton.step(state, char)
            stop = automaton.match[state]
            if stop is not None:
                self.matched = stop
                seen = self._held + text[: i + 1]
                self._held = ""
                return seen if self._include else seen[: len(seen) - len(stop)]
        self._state = state
        seen = self._held + text
        shown = len(seen) - automaton.depth[state]
        self._held = seen[shown:]
        return seen[:shown]

    def finish(self) -> str:
        """What was held back: the stream ended, so it was no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
