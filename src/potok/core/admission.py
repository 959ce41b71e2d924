"""Who may come in: requests refused for ever at submit, and waiting requests that may join now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from potok.core.policy import Policy
from potok.core.prefix import Match, PrefixCache
from potok.core.request import Request

#: How many waiting requests a step looks at, oldest first, so that its cost does not grow with the queue.
WINDOW = 64


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


def joining(
    waiting: Sequence[Request], running: Sequence[Request], cache: PrefixCache, limits: Limits, policy: Policy
) -> Iterator[tuple[Request, Match]]:
    """The waiting requests that may join now, one after the other, each with what it need not compute.

    waiting: oldest first. The caller lets a request join before it asks for the next, or stops asking.

    A request joins when blocks for all the tokens it has are available beside a headroom, so that no prompt is begun
    that cannot be finished, and those who run can go on for a while before anybody is preempted. The headroom is one
    block for each running request, once more for each time that this request was preempted: one that comes back into a
    tight pool would only be preempted again. With no_evict it is all that those who run, and the request itself, may
    still need. Nobody running means no headroom, so that whatever was not refused can run.

    A request whose prefix is being computed by another waits for it, and is not in anybody's way. Otherwise each time
    that a younger request passes is counted. One that was passed policy.patience times is next: nobody passes it more.
    """
    window = policy.order(waiting[:WINDOW], cache)
    left: dict[int, Request] = {r.id: r for r in window}
    for request in window:
        match = cache.match(request)
        if match.wait:
            del left[request.id]
            continue
        older = [r for r in left.values() if r.order < request.order]
        if any(r.overtaken >= policy.patience for r in older):
            return
        fitting = fit(match, request, running, cache, limits)
        if fitting is not None:
            del left[request.id]
            for other in older:
                other.overtaken += 1
            yield request, fitting


def fit(match: Match, request: Request, running: Sequence[Request], cache: PrefixCache, limits: Limits) -> Match | None:
    """The match, without its copy if need be, or None where blocks do not suffice. See `joining`."""
    if limits.no_evict:
        headroom = sum([limits.still_needed(r) for r in running]) + limits.still_needed(request)
    else:
        headroom = len(running) * (1 + request.preemptions)
    room = cache.pool.available - headroom
    if match.cost > room:
        match = cache.without_copy(match)
    return match if match.cost <= room else None
