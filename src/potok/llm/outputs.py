"""What `LLM` and `AsyncLLM` return; field names follow vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from potok.frontend import Piece
from potok.text.assembler import Part, TokenLogprob


class Logprob(NamedTuple):
    """logprob: natural log, from raw logits. rank: 1 is the most probable id; None: not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice. logprobs: per token, by token id: the ids asked for in descending order, and the sampled one.

    cumulative_logprob: sum over the sampled ids; None when log-probabilities were not asked for.
    finish_reason: "stop", "length", or None while it goes on. stop_reason: a stop string or id of the caller.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, part: Part | Piece) -> None:
        """Appends what one step brought."""
        self.text += part.text
        self.token_ids += part.token_ids
        if part.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += [_by_id(position) for position in part.logprobs]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(p.logprob for p in part.logprobs)
        self.finish_reason = part.finish_reason
        self.stop_reason = part.stop_reason

    def snapshot(self) -> CompletionOutput:
        """A copy that later `add`s do not change."""
        return replace(
            self, token_ids=self.token_ids.copy(), logprobs=None if self.logprobs is None else self.logprobs.copy()
        )


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. prompt: None when ids were given. outputs: n choices by index.

    prompt_logprobs: when asked for, per token of the prompt as in CompletionOutput.logprobs; None for the first.
    num_cached_tokens: of the prompt, that the first choice found in the prefix cache; None while nothing is computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None


def of_prompt(positions: list[TokenLogprob | None] | None) -> list[dict[int, Logprob] | None] | None:
    return None if positions is None else [None if p is None else _by_id(p) for p in positions]


def _by_id(position: TokenLogprob) -> dict[int, Logprob]:
    table = {t.token_id: Logprob(t.logprob, rank, t.text) for rank, t in enumerate(position.top, start=1)}
    table.setdefault(position.token_id, Logprob(position.logprob, None, position.text))
    return table
