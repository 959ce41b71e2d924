"""AsyncLLM: the engine in a process of its own, answers as they come, for use inside an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from potok.config import EngineConfig
from potok.engine.client import EngineClient
from potok.errors import ServerError
from potok.frontend import FrontEnd, TextModel, open_text_model
from potok.llm.outputs import CompletionOutput, RequestOutput, of_prompt
from potok.llm.prompts import Message, OnePrompt, prompt_of
from potok.llm.settings import Settings
from potok.params import SamplingParams, Sharing, Terms, check_salt, terms_of
from potok.weights.default_model import find_default_model


class AsyncLLM:
    """A model in an engine process of its own.

        async with AsyncLLM() as llm:
            async for answer in llm.generate("The capital of Japan is", SamplingParams(temperature=0)):
                print(answer.outputs[0].text)

    model: path of a GGUF file; None is the default model. Settings are those of `potok serve` (see EngineConfig).
    """

    def __init__(self, model: str | PathLike[str] | None = None, **settings: Unpack[Settings]) -> None:
        path = find_default_model() if model is None else Path(model)
        self._prepare(EngineConfig(model=str(path), **settings))

    @classmethod
    def for_config(cls, config: EngineConfig) -> Self:
        """For a caller that has its settings together already."""
        self = cls.__new__(cls)
        self._prepare(config)
        return self

    def _prepare(self, config: EngineConfig) -> None:
        self._config = config
        self._engine: EngineClient | None = None
        self._frontend: FrontEnd | None = None
        self._numbers = count()

    @classmethod
    def over(cls, engine: EngineClient, text: TextModel) -> Self:
        """An AsyncLLM over an engine that has started. `close` stops that engine too."""
        self = cls.__new__(cls)
        self._prepare(EngineConfig(model=""))
        self._engine = engine
        self._frontend = FrontEnd(engine, *text)
        return self

    @property
    def frontend(self) -> FrontEnd:
        """Text and engine as the server uses them. Raises ServerError before `start`."""
        if self._frontend is None:
            raise ServerError("this AsyncLLM is not running; use `async with`, or `await llm.start()` first.")
        return self._frontend

    async def start(self) -> None:
        """Loads the model. Raises LoadError when model or settings cannot be used."""
        engine = EngineClient.for_model(self._config)
        engine.spawn()
        try:
            text = await asyncio.to_thread(open_text_model, self._config.model)  # while the engine loads
            await engine.start()
        except BaseException:
            await engine.stop()
            raise
        self._engine = engine
        self._frontend = FrontEnd(engine, *text)

    async def close(self) -> None:
        """Ends the engine process; answers that are still open fail. May be called again."""
        engine, self._engine, self._frontend = self._engine, None, None
        if engine is not None:
            await engine.stop()

    async def __aenter__(self) -> Self:
        if self._frontend is None:
            await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def generate(
        self,
        prompt: OnePrompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_ms: int | None = None,
        ttft_timeout_ms: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt. Every output holds all that is there so far; the last is `finished`.

        prompt: text, token ids, or a dict {"prompt": text} or {"prompt_token_ids": ids}; a dict may have a "cache_salt"
        too: only prompts with the same salt share their KV.
        sampling_params: None is the default, 16 tokens at temperature 1. Leaving the loop early ends the request; where
        the code in the loop may raise or be cancelled, `contextlib.aclosing` makes that certain at once.
        priority: lower comes earlier; needs `schedule_policy="priority"`.
        timeout_ms, ttft_timeout_ms: from now until the answer ends with what is there, and until it must have begun.
        Raises ClientError when anything is out of bounds, ServerError when the request failed, DeadlineExceeded when it
        has no token by a deadline.
        """
        frontend = self.frontend
        params = sampling_params or SamplingParams()
        content, salt = prompt_of(prompt, "prompt")
        terms = _terms(salt, priority, timeout_ms, ttft_timeout_ms)
        if isinstance(content, str):
            return self._answer(frontend, content, partial(frontend.encode_prompt, content), params, "prompt", terms)
        return self._answer(frontend, None, partial(_given, content), params, "prompt", terms)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_ms: int | None = None,
        ttft_timeout_ms: int | None = None,
        **template_arguments: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a dialogue of messages {"role", "content"}, as `generate` does a prompt.

        sampling_params: None is the rest of the context at temperature 1. cache_salt: only calls with the same share
        their KV.
        """
        terms = _terms("" if cache_salt is None else check_salt(cache_salt), priority, timeout_ms, ttft_timeout_ms)
        frontend = self.frontend
        params = sampling_params or SamplingParams(max_tokens=None)
        encode = partial(frontend.encode_chat, [dict(message) for message in messages], **template_arguments)
        return self._answer(frontend, None, encode, params, "messages", terms)

    async def _answer(
        self,
        frontend: FrontEnd,
        prompt: str | None,
        encode: Callable[[], Awaitable[list[int]]],
        params: SamplingParams,
        field: str,
        terms: Terms,
    ) -> AsyncGenerator[RequestOutput, None]:
        name = str(next(self._numbers))
        ids = await encode()
        choices = [CompletionOutput(index) for index in range(params.n)]
        async with frontend.generate(ids, params, field, terms) as generation:
            prompt_logprobs = None
            async for piece in generation:
                choices[piece.index].add(piece)
                finished = all(choice.finish_reason for choice in choices)
                prompt_logprobs = prompt_logprobs or of_prompt(generation.prompt_logprobs())
                yield RequestOutput(
                    name,
                    prompt,
                    ids,
                    [choice.snapshot() for choice in choices],
                    finished,
                    prompt_logprobs,
                    generation.cached_tokens,
                )


def _terms(salt: str, priority: int, timeout_ms: int | None, ttft_timeout_ms: int | None) -> Terms:
    return terms_of(
        Sharing(salt=salt),
        priority=priority,
        arrived_us=time.monotonic_ns() // 1000,
        timeout_ms=timeout_ms,
        ttft_timeout_ms=ttft_timeout_ms,
        whole=False,
    )


async def _given(ids: list[int]) -> list[int]:
    return ids
