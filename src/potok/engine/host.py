"""Where an engine runs, seen from the one who uses it: start it, learn that it ended, end it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec

from potok.config import EngineConfig


class EngineHost(Protocol):
    """Runs one engine once. `wait` and `kill` are called after `start`."""

    def start(self, endpoint: str) -> None:
        """Starts an engine that will connect to `endpoint`; returns at once."""

    def wait(self) -> int:
        """Blocks until the engine has ended. Its exit code; negative: the signal that ended it."""
        ...

    def kill(self) -> None:
        """Ends the engine now, whatever it does."""


class EngineProcess:
    """An engine in a process of its own, which ends when this process ends, however that happens.

    command: what to run; the endpoint and the process to outlive no longer are appended (see `engine.process`).
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def for_model(cls, config: EngineConfig) -> EngineProcess:
        # -P: a file named numpy.py in the folder where the server is started must not become ours.
        settings = msgspec.json.encode(config).decode()
        return cls([sys.executable, "-P", "-m", "potok.engine.process", settings])

    @property
    def pid(self) -> int:
        return self._started.pid

    def start(self, endpoint: str) -> None:
        # Linux can end a child together with the thread that made it, and only the main one surely lives as long as we.
        lives_as_long = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if lives_as_long else 0
        # We never write to its stdin: the engine holds the other end, and reads end-of-file when we are gone.
        self._process = subprocess.Popen(
            [*self._command, endpoint, str(parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={
                **os.environ,
                "OPENBLAS_NUM_THREADS": "1",
            },  # the engine has threads of its own; numpy needs none there
        )

    def wait(self) -> int:
        process = self._started
        code = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        return code

    def kill(self) -> None:
        self._started.kill()

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start() comes first"
        return self._process
