"""A real server on a real port, over a real engine whose backend plays scripts: what the tests of the server share."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from potok.backends.api import StepInputs
from potok.backends.modelled.scripted import ScriptedBackend
from potok.config import ServerConfig
from potok.engine.client import EngineClient
from potok.engine.thread import threaded_client
from potok.frontend import FrontEnd, TextModel
from potok.server.keys import ApiKeys
from potok.server.listen import listen
from potok.server.service import Service
from potok.server.serving import Http, http_config

END = 2  # <|im_end|>, the default model's end of turn


class Script:
    """What the model will say: `answers[prompt]` is told id by id, then it ends. Other prompts count upwards from 1000.

    gate: steps wait while it is closed, and `stuck` says that one does. step_s: how long a step takes. failing: rows of
    these prompts fail after so many tokens. watch: called with the inputs of each step.
    """

    def __init__(self) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.failing: dict[tuple[int, ...], int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.stuck = False
        self.step_s = 0.0
        self.raising: Exception | None = None
        self.watch: Callable[[StepInputs], None] | None = None

    def reset(self) -> None:
        self.answers.clear()
        self.failing.clear()
        self.step_s = 0.0
        self.watch = None
        self.gate.set()

    def choose(self, history: Sequence[int]) -> int:
        for prompt, answer in self.answers.items():
            if tuple(history[: len(prompt)]) == prompt:
                said = len(history) - len(prompt)
                return answer[said] if said < len(answer) else END
        return 1000 + len(history) % 1000

    def fails(self, history: Sequence[int]) -> bool:
        return any(
            tuple(history[: len(prompt)]) == prompt and len(history) >= len(prompt) + after
            for prompt, after in self.failing.items()
        )

    def on_step(self, inputs: StepInputs) -> None:
        self.stuck = not self.gate.is_set()
        self.gate.wait()
        self.stuck = False
        if self.raising is not None:
            raise self.raising
        if self.watch is not None:
            self.watch(inputs)
        if self.step_s:
            time.sleep(self.step_s)


class Server:
    """The server as its clients see it, and the script behind it."""

    def __init__(self, script: Script, text: TextModel, url: str, service: Service, loop: Any) -> None:
        self.script = script
        self.text = text
        self.url = url
        self.service = service
        self.loop = loop
        self.http = httpx.Client(base_url=url, timeout=30)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)

    @property
    def address(self) -> tuple[str, int]:
        parts = httpx.URL(self.url)
        return parts.host, parts.port or 80

    def says(self, prompt: list[int], answer: list[int]) -> list[int]:
        """Scripts the answer to a prompt of ids, and returns the prompt."""
        self.script.answers[tuple(prompt)] = answer
        return prompt

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Runs something on the server's event loop."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def metric(self, name: str, **labels: str) -> float:
        wanted = name + ("{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else "")
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(wanted + " "):
                return float(line.split()[-1])
        raise AssertionError(f"no metric {wanted}")

    def eventually(self, condition: Callable[[], bool], within_s: float = 20.0) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, "not in time"
            time.sleep(0.01)

    def settled(self) -> bool:
        """Nothing is running, waiting or open."""
        return (
            self.metric("potok_requests_running") == 0
            and self.metric("potok_requests_waiting") == 0
            and self.metric("potok_kv_cache_usage_ratio") == 0
            and self.service.num_calls == 0
        )

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All messages of a stream; what is not an event of one JSON line breaks the test."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            raw = response.read()
        assert response.status_code == 200, raw
        return parse_events(raw)


def parse_events(raw: bytes) -> list[Any]:
    blocks = raw.decode().split("\n\n")
    assert blocks.pop() == ""
    messages = []
    for block in blocks:
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        messages.append(data if data == "[DONE]" else json.loads(data))
    return messages


@contextmanager
def serving(
    text: TextModel,
    script: Script,
    *,
    api_keys: Sequence[tuple[str, str]] = (),
    config: ServerConfig | None = None,
    **engine_settings: Any,
) -> Iterator[Server]:
    """Runs engine and server on threads of this process."""
    backend = ScriptedBackend(
        script.choose, vocab_size=text.tokenizer.vocab_size, on_step=script.on_step, fails=script.fails
    )
    started = threading.Event()
    box: dict[str, Any] = {}

    async def main() -> None:
        engine: EngineClient = threaded_client(backend, **engine_settings)
        await engine.start()
        service = Service(engine, config or ServerConfig())
        service.ready(FrontEnd(engine, *text))
        listener = listen("127.0.0.1", 0)
        http = Http(http_config(service, ApiKeys(api_keys)))
        box.update(http=http, service=service, loop=asyncio.get_running_loop(), address=listener.getsockname())
        serve = asyncio.create_task(http.serve(sockets=[listener]))
        while not http.started:
            await asyncio.sleep(0.001)
        started.set()
        await serve
        await engine.stop()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            box["error"] = error
            raise
        finally:
            started.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    started.wait(20)
    assert "error" not in box, box
    host, port = box["address"]
    server = Server(script, text, f"http://{host}:{port}", box["service"], box["loop"])
    try:
        yield server
    finally:
        script.gate.set()
        server.http.close()
        server.openai.close()
        box["http"].should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def raw_request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def send_raw(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A request whose socket the test holds, to close it when it likes."""
    connection = socket.create_connection(server.address, timeout=30)
    connection.sendall(raw_request(path, body))
    return connection


def read_until(connection: socket.socket, count: int, needle: bytes) -> bytes:
    """Reads until `needle` came so many times."""
    data = b""
    while data.count(needle) < count:
        part = connection.recv(65536)
        assert part, data
        data += part
    return data
