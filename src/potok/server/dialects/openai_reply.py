"""A call that runs, and its answer in OpenAI's JSON: whole, or as server-sent events. No HTTP.

Completions and chat differ in a few words; a Shape holds them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from potok.errors import DeadlineExceeded, PotokError
from potok.frontend import Generation, Piece
from potok.server.dialects.openai_logprobs import (
    Offsets,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from potok.text.assembler import TokenLogprob

DONE = b"data: [DONE]\n\n"


def event(message: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


class Shape(Protocol):
    """How one of the two routes spells its answers."""

    prefix: str  # of ids
    whole: str  # `object` of a complete answer
    chunk: str  # `object` of a chunk
    prompt_in_choice: bool  # where the prompt's ids and log-probabilities go, else beside the choices

    def choice(self, index: int, text: str) -> dict[str, Any]:
        """One choice of a complete answer, as far as its text."""
        ...

    def delta(self, index: int, text: str | None) -> dict[str, Any]:
        """One choice of a chunk; text None: nothing more to say."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What goes before the first text of a choice in a stream, if anything."""
        ...

    def logprobs(self, tokens: Sequence[TokenLogprob], offsets: Offsets) -> dict[str, Any]: ...


class TextShape:
    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"
    prompt_in_choice = True  # a call may have several prompts

    def choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text}

    def delta(self, index: int, text: str | None) -> dict[str, Any]:
        return {"index": index, "text": text or ""}

    def opening(self, index: int) -> None:
        return None

    def logprobs(self, tokens: Sequence[TokenLogprob], offsets: Offsets) -> dict[str, Any]:
        return completion_logprobs(tokens, offsets)


