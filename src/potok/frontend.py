"""Text on one side, the engine on the other: checks a request, resolves its parameters, and turns ids back into text.

The server, `AsyncLLM` and `potok run` use `FrontEnd`; `LLM`, which has no event loop, shares `resolve` and `failure`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import msgspec

from potok.errors import ClientError, DeadlineExceeded, EngineDead, PotokError, ServerError
from potok.finish import Finish
from potok.params import USUAL_TERMS, SamplingParams, Terms, shown
from potok.protocol import Chunk, EngineInfo, Sampling
from potok.text.assembler import ChoiceAssembler, PromptAssembler, TokenLogprob
from potok.text.chat import ChatTemplate
from potok.text.guard import is_small
from potok.text.stops import StopStrings
from potok.text.tokenizer import Tokenizer
from potok.weights.gguf import GGUFFile

#: Below this a temperature is greedy: dividing logits by it would leave the range of float32.
GREEDY_BELOW = 1e-5

#: Longer texts are tokenised on a thread, so that other streams go on meanwhile (about 1 ms at this length).
INLINE_CHARS = 4096


__all__ = ["Engine", "FrontEnd", "Generation", "Piece", "TextModel", "TokenLogprob", "open_text_model"]


class Engine(Protocol):
    """What a front end needs of an engine: `EngineClient` and `LocalEngine` both are one."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def dead(self) -> bool: ...

    def submit(
        self, prompt: list[int], max_tokens: int, sampling: Sampling, sink: Callable[[Chunk], None], terms: Terms
    ) -> int: ...

    def cancel(self, id: int) -> None: ...


class Piece(msgspec.Struct, frozen=True):
    """What one choice gained. Joined texts of a choice's pieces are its whole text.

    index: of the choice, 0 to n-1. token_ids: all sampled ids, ids of held-back or hidden text included.
    logprobs: one per token id when asked for. finish_reason: set once, on the choice's last piece.
    stop_reason: the stop string or stop id of the caller that ended it, or the name of the deadline that cut it short;
    None for the model's own end.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class TextModel(NamedTuple):
    """The text side of a model file. name: as clients call the model: the file's, unless another was chosen."""

    tokenizer: Tokenizer
    chat: ChatTemplate
    name: str


def open_text_model(path: str | PathLike[str], served_model_name: str = "") -> TextModel:
    """Reads tokenizer and chat template of a GGUF file. Raises LoadError when it has none that can be used."""
    file = GGUFFile.open(path)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    chat = ChatTemplate(file.metadata.get("tokenizer.chat_template"), tokenizer)
    name = served_model_name or Path(path).stem
    return TextModel(tokenizer, chat, name)


class Resolved(NamedTuple):
    """max_tokens: of each choice. samplings: one per choice; the first one alone may rate the prompt."""

    max_tokens: int
    samplings: list[Sampling]

    def to_compute(self, choice: int) -> int:
        """Tokens to ask the engine for, which samples at least one after a prompt; 0: nothing is to be computed."""
        rates = self.samplings[choice].prompt_logprobs >= 0
        return max(self.max_tokens, 1) if rates else self.max_tokens

    def wanted(self, chunk: Chunk) -> Chunk:
        """What of a chunk was asked for."""
        if self.max_tokens == 0 and chunk.tokens:
            return Chunk(chunk.id, [], Finish.LENGTH)
        return chunk


def resolve(
    prompt_ids: Sequence[int], params: SamplingParams, info: EngineInfo, end_ids: frozenset[int], field: str = "prompt"
) -> Resolved:
    """Checks prompt and parameters, and fills in all that was left open.

    field: what the caller calls the prompt, for messages. Raises ClientError before anything is computed.
    """
    params.check(info.vocab_size)
    room = info.max_model_len - len(prompt_ids)
    if room <= 0:  # before its ids are looked at: there may be millions of them
        raise ClientError(
            f"{field} has {len(prompt_ids)} tokens, but prompt and answer together may have {info.max_model_len}; "
            f"shorten it to at most {info.max_model_len - 1} tokens.",
            field,
            "context_length_exceeded",
        )
    _check_prompt(prompt_ids, info.vocab_size, field)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    seed = secrets.randbits(64) if params.seed is None else params.seed & (2**64 - 1)
    own_ends = () if params.ignore_eos else end_ids
    first = Sampling(
        temperature=0.0 if params.temperature < GREEDY_BELOW else params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        stop_ids=tuple(sorted({*own_ends, *params.stop_token_ids})),
        min_tokens=params.min_tokens,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )
    others = (msgspec.structs.replace(first, choice=i, prompt_logprobs=-1) for i in range(1, params.n))
    return Resolved(max_tokens, [first, *others])


