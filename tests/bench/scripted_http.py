"""A small HTTP server for tests of the load client: it answers each request with bytes, pauses and cuts as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
CUT = object()  # close the connection here

Action = bytes | float | object
Handler = Callable[[str, dict[str, Any]], Iterable[Action]]


@dataclass
class Scripted:
    """requests: path and JSON body of each request, in order. connections: how many were opened."""

    handler: Handler
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    connections: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(h[15:]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length:")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                path = head.split(b" ")[1].decode()
                self.requests.append((path, body))
                self.headers.append(head)
                for action in self.handler(path, body):
                    if action is CUT:
                        return
                    if isinstance(action, float):
                        await asyncio.sleep(action)
                    else:
                        writer.write(action)
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away
        finally:
            writer.close()


@asynccontextmanager
async def scripted(handler: Handler):
    """Serves on a free port; yields the Scripted with its `url`."""
    state = Scripted(handler)
    server = await asyncio.start_server(state.serve, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        await asyncio.sleep(0)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


def completion(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None})


def usage(prompt_tokens: int, output_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}})


DONE = chunk(b"data: [DONE]\n\n")
END = b"0\r\n\r\n"


def models(name: str = "scripted") -> list[Action]:
    return [json_answer(200, {"object": "list", "data": [{"id": name}]})]


def json_answer(status: int, value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body


def answer(words: Iterable[str], prompt_tokens: int = 48, gap: float = 0.0) -> list[Action]:
    """A complete stream: one delta a word, `gap` seconds before each but the first, usage, [DONE]."""
    actions: list[Action] = [HEAD]
    words = list(words)
    for i, word in enumerate(words):
        if i and gap:
            actions.append(gap)
        actions.append(completion(word, "length" if i == len(words) - 1 else None))
    return [*actions, usage(prompt_tokens, len(words)), DONE, END]
