"""An engine on a thread of this process, behind the same wire as one in its own: for tests of what stands above."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from potok.backends.api import AllocatingBackend
from potok.config import EngineConfig
from potok.engine.assemble import assemble
from potok.engine.client import EngineClient
from potok.engine.ipc import EngineEnd
from potok.engine.probe import Speed
from potok.engine.serve import Engine, serve_engine
from potok.protocol import FromEngine, Shutdown, ToEngine

SPEED = Speed(1e-3)  # what the settings are derived from, instead of measuring


def threaded_client(
    backend: AllocatingBackend,
    *,
    num_blocks: int = 256,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 0,
    **settings: Any,
) -> EngineClient:
    """A client, still to be started, of an engine over `backend` on a thread. max_model_len 0: as much as fits.

    settings: others of EngineConfig.
    """
    info = backend.info
    config = EngineConfig(
        model="",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=num_blocks * info.block_size * info.kv_bytes_per_token,
        block_size=info.block_size,
        **settings,
    )

    def build() -> Engine:
        return assemble(config, backend, memory=2**40, notes=[], probe=lambda _: SPEED)

    return EngineClient(EngineThread(build))


class EngineThread:
    """An EngineHost. `kill` makes it look like a process that was killed: it says no more, whatever its thread does."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self._killed = threading.Event()
        self._exit_codes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def start(self, endpoint: str) -> None:
        threading.Thread(target=self._serve, args=(endpoint,), name="potok-engine", daemon=True).start()

    def wait(self) -> int:
        return self._exit_codes.get()

    def kill(self) -> None:
        self._killed.set()
        self._exit_codes.put(-signal.SIGKILL)

    def _serve(self, endpoint: str) -> None:
        connection = EngineEnd(endpoint)
        code = serve_engine(_Killable(connection, self._killed), self._build)
        connection.close()
        self._exit_codes.put(code)


class _Killable:
    """A connection that is cut once the engine counts as killed, so that its thread ends too."""

    def __init__(self, connection: EngineEnd, killed: threading.Event) -> None:
        self._connection = connection
        self._killed = killed

    def receive(self, timeout: float) -> Sequence[ToEngine]:
        messages = self._connection.receive(timeout)
        return [Shutdown()] if self._killed.is_set() else messages

    def send(self, message: FromEngine) -> None:
        if not self._killed.is_set():
            self._connection.send(message)
