"""The server as a process: how it starts, what signals do to it, how it ends. Its engine is scripted, in a process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from server_kit import raw_request, read_until

from potok.config import EngineConfig, ServerConfig
from potok.server.run import run

HERE = Path(__file__).parent
COMPLETIONS = "/v1/completions"


class Started:
    """A server process; `log` gathers what it says."""

    def __init__(self, kind: str, drain_seconds: float) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, str(HERE / "scripted_process.py"), str(self.port), str(drain_seconds), kind]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.log = ""
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def says(self, pattern: str, within_s: float = 60.0) -> re.Match[str]:
        end = time.monotonic() + within_s
        while not (match := re.search(pattern, self.log)):
            assert time.monotonic() < end and self.process.poll() is None, self.log
            time.sleep(0.005)
        return match

    def connectable(self) -> None:
        """Returns as soon as the port takes connections."""
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionRefusedError:
                assert self.process.poll() is None, self.log
                time.sleep(0.005)

    def stream(self, prompt: list[int], max_tokens: int) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(raw_request(COMPLETIONS, {"prompt": prompt, "max_tokens": max_tokens, "stream": True}))
        return connection

    def signal(self, number: int = signal.SIGTERM, *, group: bool = False) -> None:
        """group: the engine gets it as well, as from a terminal or from systemd."""
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def ends(self, within_s: float = 30.0) -> int:
        code = self.process.wait(within_s)
        self._reader.join()
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.http.close()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def started(kind: str = "steady", drain_seconds: float = 20.0) -> Iterator[Started]:
    server = Started(kind, drain_seconds)
    try:
        yield server
    finally:
        server.close()


def gone(pid: int) -> bool:
    """A zombie that nobody has waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_before_and_after_the_model_is_loaded(tmp_path: Path) -> None:
    """First live, not ready, and calls are told to come back; then settings and address are printed."""
    with started(f"steady:{tmp_path / 'loaded'}") as server:
        server.connectable()
        assert server.http.get("/health/live").status_code == 200
        assert server.http.get("/health/ready").status_code == 503
        assert server.http.get("/health").status_code == 503
        response = server.http.post(COMPLETIONS, json={"prompt": [5]})
        assert response.status_code == 503 and "Retry-After" in response.headers
        assert server.http.get("/v1/models").status_code == 503
        assert server.http.get("/metrics").status_code == 200
        (tmp_path / "loaded").touch()
        server.says(r"ready on http://127\.0\.0\.1:\d+ in \d+\.\d s")
        assert "engine pid" in server.log and "serves smol" in server.log
        assert server.http.get("/health/ready").status_code == 200
        assert server.http.post(COMPLETIONS, json={"prompt": [5]}).status_code == 200
        server.signal(signal.SIGINT)
        assert server.ends() == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("group", [False, True])
def test_a_signal_while_loading(group: bool, tmp_path: Path) -> None:
    with started(f"steady:{tmp_path / 'never'}") as server:
        server.connectable()
        assert server.http.get("/health/live").status_code == 200
        server.signal(group=group)
        assert server.ends() == 0


@pytest.mark.parametrize("group", [False, True])
def test_sigterm_drains(group: bool) -> None:
    """Streams that run and calls that wait are answered in full; nothing new is taken meanwhile."""
    with started() as server:
        server.says("ready on")
        streams = [server.stream([5, i], 60) for i in range(4)]  # two run, two wait
        read_until(streams[0], 3, b"data: ")
        server.signal(group=group)
        server.says("stopping: 4 calls")
        assert server.http.get("/health/ready").status_code == 503
        assert server.http.get("/health/live").status_code == 200
        late = server.http.post(COMPLETIONS, json={"prompt": [5]})
        assert late.status_code == 503 and int(late.headers["Retry-After"]) > 0
        assert late.json()["error"]["code"] == "shutting_down"
        for stream in streams:
            rest = read_until(stream, 1, b"[DONE]")
            assert b'"finish_reason":"length"' in rest
            stream.close()
        assert server.ends() == 0


