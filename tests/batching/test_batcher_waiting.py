"""The lines of those who wait, without an event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest

from potok.batching.waiting import Bounds, Entry, Waiting


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


def test_only_what_is_in_the_queue_fills_a_batch(loop: asyncio.AbstractEventLoop) -> None:
    """Else every item that comes would have the queue looked through."""
    waiting = Waiting(Bounds(batch_size=4, batch_tokens=10, queue=math.inf, wait_s=1))
    entries = [Entry(None, tokens, loop.create_future()) for tokens in (6, 4, 6, 4)]
    for entry in entries[:2]:
        assert not waiting.fills_a_batch
        waiting.enter(entry, 0)
    assert waiting.fills_a_batch
    assert waiting.next_batch(0) == entries[:2]
    waiting.enter(entries[2], 0)
    assert not waiting.fills_a_batch
    waiting.leave(entries[2], 0)
    waiting.enter(entries[3], 0)
    assert not waiting.fills_a_batch
    assert waiting.next_batch(0.5) == []
    assert waiting.deadline == 1
    assert waiting.next_batch(1) == [entries[3]]
    assert waiting.deadline is None


def test_who_has_left_may_leave_again(loop: asyncio.AbstractEventLoop) -> None:
    """A caller may be cancelled while a thread takes its batch."""
    waiting = Waiting(Bounds(batch_size=1, batch_tokens=math.inf, queue=1, wait_s=0))
    taken, stays, outside = (Entry(None, 0, loop.create_future()) for _ in range(3))
    for entry in (taken, stays, outside):
        waiting.enter(entry, 0)
    assert [*waiting.outside] == [stays, outside]
    assert waiting.next_batch(0) == [taken]
    for _ in range(2):
        waiting.leave(taken, 0)
        waiting.leave(outside, 0)
    assert ([*waiting.queue], [*waiting.outside]) == ([stays], [])
