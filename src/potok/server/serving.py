"""The event loop of the API process: loads, serves, drains, ends. `run` says why this is a module of its own.

start -> loading -> ready -> draining -> end          exit code
  a model that cannot be loaded ................ 2
  SIGTERM or SIGINT, running calls finished .... 0
  ... after drain_seconds, the rest cut off .... 0
  a second signal, at once ..................... 1
  the engine died .............................. 1
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn
import uvloop

from potok import __version__
from potok.config import EngineConfig, ServerConfig
from potok.engine.client import EngineClient
from potok.errors import LoadError
from potok.frontend import FrontEnd, open_text_model
from potok.protocol import EngineInfo
from potok.server.app import create_app
from potok.server.head_limit import BoundedHeadProtocol
from potok.server.keys import ApiKeys
from potok.server.listen import BACKLOG, url_of
from potok.server.service import Service

EXIT_OK, EXIT_FAILED, EXIT_CANNOT_START = 0, 1, 2

#: How long answers that are complete, or cut off, may take to leave the process, in seconds.
FLUSH_S = 1.0

#: An idle connection is kept for clients that come back, in seconds. Longer than usual clients and proxies keep theirs,
#: so that it is they who close it, and never we, just when they send.
KEEP_ALIVE_S = 75

SAMPLE_S = 1.0


def serve(
    listener: socket.socket, engine: EngineClient, engine_config: EngineConfig, config: ServerConfig, started_s: float
) -> int:
    """Serves on `listener` over an engine that was spawned. started_s: of time.monotonic()."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        process = _Process(listener, engine, engine_config.model, config, started_s)
        code = runner.run(process.run())
        if process.signals.second.is_set():
            # At once: a thread may still tokenise, and the interpreter would wait for it.
            sys.stderr.flush()
            os._exit(code)
    return code


class _Signals:
    """SIGTERM and SIGINT: the first asks to stop, the second insists."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class Http(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_config(service: Service, keys: ApiKeys) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service, keys),
        http=BoundedHeadProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )


class _Process:
    def __init__(
        self, listener: socket.socket, engine: EngineClient, model: str, config: ServerConfig, started_s: float
    ) -> None:
        self.signals = _Signals()
        self._listener = listener
        self._engine = engine
        self._model = model
        self._config = config
        self._started_s = started_s
        self._imported_s = time.monotonic()

    async def run(self) -> int:
        service = Service(self._engine, self._config)
        http = Http(http_config(service, ApiKeys(self._config.api_keys)))
        with self.signals.handled():
            serving = asyncio.create_task(http.serve(sockets=[self._listener]))
            sampling = asyncio.create_task(_sample(service))
            try:
                return await self._live(service)
            finally:
                sampling.cancel()
                http.should_exit = True
                http.force_exit = self.signals.second.is_set()
                await _first(serving, self.signals.second.wait())
                await self._engine.stop(patience=0.0 if self.signals.second.is_set() else 5.0)

    async def _live(self, service: Service) -> int:
        loading = asyncio.create_task(self._load(service))
        await _first(loading, self.signals.first.wait(), keep=True)
        if self.signals.first.is_set():  # it may have ended the engine, too, which then is no failure
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return EXIT_OK
        try:
            loading.result()
        except LoadError as error:
            _say(f"potok: {error}")
            return EXIT_CANNOT_START
        # What stands now stays: the collector need not look through it again and again, while streams wait.
        gc.freeze()
        await _first(self.signals.first.wait(), self._engine.wait_dead())
        if self._engine.dead:
            return await self._engine_died(service)
        return await self._drain(service)

    async def _load(self, service: Service) -> None:
        """The tokenizer, while the engine loads its weights; then the engine, which measures the machine last.

        Calls are taken before anybody is told so: who waits for that line may call at once.
        """
        text = await asyncio.to_thread(open_text_model, self._model, self._config.served_model_name)
        text_s = time.monotonic()
        info = await self._engine.start()
        engine_s = time.monotonic()
        frontend = FrontEnd(self._engine, *text)
        service.ready(frontend)
        self._announce(frontend.model_name, info, text_s, engine_s)

    def _announce(self, name: str, info: EngineInfo, text_s: float, engine_s: float) -> None:
        for note in info.notes:
            _say(f"  {note}")
        if self._config.api_keys:
            names = sorted({name for name, _ in self._config.api_keys})
            _say(f"  API keys: {', '.join(names)}")
        now_s = time.monotonic()
        start_s = self._started_s
        ends = {"imports": self._imported_s, "tokenizer": text_s, "engine": engine_s}
        phases = ", ".join(f"{phase} after {end_s - start_s:.1f}" for phase, end_s in ends.items())
        _say(f"potok {__version__} serves {name}")
        _say(f"ready on {url_of(self._listener)} in {now_s - start_s:.1f} s ({phases})")

    async def _drain(self, service: Service) -> int:
        service.drain()
        if service.num_calls:
            _say(
                f"stopping: {service.num_calls} calls may take {self._config.drain_seconds:g} s more; again to stop now"
            )
        await _first(
            service.idle(),
            asyncio.sleep(self._config.drain_seconds),
            self.signals.second.wait(),
            self._engine.wait_dead(),
        )
        if self.signals.second.is_set():
            return EXIT_FAILED if service.num_calls else EXIT_OK
        if self._engine.dead:
            return await self._engine_died(service)
        if service.num_calls:
            _say(f"cut off: {service.num_calls} calls that were not complete")
            service.cut_off()
            await _first(service.idle(), asyncio.sleep(FLUSH_S), self.signals.second.wait())
        return EXIT_OK

    async def _engine_died(self, service: Service) -> int:
        """Its requests have ended with an error; they may still tell their clients."""
        _say(f"potok: the engine stopped: {await self._engine.wait_dead()}")
        service.drain()
        await _first(service.idle(), asyncio.sleep(FLUSH_S), self.signals.second.wait())
        return EXIT_FAILED


async def _first(*waits: Coroutine[Any, Any, Any] | asyncio.Task[Any], keep: bool = False) -> None:
    """Returns when one of `waits` has ended, and ends the others; keep: not those that were tasks before."""
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        mine = [task for task, wait in zip(tasks, waits, strict=True) if not (keep and task is wait)]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)


async def _sample(service: Service) -> None:
    while True:
        service.metrics.sample()
        await asyncio.sleep(SAMPLE_S)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
