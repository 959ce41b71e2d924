"""Who may come in: requests refused for ever at submit, and waiting requests that may join now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from potok.core.policy import Policy
from potok.core.prefix import Match, PrefixCache
from potok.core.request import Request


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


@dataclass(slots=True)
class Room:
    """How much of prompts may be begun, in tokens, so that nobody joins to wait for his first token among the running.

    total: what a step computes of prompts. prompts: those of running requests; the caller keeps them up to date. short:
    what is left of the half of `total` that prompts may have which end in this very step, although those before them
    want more than a step: a long prompt must not keep short ones waiting. by_rank: a prompt that is under way does not
    keep those waiting that come before it in rank; else whoever was let in is not held up by who comes later.
    """

    total: int
    prompts: Sequence[Request]
    short: int
    by_rank: bool = True

    def admits(self, request: Request) -> bool:
        return len(request.tokens) <= self.short or self.is_open(request)

    def is_open(self, request: Request) -> bool:
        """Whether those who come before it leave something of a step."""
        return sum([r.pending for r in self.prompts if r.rank < request.rank or not self.by_rank]) < self.total

    def take(self, tokens: int) -> None:
        if tokens <= self.short:
            self.short -= tokens


def joining(
    candidates: Sequence[Request],
    running: Sequence[Request],
    cache: PrefixCache,
    limits: Limits,
    policy: Policy,
    room: Room,
) -> Iterator[tuple[Request, Match]]:
    """Those of the candidates that may join now, one after the other, each with what it need not compute.

    candidates: a few, the next first. The caller lets a request join before it asks for the next, or stops asking.

    A request joins when blocks for all the tokens it has are available beside a headroom, so that no prompt is begun
    that cannot be finished, and those who run can go on for a while before anybody is preempted. The headroom is one
    block for each running request, once more for each time that this request was preempted: one that comes back into a
    tight pool would only be preempted again. With no_evict it is all that those who run, and the request itself, may
    still need. Nobody running means no headroom, so that whatever was not refused can run.

    A request whose prefix is being computed by another waits for it, and is not in anybody's way; nor is one for which
    there is no room. Otherwise each time that one of a later rank passes is counted. One that was passed
    policy.patience times is next: nobody passes it more.
    """
    left: dict[int, Request] = {r.id: r for r in candidates}
    for request in candidates:
        if not room.admits(request):
            del left[request.id]
            continue
        match = cache.match(request)
        if match.wait:
            del left[request.id]
            continue
        before = [r for r in left.values() if r.rank < request.rank]
        if any(r.overtaken >= policy.patience for r in before):
            return
        fitting = fit(match, request, cache.pool.available, headroom(request, running, limits), cache)
        if fitting is not None:
            del left[request.id]
            for other in before:
                other.overtaken += 1
            room.take(len(request.tokens) - fitting.num_tokens)
            yield request, fitting


def headroom(request: Request, running: Sequence[Request], limits: Limits) -> int:
    """Blocks that must be left over when `request` joins. See `joining`."""
    if limits.no_evict:
        return sum([limits.still_needed(r) for r in running]) + limits.still_needed(request)
    return len(running) * (1 + request.preemptions)


def fit(match: Match, request: Request, available: int, headroom: int, cache: PrefixCache) -> Match | None:
    """The match, without its copy if need be, or None where `available` blocks do not suffice."""
    if match.cost > available - headroom:
        match = cache.without_copy(match)
    return match if match.cost <= available - headroom else None
