"""What the routes share: the state of the process, the calls that are open, the metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from enum import Enum
from typing import Protocol

from potok.config import ServerConfig
from potok.errors import Unavailable
from potok.frontend import Engine, FrontEnd
from potok.obs.metrics import Metrics
from potok.protocol import CachedPrefix, Stats
from potok.server.admission import Admission
from potok.server.limits import HEARTBEAT_S, MAX_CALLS


class LiveEngine(Engine, Protocol):
    """What the server needs of an engine: `EngineClient` is one."""

    @property
    def stats(self) -> Stats: ...

    @property
    def unseen(self) -> int: ...

    @property
    def dead(self) -> bool: ...

    def heartbeat_age(self) -> float: ...

    async def describe_cache(self, top: int, namespace: str | None) -> list[CachedPrefix]: ...


class Phase(Enum):
    """Of the process; it only moves down."""

    STARTING = "the model is being loaded"
    READY = "ready"
    DRAINING = "the server is shutting down"


class Service:
    """One engine and everybody who uses it. Made on the event loop that serves.

    cut: done when all open calls must end at once.
    max_calls, heartbeat_s: see limits.
    """

    def __init__(
        self,
        engine: LiveEngine,
        config: ServerConfig,
        *,
        max_calls: int = MAX_CALLS,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.engine = engine
        self.admission = Admission(config, engine)
        self.metrics = Metrics(lambda: engine.stats)
        self.phase = Phase.STARTING
        self._heartbeat_s = heartbeat_s
        self._max_calls = max(max_calls, 2 * config.max_waiting)
        self._frontend: FrontEnd | None = None
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ready(self, frontend: FrontEnd) -> None:
        self._frontend = frontend
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY

    def drain(self) -> None:
        """From now on nothing new is taken; what runs goes on."""
        self.phase = Phase.DRAINING

    @property
    def live(self) -> bool:
        """False: only a restart helps."""
        if self.phase is Phase.STARTING:
            return not self.engine.dead
        return not self.engine.dead and self.engine.heartbeat_age() < self._heartbeat_s

    @property
    def loaded(self) -> bool:
        return self._frontend is not None

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def frontend(self) -> FrontEnd:
        """For work that the engine takes no part in. Raises Unavailable before the model is loaded."""
        if self._frontend is None:
            raise Unavailable(f"{Phase.STARTING.value}; try again in a moment.", code="not_ready")
        return self._frontend

    def entrance(self) -> FrontEnd:
        """For a new call. Raises Unavailable when none can be taken."""
        if self.phase is Phase.DRAINING:
            raise Unavailable(f"{self.phase.value}; try another one.", code="shutting_down")
        if self.engine.dead:
            raise Unavailable("the engine has stopped; the server must be restarted.", code="engine_dead")
        if self._num_calls > self._max_calls:
            raise Unavailable(f"{self._max_calls} calls are open; try again in a moment.", code="overloaded")
        return self.frontend()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around all of one call, from the first byte of its body to the last of its answer."""
        self._num_calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._idle.set()

    async def idle(self) -> None:
        """Returns when no call is open."""
        await self._idle.wait()

    def cut_off(self) -> None:
        """Ends all open calls now, with an error."""
        if not self.cut.done():
            self.cut.set_result(None)
