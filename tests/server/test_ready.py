"""When the server says that it is ready, it is."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from server_kit import Script

from potok.backends.modelled.scripted import ScriptedBackend
from potok.config import ServerConfig
from potok.engine.thread import threaded_client
from potok.server import serving
from potok.server.listen import listen
from potok.server.service import Service


def test_calls_are_taken_before_anybody_is_told_so(text_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads the line may call before the server does anything else."""
    said: list[tuple[str, bool]] = []

    async def main() -> None:
        engine = threaded_client(ScriptedBackend(Script().choose, vocab_size=text_model.tokenizer.vocab_size))
        service = Service(engine, ServerConfig())
        monkeypatch.setattr(serving, "open_text_model", lambda path, name: text_model)
        monkeypatch.setattr(serving, "_say", lambda line: said.append((line, service.loaded)))
        with listen("127.0.0.1", 0) as listener:
            await serving._Process(listener, engine, "a model", ServerConfig(), time.monotonic())._load(service)
        service.entrance()
        await engine.stop()

    asyncio.run(main())
    assert said[-1][0].startswith("ready on http://127.0.0.1:")
    assert all(taken for _, taken in said)
