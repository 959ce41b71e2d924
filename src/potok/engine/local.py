"""An engine on a thread of the calling process, for programs that have no event loop."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable

from potok.engine.serve import Engine, serve_engine
from potok.errors import EngineDead
from potok.finish import Finish
from potok.params import USUAL_TERMS, Terms
from potok.protocol import (
    Cancel,
    Chunk,
    EngineInfo,
    Failed,
    FromEngine,
    Sampling,
    Shutdown,
    Stats,
    Step,
    Submit,
    ToEngine,
)

#: Called on the engine's thread with each chunk of one request; the last one has `finish` set. It must be quick.
Sink = Callable[[Chunk], None]


class LocalEngine:
    """Same calls as EngineClient, from any thread. Ends with `close`, when collected, or at the program's exit."""

    def __init__(self, engine: Engine) -> None:
        self.info: EngineInfo = engine.info
        self._mailbox = _Mailbox()
        self._thread = threading.Thread(target=_run, args=(engine, self._mailbox), name="potok-engine", daemon=True)
        self._thread.start()
        # A daemon thread that is cut off inside native code at exit can bring the process down, so it is ended before.
        self._close = weakref.finalize(self, _end, self._mailbox, self._thread)

    @property
    def stats(self) -> Stats:
        """As of the engine's last step."""
        return self._mailbox.stats

    @property
    def dead(self) -> bool:
        return self._mailbox.death is not None

    def submit(
        self, prompt: list[int], max_tokens: int, sampling: Sampling, sink: Sink, terms: Terms = USUAL_TERMS
    ) -> int:
        """Starts a request; returns the id for `cancel`. Raises EngineDead."""
        return self._mailbox.submit(prompt, max_tokens, sampling, sink, terms)

    def cancel(self, id: int) -> None:
        """Forgets the request: but for a chunk on its way right now, its sink is not called again."""
        self._mailbox.cancel(id)

    def close(self) -> None:
        """Ends the engine after its current step; requests that still run end with an error. May be called again."""
        self._close()


class _Mailbox:
    """Both ends of the connection: requests go in on any thread, chunks come out on the engine's."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.death: str | None = None
        self._ids = itertools.count(1)
        self._sinks: dict[int, Sink] = {}
        self._lock = threading.Lock()  # of _sinks and death
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()

    def submit(self, prompt: list[int], max_tokens: int, sampling: Sampling, sink: Sink, terms: Terms) -> int:
        with self._lock:
            if self.death is not None:
                raise EngineDead(f"the engine stopped: {self.death}")
            id = next(self._ids)
            self._sinks[id] = sink
        self._inbox.put(Submit.on(terms, id, prompt, max_tokens, sampling))
        return id

    def cancel(self, id: int) -> None:
        with self._lock:
            known = self._sinks.pop(id, None) is not None
        if known:
            self._inbox.put(Cancel(id))

    def shut_down(self) -> None:
        self._inbox.put(Shutdown())

    def receive(self, timeout: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        try:
            messages.append(self._inbox.get(block=timeout > 0, timeout=timeout))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            self.stats = message.stats or self.stats
            for chunk in message.chunks:
                self._deliver(chunk)
        elif isinstance(message, Failed):
            self.die(message.message)

    def die(self, why: str) -> None:
        """Ends every live request; the first reason stands."""
        with self._lock:
            if self.death is None:
                self.death = why
            live = list(self._sinks)
        for id in live:
            self._deliver(Chunk(id, [], Finish.ERROR, error=f"the engine stopped: {self.death}"))

    def _deliver(self, chunk: Chunk) -> None:
        with self._lock:
            sink = self._sinks.get(chunk.id) if chunk.finish is None else self._sinks.pop(chunk.id, None)
        if sink is None:  # cancelled while the step ran
            return
        try:
            sink(chunk)
        except Exception:  # its own request is lost, and nobody else's
            logging.getLogger(__name__).exception("the sink of request %d failed", chunk.id)
            self.cancel(chunk.id)


def _run(engine: Engine, mailbox: _Mailbox) -> None:
    serve_engine(mailbox, lambda: engine)
    mailbox.die("it was closed")


def _end(mailbox: _Mailbox, thread: threading.Thread) -> None:
    mailbox.shut_down()
    if thread is not threading.current_thread():
        thread.join()
