"""One engine, from loading to its end, on whatever thread or process it runs."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from potok.backends.api import Backend
from potok.core.scheduler import Scheduler
from potok.engine.journal import Journal
from potok.engine.loop import Connection, EngineLoop
from potok.engine.scheduling import SchedulerSettings
from potok.engine.tier_store import NoStore, Store
from potok.errors import LoadError
from potok.protocol import EngineInfo, Failed, Ready

EXIT_LOAD = 2
EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h


@dataclass(frozen=True, slots=True)
class Engine:
    """What serving needs. The backend has its KV memory and has run a step."""

    scheduler: Scheduler
    backend: Backend
    info: EngineInfo
    settings: SchedulerSettings  # of the scheduler
    store: Store = field(default_factory=NoStore)  # of the scheduler's second tier
    journal: Journal | None = None  # of the scheduler's calls

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
        self.store.close()


def serve_engine(connection: Connection, build: Callable[[], Engine]) -> int:
    """Builds the engine, says Ready, serves until Shutdown; returns the exit code. What ends it early is sent first."""
    try:
        engine = build()
        connection.send(Ready(engine.info))
        try:
            EngineLoop(engine.scheduler, engine.backend, connection, engine.store).run()
        finally:
            engine.close()
    except LoadError as error:
        connection.send(Failed(str(error)))
        return EXIT_LOAD
    except Exception as error:
        # A bug. Its place goes to stderr for the report, its sentence to everybody who waits for an answer.
        traceback.print_exc()
        connection.send(Failed(f"{type(error).__name__}: {error}"))
        return EXIT_BUG
    return 0
