"""An engine whose steps the test makes: chunks go in by hand, in any order and at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from potok.finish import Finish
from potok.params import Terms
from potok.protocol import Chunk, EngineInfo, Sampling, TokenLogprobs

VOCAB = 49152


@dataclass
class HandFedEngine:
    """An engine whose steps the test makes."""

    info: EngineInfo
    dead: bool = False
    submitted: dict[int, tuple[list[int], int, Sampling]] = field(default_factory=dict)
    sinks: dict[int, Callable[[Chunk], None]] = field(default_factory=dict)
    terms: dict[int, Terms] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)

    def submit(
        self, prompt: list[int], max_tokens: int, sampling: Sampling, sink: Callable[[Chunk], None], terms: Terms
    ) -> int:
        id = 101 + len(self.submitted)
        self.terms[id] = terms
        self.submitted[id] = (prompt, max_tokens, sampling)
        self.sinks[id] = sink
        return id

    def cancel(self, id: int) -> None:
        if self.sinks.pop(id, None) is not None:
            self.cancelled.append(id)

    def give(
        self,
        id: int,
        tokens: list[int],
        finish: Finish | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        *,
        error: str | None = None,
        param: str | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """One step's chunk; like a real engine, nothing for what was cancelled."""
        sink = self.sinks.get(id) if finish is None else self.sinks.pop(id, None)
        if sink is not None:
            sink(Chunk(id, tokens, finish, logprobs, error, param, None, prompt_logprobs, cached_tokens))
