"""What the engine tests share: a script with memory, its oracle, and sinks that remember."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from potok.backends.api import StepInputs
from potok.engine.client import EngineClient
from potok.finish import Finish
from potok.protocol import Chunk, Sampling

VOCAB = 1000


def remember_all(history: Sequence[int]) -> int:
    """A next id that depends on every token and every position before it."""
    state = 17
    for token in history:
        state = (state * 31 + token) % 1_000_003
    return state % VOCAB


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """What one request alone must be answered with."""
    history = list(prompt)
    for _ in range(count):
        history.append(remember_all(history))
    return history[len(prompt) :]


class Answer:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.done = asyncio.Event()

    def __call__(self, chunk: Chunk) -> None:
        assert not self.done.is_set(), "a chunk after the last one"
        self.chunks.append(chunk)
        if chunk.finish is not None:
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def finish(self) -> Finish | None:
        return self.chunks[-1].finish if self.chunks else None

    @property
    def error(self) -> str:
        return (self.chunks[-1].error or "") if self.chunks else ""

    async def wait(self) -> Answer:
        await asyncio.wait_for(self.done.wait(), 20)
        return self


class Gate:
    """An `on_step` that lets one step through for each `open`."""

    def __init__(self) -> None:
        self._passes = threading.Semaphore(0)
        self.entered = 0

    def __call__(self, inputs: StepInputs) -> None:
        self.entered += 1
        assert self._passes.acquire(timeout=20), "nobody opened the gate"

    def open(self, steps: int = 1) -> None:
        self._passes.release(steps)


def ask(client: EngineClient, prompt: list[int], max_tokens: int, sampling: Sampling | None = None) -> Answer:
    answer = Answer()
    client.submit(prompt, max_tokens, sampling or Sampling(), answer)
    return answer


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def running(client: EngineClient) -> AsyncIterator[EngineClient]:
    try:
        await client.start()
        yield client
    finally:
        await client.stop()