def check_priority(priority: int, info: EngineInfo) -> None:
    """Nobody may believe that a priority had an effect where it has none."""
    if priority and info.schedule_policy != "priority":
        raise ClientError(
            f"priority is {priority}, but the schedule policy is {info.schedule_policy}: it would have no effect; "
            'leave it out, or use the policy "priority".',
            "priority",
            "not_supported",
        )


def _check_prompt(ids: Sequence[int], vocab_size: int, field: str) -> None:
    if not ids:
        raise ClientError(f"{field} is empty; give at least one token.", field, "empty")
    # One pass in C over thousands of ids; the slow pass only looks for whom to name.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ClientError(
                f"{field}[{i}] must be a token id from 0 to {vocab_size - 1}, not {shown(token)}.",
                field,
                "out_of_range",
            )


def failure(chunk: Chunk, engine: Engine) -> PotokError:
    """The error to raise for a chunk that ended a request without an answer."""
    if chunk.finish is Finish.CANCELLED:
        return ServerError("the request was cancelled before it was complete.")
    message = chunk.error or "the request failed in the engine."
    if chunk.finish is Finish.TIMEOUT:
        return DeadlineExceeded(message, chunk.param)
    if chunk.param is not None:
        return ClientError(message, chunk.param)
    return EngineDead(message) if engine.dead else ServerError(message)


def fails(chunk: Chunk, begun: bool) -> bool:
    """Whether this chunk ends its call with an error. begun: some choice of the call has a token."""
    return chunk.finish in (Finish.ERROR, Finish.CANCELLED) or (
        chunk.finish is Finish.TIMEOUT and not begun and not chunk.tokens
    )


class _Inbox:
    """Chunks on their way from the engine to one Generation.

    Apart from the Generation, because the engine keeps it alive: a Generation that nobody reads any more must be
    collectable, since its end is what cancels its requests.
    """

    __slots__ = ("chunks", "waiter")

    def __init__(self) -> None:
        self.chunks: deque[tuple[int, Chunk]] = deque()
        self.waiter: asyncio.Future[None] | None = None

    def put(self, index: int, chunk: Chunk) -> None:
        self.chunks.append((index, chunk))
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None:
            if not self.waiter.done():
                self.waiter.set_result(None)
            self.waiter = None


