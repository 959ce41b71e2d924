"""A server of our own for the length of a measurement, and what CPU its two processes use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from potok.config import EngineConfig
from potok.errors import ServerError

#: `potok`, but for its end: when this process is gone, and with it the other end of stdin, it ends too.
COMMAND = "from potok.cli import main; from potok.engine.process import die_with; die_with(0); main()"
READY = re.compile(r"^ready on (http://\S+)")


class OwnServer:
    """`potok serve` with these settings on a free port of this machine; a context manager that ends it.

    Entering waits until it is ready. Raises ServerError, with its last words, when it ends before.
    """

    def __init__(self, config: EngineConfig) -> None:
        flags = ["--port", "0", "--drain-seconds", "0", *flags_of(config)]
        # -P: a file named numpy.py in the current folder must not become ours.
        self._command = [sys.executable, "-P", "-c", COMMAND, "serve", config.model, *flags]
        self.url = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        line = ""
        for line in self._process.stderr:
            if (ready := READY.match(line)) is not None:
                self.url = ready[1]
                return self
        self._process.communicate()
        raise ServerError(f"the server ended with {self._process.returncode} before it was ready: {line.strip()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # closes its stdin

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the API process, and of the engine process, all their threads, since their start."""
        pid = self._process.pid
        [engine] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return cpu_seconds(pid), cpu_seconds(int(engine))


def flags_of(config: EngineConfig) -> list[str]:
    """Of `potok serve`, for all settings that are not the defaults, but for the model."""
    flags: list[str] = []
    for name, field in EngineConfig.__dataclass_fields__.items():
        value, flag = getattr(config, name), name.replace("_", "-")
        if name == "model" or value == field.default:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", "off" if name == "target_itl_ms" and not value else str(value)]
    return flags


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, as Linux counts it."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
