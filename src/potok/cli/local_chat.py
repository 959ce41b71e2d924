"""A model of this machine for `potok chat`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from potok.config import EngineConfig
from potok.llm import AsyncLLM
from potok.params import SamplingParams


class LocalModel:
    """Loads the model; raises LoadError.

    The event loop runs only while an answer is made, so that Ctrl-C means that answer alone and typing blocks nobody.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._runner = asyncio.Runner()
        self._llm = AsyncLLM.for_config(config)
        try:
            self._runner.run(self._llm.start())
        except BaseException:
            self._runner.close()
            raise
        self.name = self._llm.frontend.model_name

    def answer(self, messages: list[dict[str, Any]], params: SamplingParams, show: Callable[[str], None]) -> int:
        return self._runner.run(self._answer(messages, params, show))

    async def _answer(self, messages: list[dict[str, Any]], params: SamplingParams, show: Callable[[str], None]) -> int:
        frontend = self._llm.frontend
        ids = await frontend.encode_chat(messages)
        tokens = 0
        async with frontend.generate(ids, params, "messages") as generation:
            async for piece in generation:
                tokens += len(piece.token_ids)
                if piece.text:
                    show(piece.text)
        return tokens

    def close(self) -> None:
        self._runner.run(self._llm.close())
        self._runner.close()