class Generation:
    """The answer to one call: an async iterator of Pieces of its n choices, interleaved as they come.

    Raises ServerError when a choice failed, and DeadlineExceeded when one met its deadline before any had a token; the
    other choices are cancelled then. Later, a deadline ends a choice with what it has.
    Whoever stops early says so with `async with generation:` or `cancel()`; one that is dropped, or whose reading task
    is cancelled, cancels itself. Read it from one task, on the event loop of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        prompt_ids: list[int],
        resolved: Resolved,
        prompt: PromptAssembler,
        choices: list[ChoiceAssembler],
        terms: Terms,
    ) -> None:
        self.prompt_token_ids = prompt_ids
        self._engine = engine
        self._resolved = resolved
        self._prompt = prompt
        self._choices = choices
        self._terms = terms
        self._begun = False  # some choice has a token
        self._loop = asyncio.get_running_loop()
        self._inbox = _Inbox()
        self._live: dict[int, int] = {}  # choice -> request id, 0 before it has one
        self._later = range(0)  # choices that start when the prompt is rated
        if resolved.samplings[0].prompt_logprobs >= 0:
            self._later = range(1, len(choices))
            self._live = dict.fromkeys(range(len(choices)), 0)
            self._start(0)
        else:
            for index in range(len(choices)):
                self._start(index)

    def _start(self, index: int) -> None:
        max_tokens = self._resolved.to_compute(index)
        if max_tokens == 0:
            self._inbox.put(index, Chunk(0, [], Finish.LENGTH))
            self._live[index] = 0
            return
        sink = partial(self._inbox.put, index)
        sampling = self._resolved.samplings[index]
        self._live[index] = self._engine.submit(self.prompt_token_ids, max_tokens, sampling, sink, self._terms)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were in the prefix cache before this call: those that its first choice found.

        The others find what the first has computed, which is no merit of anybody before. None until the first tells.
        """
        return self._prompt.cached_tokens

    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """One per token of the prompt, the first None, when asked for; they are there before the first piece."""
        return self._prompt.logprobs()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while True:
            piece = self.ready()
            if piece is not None:
                return piece
            if not self._live:
                raise StopAsyncIteration
            self._inbox.waiter = self._loop.create_future()
            try:
                await self._inbox.waiter
            except asyncio.CancelledError:
                self.cancel()
                raise

    def ready(self) -> Piece | None:
        """The next piece if it is there already, so that a reader may take several at once. Raises as the iterator."""
        chunks = self._inbox.chunks
        while self._live and chunks:
            piece = self._assemble(*chunks.popleft())
            if piece is not None:
                return piece
        return None

    def _assemble(self, index: int, chunk: Chunk) -> Piece | None:
        """None: nothing to show yet, or the choice had ended already."""
        request = self._live.get(index)
        if request is None:
            return None
        if fails(chunk, self._begun):
            del self._live[index]
            self.cancel()
            raise failure(chunk, self._engine)
        if index == 0 and not self._prompt.told:
            self._prompt.push(chunk)
            if self._prompt.told:
                later, self._later = self._later, range(0)
                for other in later:
                    self._start(other)
        self._begun = self._begun or bool(chunk.tokens)
        part = self._choices[index].push(self._resolved.wanted(chunk))
        if part.finish_reason is not None:
            del self._live[index]
            if chunk.finish is None:  # a stop string matched: the engine does not know yet
                self._engine.cancel(request)
        elif not part.token_ids:
            return None
        return Piece(index, part.text, part.token_ids, part.logprobs, part.finish_reason, part.stop_reason)

    def cancel(self) -> None:
        """Ends all choices; a reader waiting on another task sees the end of the iteration. May be called again."""
        live, self._live = self._live, {}
        _cancel_all(self._engine, live.values())
        self._inbox.chunks.clear()
        self._inbox.wake()

    async def aclose(self) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # The collector may run on any thread, so this goes through the loop; once that is closed, the engine is gone.
        if getattr(self, "_live", None) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_cancel_all, self._engine, list(self._live.values()))


def _cancel_all(engine: Engine, requests: Iterable[int]) -> None:
    for request in requests:
        if request:
            engine.cancel(request)


class FrontEnd:
    """One model as its users see it: text in, text out.

    model_name: the name that clients use.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, chat: ChatTemplate, model_name: str) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat = chat
        self.model_name = model_name

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        field: str = "prompt",
        terms: Terms = USUAL_TERMS,
    ) -> Generation:
        """Starts n requests. Raises ClientError, with nothing started, when anything about the call is out of bounds.

        field: what the caller calls the prompt ("prompt", "messages"), for error messages.
        """
        check_priority(terms.priority, self.engine.info)
        resolved = resolve(prompt_ids, params, self.engine.info, self.tokenizer.end_ids, field)
        stops = StopStrings(params.stop)
        choices = [ChoiceAssembler(self.tokenizer, params, stops) for _ in resolved.samplings]
        ids = list(prompt_ids)
        prompt = PromptAssembler(self.tokenizer, ids, params)
        return Generation(self.engine, ids, resolved, prompt, choices, terms)

    def check_size(self, num_chars: int, field: str) -> None:
        """Refuses text that cannot fit into the context however it is tokenised, before anybody tokenises it."""
        context = self.engine.info.max_model_len
        if num_chars > context * self.tokenizer.max_chars_per_token:
            raise ClientError(
                f"{field} has {num_chars} characters, more than fit into {context} tokens, which prompt and answer "
                "together may have; shorten it.",
                field,
                "context_length_exceeded",
            )

    async def encode_prompt(self, text: str, field: str = "prompt") -> list[int]:
        """Ids of a completions prompt, with the begin id where the model file asks for it."""
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode_prompt(text, field)
        return await asyncio.to_thread(self.tokenizer.encode_prompt, text, field)

    async def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Ids of a dialogue, ready for the assistant's turn. Raises ClientError where the template refuses it."""
        if is_small([messages, kwargs], INLINE_CHARS):
            return self.chat.encode(messages, **kwargs)
        return await asyncio.to_thread(partial(self.chat.encode, messages, **kwargs))
