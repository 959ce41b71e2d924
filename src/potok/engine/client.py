"""The engine as the API process sees it. Imports little, so that the engine can be started before anything else is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable

import msgspec

from potok.config import EngineConfig
from potok.engine.host import EngineHost, EngineProcess
from potok.engine.ipc import ClientEnd
from potok.errors import EngineDead, LoadError
from potok.finish import Finish
from potok.params import USUAL_TERMS, Terms
from potok.protocol import (
    CacheContents,
    CachedPrefix,
    Cancel,
    Chunk,
    DescribeCache,
    EngineInfo,
    Failed,
    Loaded,
    Measure,
    Ready,
    Sampling,
    Shutdown,
    Stats,
    Step,
    Submit,
    ToEngine,
)

#: Called on the event loop with each chunk of one request; the last one has `finish` set.
Sink = Callable[[Chunk], None]

#: An engine that has ended may have left last messages on the way to us, such as why. They get this long, in seconds.
LAST_WORDS_SECONDS = 0.05


class EngineClient:
    """Sends requests to one engine and hands each chunk of its answers to the request's sink.

    Everything but the constructor and `spawn` belongs to one event loop: call it there, from one thread.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._wire = ClientEnd()
        self._ids = itertools.count(1)
        self._sinks: dict[int, Sink] = {}
        self._questions: dict[int, asyncio.Future[list[CachedPrefix]]] = {}
        self._stats = Stats()
        self._submits = 0
        self._info: EngineInfo | None = None
        self._heard = time.monotonic()
        self._spawned = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()  # ready, or dead
        self._ended = asyncio.Event()
        self._death: str | None = None
        self._exit_code: int | None = None

    @classmethod
    def for_model(cls, config: EngineConfig) -> EngineClient:
        """An engine in a process of its own that serves `config.model`."""
        return cls(EngineProcess.for_model(config))

    # -- life ------------------------------------------------------------------------------------------------------

    def spawn(self) -> None:
        """Starts the engine and returns at once, so that the caller may do other work while it loads."""
        self._spawned = True
        self._host.start(self._wire.endpoint)

    async def start(self) -> EngineInfo:
        """Returns when the engine is ready. Raises LoadError, with its sentence, when it cannot start.

        The engine measures the machine from here on, so let other heavy work end before.
        """
        if not self._spawned:
            self.spawn()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._wire.fd, self._read)
        threading.Thread(target=self._watch, args=(self._loop,), name="potok-engine-watch", daemon=True).start()
        self._read()
        await self._changed.wait()
        if self._info is None:
            await self.stop()
            raise LoadError(self._death or "the engine ended before it was ready")
        return self._info

    async def stop(self, patience: float = 5.0) -> None:
        """Ends the engine, by force after `patience` seconds. Requests that still run end with an error.

        Legal at any time, also while `start` waits, and more than once.
        """
        if self._loop is None:
            await asyncio.to_thread(self._end_unwatched)
        else:
            if self._info is not None and not self.dead:
                self._send(Shutdown())
            if self._info is not None or self.dead:  # it listens, or is about to end; else it still loads
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), patience)
            if not self._ended.is_set():
                self._host.kill()
                await self._ended.wait()
        if not self._closed:
            self._closed = True
            if self._loop is not None:
                self._loop.remove_reader(self._wire.fd)
            self._wire.close()

    def _end_unwatched(self) -> None:
        """For an engine that was spawned and never waited for."""
        if self._spawned:
            self._host.kill()
            self._host.wait()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Thread: waits for the engine's end, which no message tells when it was killed."""
        code = self._host.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
            loop.call_soon_threadsafe(loop.call_later, LAST_WORDS_SECONDS, self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        self._exit_code = code
        self._read()
        self._die(_describe_exit(code))
        self._ended.set()

    def _die(self, why: str) -> None:
        """Ends every live request. The first reason stands: it is the engine's own sentence, if it had time for one."""
        if self._death is None:
            self._death = why
        sinks, self._sinks = self._sinks, {}
        for id, sink in sinks.items():
            self._deliver(sink, Chunk(id, [], Finish.ERROR, error=f"the engine stopped: {self._death}"))
        for question in self._questions.values():
            if not question.done():
                question.set_exception(EngineDead(f"the engine stopped: {self._death}"))
        self._changed.set()

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() comes first"
        return self._info

    @property
    def stats(self) -> Stats:
        """As of the engine's last step or heartbeat."""
        return self._stats

    @property
    def unseen(self) -> int:
        """Requests sent that `stats` do not count yet."""
        return self._submits - self._stats.submits

    @property
    def dead(self) -> bool:
        return self._death is not None

    @property
    def exit_code(self) -> int | None:
        """Of the engine, once `wait_dead` has returned; negative: the signal that ended it."""
        return self._exit_code

    async def wait_dead(self) -> str:
        """Returns when the engine has ended, on request or not: why, as one sentence."""
        await self._ended.wait()
        return self._death or ""

    def heartbeat_age(self) -> float:
        """Seconds since the engine was last heard of. It speaks after each step, and twice a second when idle."""
        return time.monotonic() - self._heard

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: list[int], max_tokens: int, sampling: Sampling, sink: Sink, terms: Terms = USUAL_TERMS
    ) -> int:
        """Starts a request; returns the id for `cancel`. Raises EngineDead. `sink` is never called from in here."""
        if self._death is not None:
            raise EngineDead(f"the engine stopped: {self._death}")
        id = next(self._ids)
        self._sinks[id] = sink
        self._submits += 1
        self._send(Submit.on(terms, id, prompt, max_tokens, sampling))
        return id

    def cancel(self, id: int) -> None:
        """Forgets the request: its sink is not called again. Unknown and ended ids are ignored."""
        if self._sinks.pop(id, None) is not None:
            self._send(Cancel(id))

    async def describe_cache(self, top: int, namespace: str | None = None) -> list[CachedPrefix]:
        """The `top` prefixes of the prefix cache; namespace: of one API key, None: of all. Raises EngineDead."""
        if self._death is not None:
            raise EngineDead(f"the engine stopped: {self._death}")
        id = next(self._ids)
        question: asyncio.Future[list[CachedPrefix]] = asyncio.get_running_loop().create_future()
        self._questions[id] = question
        try:
            self._send(DescribeCache(id, top, namespace))
            return await question
        finally:
            del self._questions[id]

    def _send(self, message: ToEngine) -> None:
        if self._wire.send(message):
            assert self._loop is not None
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._closed:  # a reading that was due when the client stopped
            return
        try:
            messages = self._wire.receive()
        except msgspec.DecodeError as error:
            # Nobody may wait for an answer that can never be read: with these messages, the engine is as good as dead.
            self._die(f"its messages cannot be read ({error}); was potok changed while it started?")
            self._host.kill()
            return
        for message in messages:
            self._heard = time.monotonic()
            if type(message) is Step:
                self._stats = message.stats or self._stats
                self._dispatch(message.chunks)
            elif type(message) is Loaded:
                self._send(Measure())
            elif type(message) is Ready:
                self._info = message.info
                self._wire.remove_name()
                self._changed.set()
            elif type(message) is Failed:
                self._die(message.message)
            elif type(message) is CacheContents:
                question = self._questions.get(message.id)
                if question is not None and not question.done():
                    question.set_result(message.prefixes)

    def _dispatch(self, chunks: list[Chunk]) -> None:
        sinks = self._sinks
        for chunk in chunks:
            id = chunk.id
            sink = sinks.get(id)
            if sink is None:  # cancelled while the step ran
                continue
            if chunk.finish is not None:
                del sinks[id]
            self._deliver(sink, chunk)

    def _deliver(self, sink: Sink, chunk: Chunk) -> None:
        """A sink that raises loses its own request and nobody else's."""
        try:
            sink(chunk)
        except Exception as error:
            assert self._loop is not None
            self.cancel(chunk.id)
            self._loop.call_exception_handler({"message": "a request's sink failed", "exception": error})


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; perhaps the machine ran out of memory" if code == -signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"
