"""An event loop whose clock jumps to the next timer as soon as nothing else is left to do: waits are exact and free."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: Threads are the only thing that is waited for in real time; a test whose thread never answers ends here.
PATIENCE_S = 20


class _Jumping(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout is None:
            events = super().select(PATIENCE_S)
            assert events, "nothing is left that could happen"
        elif not events and timeout is not None:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    @property
    def timers(self) -> int:
        return sum(not handle.cancelled() for handle in self._scheduled)  # type: ignore[attr-defined]


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


def now_ms() -> float:
    return round(asyncio.get_running_loop().time() * 1e3, 6)


async def at_ms(when: float) -> None:
    """Waits until the clock shows so much."""
    await asyncio.sleep(when / 1e3 - asyncio.get_running_loop().time())


async def turns(count: int = 5) -> None:
    """Lets everybody run for some turns of the event loop, without time going by."""
    for _ in range(count):
        await asyncio.sleep(0)
