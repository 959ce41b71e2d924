"""Who may come in: requests refused for ever at submit, and waiting requests that may join now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from potok.core.prefix import Match, PrefixCache
from potok.core.request import Request

#: A waiting request is passed by at most this many younger ones; then all behind it wait with it.
MAX_OVERTAKEN = 16
#: How many waiting requests a step looks at, so that its cost does not grow with the queue.
LOOKAHEAD = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """max_num_seqs: requests that run at once. max_num_batched_tokens: token budget of one step.

    max_model_len: tokens of one request, prompt and output together. block_size: tokens of one KV block.
    no_evict: admit only what can run to its last token, so that nobody is ever preempted.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    no_evict: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            assert getattr(self, name) > 0, f"{name} must be at least 1, not {getattr(self, name)}"

    def last_len(self, request: Request) -> int:
        """How many tokens `request` has when it ends, if no stop id ends it before."""
        return min(request.prompt_len + request.max_new, self.max_model_len)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def still_needed(self, request: Request) -> int:
        """Blocks that `request` may want beside those for the tokens it has."""
        return self.blocks_for(self.last_len(request) - 1) - self.blocks_for(len(request.tokens))


@dataclass(frozen=True, slots=True)
class Reject:
    """Why a request can never run: one sentence with the limit in it, and the field to blame."""

    message: str
    param: str


def refusal(request: Request, limits: Limits, num_blocks: int) -> Reject | None:
    """What makes `request` impossible however long it waits, or None."""
    prompt, context = len(request.tokens), limits.max_model_len
    if prompt == 0:
        return Reject("prompt must hold at least 1 token; it is empty.", "prompt")
    if request.max_new < 1:
        return Reject(f"max_tokens must be at least 1, not {request.max_new}.", "max_tokens")
    if prompt >= context:
        return Reject(
            f"prompt has {prompt} tokens, but max_model_len is {context} for prompt and output together; "
            f"shorten the prompt to at most {context - 1} tokens.",
            "prompt",
        )
    # The last token ends the request, so its KV is never needed.
    need = limits.blocks_for(limits.last_len(request) - 1)
    if need > num_blocks:
        room = num_blocks * limits.block_size
        held = f"the KV memory holds {room} ({num_blocks} blocks of {limits.block_size})"
        if prompt > room:
            return Reject(f"prompt has {prompt} tokens, but {held}; shorten the prompt.", "prompt")
        return Reject(
            f"prompt ({prompt} tokens) and max_tokens ({request.max_new}) are too much together: {held}; "
            f"lower max_tokens to at most {room + 1 - prompt}.",
            "max_tokens",
        )
    return None


class Join(NamedTuple):
    """place: index in the queue. passed: older requests that do not fit."""

    place: int
    match: Match
    passed: list[Request]


def next_to_join(
    waiting: Sequence[Request], running: Sequence[Request], cache: PrefixCache, limits: Limits
) -> Join | None:
    """Which waiting request joins next, or None when nobody may. waiting: oldest first.

    A request joins when blocks for all the tokens it has are available beside a headroom, so that no prompt is begun
    that cannot be finished, and those who run can go on for a while before anybody is preempted. The headroom is one
    block for each running request, once more for each time that this request was preempted: one that comes back into a
    tight pool would only be preempted again. With no_evict it is all that those who run, and the request itself, may
    still need. Nobody running means no headroom, so that whatever was not refused can run.

    A request whose prefix is being computed by another waits for it, and is not in anybody's way. Younger requests may
    pass one that does not fit, each time counted; see MAX_OVERTAKEN.
    """
    available = cache.pool.available
    passed: list[Request] = []
    for i, request in enumerate(islice(waiting, LOOKAHEAD)):
        match = cache.match(request)
        if match.wait:
            continue
        if limits.no_evict:
            headroom = sum([limits.still_needed(r) for r in running]) + limits.still_needed(request)
        else:
            headroom = len(running) * (1 + request.preemptions)
        if match.cost + headroom > available:
            match = cache.without_copy(match)
        if match.cost + headroom <= available:
            return Join(i, match, passed)
        if request.overtaken >= MAX_OVERTAKEN:
            return None
        passed.append(request)
    return None