def test_more_calls_than_may_wait() -> None:
    """Two run and four wait; the others hear so at once, from a process that computes nothing."""
    with started() as server, contextlib.ExitStack() as open_ones:
        server.says("ready on")
        streams = [open_ones.enter_context(server.stream([5, i], 60)) for i in range(20)]
        answers = {stream: read_until(stream, 1, b"\r\n\r\n") for stream in streams}
        refused = {stream: head for stream, head in answers.items() if head.startswith(b"HTTP/1.1 429 ")}
        assert len(refused) == 14
        for stream, head in refused.items():
            assert b"\r\nretry-after: " in head
            assert b'"queue_full"' in (head if b"}}" in head else read_until(stream, 1, b"}}"))
        assert server.http.get("/health").status_code == 200
        for stream, head in answers.items():
            if stream not in refused:
                assert head.startswith(b"HTTP/1.1 200 ")
                assert b'"finish_reason":"length"' in head + (
                    b"" if b"[DONE]" in head else read_until(stream, 1, b"[DONE]")
                )
        assert server.http.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 2}).status_code == 200
        assert "potok_requests_waiting 0.0" in server.http.get("/metrics").text


def test_calls_that_take_too_long_are_cut_off_with_an_error() -> None:
    with started(drain_seconds=0.3) as server:
        server.says("ready on")
        stream = server.stream([5], 2000)
        read_until(stream, 3, b"data: ")
        queued = [server.stream([6, i], 2000) for i in range(2)]
        server.signal()
        rest = read_until(stream, 1, b"0\r\n\r\n")
        assert b'"code":"shutting_down"' in rest and b"[DONE]" not in rest
        assert server.ends() == 0
        for connection in (stream, *queued):
            connection.close()


def test_a_second_signal_ends_at_once() -> None:
    with started() as server:
        pid = int(server.says(r"engine pid (\d+)")[1])
        server.says("ready on")
        stream = server.stream([5], 2000)
        read_until(stream, 3, b"data: ")
        server.signal()
        server.says("stopping")
        server.signal()
        assert server.ends() == 1
        stream.close()
        end = time.monotonic() + 30
        while not gone(pid):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_sigkill_leaves_no_engine_and_frees_the_port() -> None:
    with started() as server:
        pid = int(server.says(r"engine pid (\d+)")[1])
        server.says("ready on")
        server.signal(signal.SIGKILL)
        server.ends()
        end = time.monotonic() + 30
        while not gone(pid):
            assert time.monotonic() < end
            time.sleep(0.01)
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", server.port))


def test_the_death_of_the_engine_ends_streams_and_server() -> None:
    with started("mortal") as server:
        server.says("ready on")
        stream = server.stream([5], 100)
        rest = read_until(stream, 1, b"0\r\n\r\n")
        assert b'"error"' in rest and b"[DONE]" not in rest
        stream.close()
        assert server.ends() == 1
        assert "the engine stopped" in server.log and "SIGKILL" in server.log
        assert "Traceback" not in server.log


def test_a_model_that_cannot_be_loaded() -> None:
    with started("broken") as server:
        assert server.ends() == 2
        assert server.log.strip() == "potok: the model m.gguf is made of cheese"


def test_a_busy_port(capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence, code 2, and no engine was started: the settings name no model at all."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert run(EngineConfig(model="/nowhere"), ServerConfig(port=port)) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f"port {port}" in said and "--port" in said


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "x" * 300, "\ud800"])
def test_a_bad_host(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(EngineConfig(model="/nowhere"), ServerConfig(host=host, port=0)) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "--host" in said


def test_a_bad_port(capfd: pytest.CaptureFixture[str]) -> None:
    for port in (-1, 65536):
        assert run(EngineConfig(model="/nowhere"), ServerConfig(port=port)) == 2
        assert "--port" in capfd.readouterr().err
