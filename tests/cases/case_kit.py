"""`potok serve` as users start it, with the default model, for cases that need the real thing."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

PROBE = {"prompt": [504, 2365, 6354, 16438], "max_tokens": 16, "temperature": 0, "return_token_ids": True}


class Served:
    """A server that four requests at a time share. pool: flags that size the KV memory. said: lines of its start."""

    def __init__(self, *pool: str, keys: Sequence[str] = ()) -> None:
        """keys: NAME=KEY each; the last one is sent with every request."""
        program = "from potok.cli import main; main()"
        flags = ["--port", "0", "--max-num-seqs", "4", "--served-model-name", "smol"]
        command = [sys.executable, "-c", program, "serve", *flags, *(pool or ("--kv-cache-memory", "600MB"))]
        command += [word for key in keys for word in ("--api-key", key)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        lines = self.said = []
        for line in self.process.stderr:
            lines.append(line)
            if ready := re.match(r"ready on (http://\S+) ", line):
                break
        else:
            raise AssertionError("".join(lines))
        self.url = ready[1]
        headers = {"Authorization": f"Bearer {keys[-1].rpartition('=')[2]}"} if keys else {}
        self.http = httpx.Client(base_url=self.url, timeout=60, headers=headers)
        self.probe = self.ask(PROBE)

    def answer(self, body: dict[str, Any]) -> Any:
        return self.http.post("/v1/completions", json=body).raise_for_status().json()

    def ask(self, body: dict[str, Any]) -> Any:
        """The first choice of a completion."""
        return self.answer(body)["choices"][0]

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def empty(self) -> bool:
        names = ("potok_requests_running", "potok_requests_waiting", "potok_kv_cache_usage_ratio")
        return not any(map(self.metric, names))

    def eventually(self, condition: Callable[[], bool], within_s: float) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, "not in time"
            time.sleep(0.02)

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        assert (self.process.wait(60), said) == (0, "")
        self.process.stderr.close()