class ChatShape:
    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    prompt_in_choice = False

    def choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, index: int, text: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {} if text is None else {"content": text}}

    def opening(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}}

    def logprobs(self, tokens: Sequence[TokenLogprob], offsets: Offsets) -> dict[str, Any]:
        return chat_logprobs(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a caller wants to be told, beside the text. prompt_logprobs: how many for each token of the prompt."""

    stream: bool
    usage_chunk: bool
    token_ids: bool
    logprobs: bool
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is to stand before its answers. text: as its tokens spell it, the added begin token left out.

    first: its first token, spelt; its log-probability means nothing. top: how many alternatives are wanted beside each.
    """

    text: str
    first: TokenLogprob
    top: int


@dataclass(slots=True)
class _Choice:
    """What one choice has gained: all of it, or what a stream has not sent yet."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: Offsets = field(default_factory=Offsets)
    told: bool = False  # a stream has sent something of it
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or ()
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason


class Reply:
    """One call under way: `batches` is read once, by one task; `Whole` or `Events` spells what comes."""

    def __init__(
        self,
        shape: Shape,
        model: str,
        generations: list[Generation],
        n: int,
        wishes: Wishes,
        echoes: Sequence[Echo] = (),
    ) -> None:
        """echoes: one per prompt where they are wanted."""
        self.shape = shape
        self.wishes = wishes
        self._echoes = echoes
        self.id = shape.prefix + secrets.token_hex(12)
        self.created = int(time.time())
        self.model = model
        self.prompts = [generation.prompt_token_ids for generation in generations]
        self.n = n
        self._generations = generations
        self._begun = False  # something has come

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, whatever the number of its choices."""
        return sum(map(len, self.prompts))

    @property
    def is_long_to_spell(self) -> bool:
        """Whether up to twenty alternatives a token are to be spelt, perhaps of a whole prompt."""
        return self.wishes.logprobs or self.wishes.prompt_logprobs is not None

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self._echoes) and self.wishes.logprobs

    def prompt_of(self, index: int) -> list[int]:
        return self.prompts[index // self.n]

    def echo_of(self, index: int) -> Echo | None:
        return self._echoes[index // self.n] if self._echoes else None

    def echoed_logprobs(self, index: int) -> dict[str, Any] | None:
        """Of the prompt of a choice that has said something, where its text is echoed and log-probabilities wanted."""
        echo = self.echo_of(index)
        if echo is None or not self.wishes.logprobs:
            return None
        rest = self._generations[index // self.n].prompt_logprobs() or ()
        trimmed = [msgspec.structs.replace(p, top=p.top[: echo.top]) for p in rest if p is not None]
        return echoed_logprobs(echo.first, trimmed, Offsets())

    def prompt_logprobs(self, index: int) -> list[dict[str, Any] | None] | None:
        """Of the prompt of a choice that has said something, or that was too late to."""
        positions = self._generations[index // self.n].prompt_logprobs()
        if self.wishes.prompt_logprobs is None or positions is None:
            return None
        return prompt_logprobs(positions, self.wishes.prompt_logprobs)

    def cancel(self) -> None:
        for generation in self._generations:
            generation.cancel()

    def batches(self) -> AsyncIterator[list[Piece]]:
        """All pieces of all prompts as they come, those together that are there at the same time.

        `index` counts choices over all prompts. Raises ClientError or ServerError, as the generations do.
        """
        return self._single(self._generations[0]) if len(self._generations) == 1 else self._merged()

    async def _single(self, generation: Generation) -> AsyncIterator[list[Piece]]:
        """Of one prompt. One that is too late to begin ends without a token if others of the call have some."""
        try:
            async for piece in generation:
                self._begun = True
                batch = [piece]
                try:
                    while (more := generation.ready()) is not None:
                        batch.append(more)
                except PotokError:
                    yield batch
                    raise
                yield batch
        except DeadlineExceeded as late:
            if not self._begun:
                raise
            yield [Piece(i, "", [], finish_reason="length", stop_reason=late.param) for i in range(self.n)]

    async def _merged(self) -> AsyncIterator[list[Piece]]:
        inbox: asyncio.Queue[list[Piece] | Exception | None] = asyncio.Queue()

        async def follow(first: int, generation: Generation) -> None:
            try:
                async for batch in self._single(generation):
                    inbox.put_nowait([msgspec.structs.replace(piece, index=first + piece.index) for piece in batch])
                inbox.put_nowait(None)
            except Exception as error:
                inbox.put_nowait(error)

        followers = [asyncio.create_task(follow(i * self.n, g)) for i, g in enumerate(self._generations)]
        try:
            for _ in followers:
                while (item := await inbox.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            self.cancel()
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        """cached_tokens: of each prompt, what was in the prefix cache before this call, whatever n is."""
        prompt_tokens = self.prompt_tokens
        cached_tokens = sum(generation.cached_tokens or 0 for generation in self._generations)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


class Whole:
    """The complete answer, gathered piece by piece."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._choices = [_Choice() for _ in range(reply.n * len(reply.prompts))]

    def take(self, batch: Sequence[Piece]) -> None:
        for piece in batch:
            self._choices[piece.index].add(piece)

    def message(self) -> dict[str, Any]:
        reply = self._reply
        message: dict[str, Any] = {
            "id": reply.id,
            "object": reply.shape.whole,
            "created": reply.created,
            "model": reply.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": reply.usage(sum(len(choice.token_ids) for choice in self._choices)),
        }
        if not reply.shape.prompt_in_choice:
            self._add_prompt(message, 0)
        return message

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        reply, shape = self._reply, self._reply.shape
        echo = reply.echo_of(index)
        before = "" if echo is None else echo.text
        message = shape.choice(index, before + "".join(choice.texts))
        message["logprobs"] = None
        if reply.wishes.logprobs:
            message["logprobs"] = shape.logprobs(choice.logprobs, Offsets(len(before)))
        if (echoed := reply.echoed_logprobs(index)) is not None:
            message["logprobs"] = joined(echoed, message["logprobs"])
        message["finish_reason"] = choice.finish_reason
        message["stop_reason"] = choice.stop_reason
        if reply.wishes.token_ids:
            message["token_ids"] = choice.token_ids
        if shape.prompt_in_choice:
            self._add_prompt(message, index)
        return message

    def _add_prompt(self, message: dict[str, Any], index: int) -> None:
        """What is told of the prompt of a choice, to the choice's message or to the whole."""
        reply = self._reply
        if reply.wishes.token_ids:
            message["prompt_token_ids"] = reply.prompt_of(index)
        if reply.wishes.prompt_logprobs is not None:
            message["prompt_logprobs"] = reply.prompt_logprobs(index)


class Events:
    """The answer as server-sent events: bytes to send now, piece by piece.

    Per choice: an opening chunk (chat), a chunk for each text, a chunk with the finish reason. A piece without text,
    whose characters or stop strings are still open, sends nothing: its ids and logprobs go with the next text.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._shape = reply.shape
        self._plain = not (reply.wishes.token_ids or reply.wishes.logprobs)
        self._held: dict[int, _Choice] = {}  # by choice, what has not been sent
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by choice, what stands before and after its text in a chunk
        self._completion_tokens = 0

    def take(self, batch: Sequence[Piece]) -> bytes:
        return b"".join([self._piece(piece) for piece in batch])

    def _piece(self, piece: Piece) -> bytes:
        index = piece.index
        out = b"" if index in self._held else self._open(index)
        self._completion_tokens += len(piece.token_ids)
        if self._plain:
            if piece.text:
                before, after = self._around[index]
                out += before + msgspec.json.encode(piece.text) + after
        else:
            self._held[index].add(piece)
            if piece.text:
                out += self._tell(index, piece.text)
        if piece.finish_reason is not None:
            out += self._tell(index, None, piece)
        return out

    def end(self) -> bytes:
        """After the last piece."""
        if not self._reply.wishes.usage_chunk:
            return DONE
        return event(self._message([], self._reply.usage(self._completion_tokens))) + DONE

    def _open(self, index: int) -> bytes:
        """Encodes the constant parts of a choice's chunks once, so that a token costs two joins; gives the opening."""
        marker = self._reply.id  # random: nothing in a chunk looks like it but the chunk's own id, which comes first
        before, after = self._chunk(self._shape.delta(index, marker)).rsplit(f'"{marker}"'.encode(), 1)
        self._around[index] = before, after
        self._held[index] = _Choice()
        opening = self._shape.opening(index)
        if opening is not None:
            return self._chunk(opening, prompt_ids=self._reply.prompts[0] if len(self._held) == 1 else None)
        echo = self._reply.echo_of(index)
        return b"" if echo is None else self._tell(index, echo.text, echo=echo)

    def _tell(self, index: int, text: str | None, last: Piece | None = None, echo: Echo | None = None) -> bytes:
        """A chunk with all that was held back for this choice, or with its echo. last: the piece that ends it."""
        held = self._held[index]
        logprobs = self._shape.logprobs(held.logprobs, held.offsets) if held.logprobs else None
        if echo is not None:
            held.offsets = Offsets(len(echo.text))
            logprobs = self._reply.echoed_logprobs(index)
        self._held[index] = _Choice(offsets=held.offsets, told=True)
        choice = self._shape.delta(index, text)
        if self._reply.wishes.token_ids:
            choice["token_ids"] = held.token_ids
            if self._shape.prompt_in_choice and not held.told:
                choice["prompt_token_ids"] = self._reply.prompt_of(index)
        return self._chunk(choice, logprobs, last)

    def _chunk(
        self,
        choice: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        last: Piece | None = None,
        prompt_ids: list[int] | None = None,
    ) -> bytes:
        choice["logprobs"] = logprobs
        choice["finish_reason"] = None if last is None else last.finish_reason
        if last is not None:
            choice["stop_reason"] = last.stop_reason
        message = self._message([choice])
        if prompt_ids is not None and self._reply.wishes.token_ids:
            message["prompt_token_ids"] = prompt_ids
        return event(message)

    def _message(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        reply = self._reply
        message: dict[str, Any] = {
            "id": reply.id,
            "object": self._shape.chunk,
            "created": reply.created,
            "model": reply.model,
            "choices": choices,
        }
        if reply.wishes.usage_chunk:
            message["usage"] = usage
        return message
