"""The engine process: python -m potok.engine.process SETTINGS ENDPOINT PARENT

SETTINGS: EngineConfig as JSON. ENDPOINT: of the socket to connect to. PARENT: a process id, or 0; see `die_with`.
Exit codes: 0 asked to end, 2 the model or a setting cannot be used, 70 a bug.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import msgspec

from potok.config import EngineConfig
from potok.engine.build import build_engine
from potok.engine.ipc import EngineEnd
from potok.engine.loop import HEARTBEAT_SECONDS
from potok.engine.serve import Engine, serve_engine
from potok.protocol import Loaded, Measure, Shutdown

PR_SET_PDEATHSIG = 1  # of Linux's prctl
STDIN = 0


def main(arguments: list[str]) -> int:
    settings, endpoint, parent = arguments
    config = msgspec.json.decode(settings, type=EngineConfig)
    return run(endpoint, int(parent), lambda quiet: build_engine(config, quiet))


def run(endpoint: str, parent: int, build: Callable[[Callable[[], None]], Engine]) -> int:
    """Serves one engine as the whole work of this process; returns its exit code.

    build: is given a function that returns once the parent has done its own start, so that a probe measures the machine
    and not the parent's imports.
    """
    die_with(parent)
    # Ctrl-C, and systemd when it stops a service, signal the whole group. The parent decides what that means: it may
    # let running requests finish first. When it ends, so do we.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def build_and_settle() -> Engine:
        engine = build(lambda: await_quiet(connection))
        gc.collect()
        gc.freeze()  # code, weights and tables live as long as we do: the collector need not look at them again
        return engine

    connection = EngineEnd(endpoint)
    try:
        return serve_engine(connection, build_and_settle)
    finally:
        connection.close()


def await_quiet(connection: EngineEnd) -> None:
    """Returns when the parent, which reads this once it has done its own start, says that the cores are free."""
    connection.send(Loaded())
    while True:
        for message in connection.receive(HEARTBEAT_SECONDS):
            if isinstance(message, Measure):
                return
            if isinstance(message, Shutdown):
                sys.exit(0)


def die_with(parent: int) -> None:
    """Ends this process as soon as the parent has ended, however that happened.

    The parent holds the other end of our stdin and never writes, so end-of-file there means that it is gone. Where
    Linux can watch too (parent is not 0), the kernel kills us even while some native code keeps Python from noticing.
    """
    threading.Thread(target=_await_end_of_stdin, name="potok-parent-watch", daemon=True).start()
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(0)


def _await_end_of_stdin() -> NoReturn:
    while os.read(STDIN, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
