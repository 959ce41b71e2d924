"""A client for streamed generations that costs tens of microseconds of CPU per token.

One connection serves one request at a time and is reused; what a request saw is a Record, its failures included.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from potok.bench.http1 import BadResponse, ResponseParser
from potok.bench.stream import Record, StreamReader, error_text
from potok.errors import ClientError


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server is. prefix: what its routes start with, "" for most."""

    host: str
    port: int
    prefix: str
    api_key: str | None = None

    @staticmethod
    def parse(url: str, api_key: str | None = None) -> Server:
        """Reads "http://host:port[/prefix]"; a trailing "/v1" is dropped. Raises ClientError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ClientError(f"--url {url!r} is no address: {error}.", "url") from None
        if parts.scheme != "http" or not parts.hostname:
            raise ClientError(
                f"--url must look like http://host:port, not {url!r}; https is not spoken here, since encrypting would "
                "be part of what is measured.",
                "url",
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ClientError("--api-key must be printable ASCII.", "api_key")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return Server(parts.hostname, port or 80, prefix, api_key)

    def head(self, method: str, path: str, body: bytes) -> bytes:
        """The request line, the headers and the body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "User-Agent: potok-bench",
            "Accept: text/event-stream, application/json",
        ]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(frozen=True, slots=True)
class _Answer:
    """How one exchange ended. body: of a response that was no event stream. failure: set when it broke off."""

    status: int = 0
    streamed: bool = False
    body: bytes = b""
    failure: str | None = None


class _Exchange(asyncio.Protocol):
    """One connection: a request is started, and its future resolves to the answer, complete or broken off."""

    def __init__(self) -> None:
        self.open = True
        self._transport: asyncio.Transport | None = None
        self._response = ResponseParser()
        self._reader: StreamReader | None = None
        self._streamed = False
        self._body = b""
        self._answer: asyncio.Future[_Answer] | None = None

    @property
    def settled(self) -> bool:
        return self._answer is None or (self._answer.done() and not self._answer.cancelled())

    def start(self, request: bytes, reader: StreamReader | None) -> asyncio.Future[_Answer]:
        assert self._transport is not None and self.settled
        self._response = ResponseParser()
        self._reader = reader
        self._streamed = False
        self._body = b""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def abort(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._answer is None or self._answer.done():
            self.abort()  # bytes that nobody asked for
            return
        response = self._response
        head_was_known = response.status != 0
        try:
            body = response.feed(data)
        except BadResponse as error:
            self._settle(f"bad response: {error}")
            return
        if not head_was_known and response.status == 200:
            self._streamed = response.headers.get("content-type", "").startswith("text/event-stream")
        if self._streamed and self._reader is not None:
            self._reader.feed(body, now)
        else:
            self._body += body
        if response.done:
            self._settle(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._answer is None or self._answer.done():
            return
        if self._response.end():
            self._settle(None)
        elif self._response.status:
            self._settle("the server closed the connection in the middle of its answer")
        else:
            self._settle("the server closed the connection before it answered")

    def _settle(self, failure: str | None) -> None:
        assert self._answer is not None
        if failure is not None or not self._response.keep_alive:
            self.abort()
        if failure is None and self._streamed and self._reader is not None:
            self._reader.end()
        self._answer.set_result(_Answer(self._response.status, self._streamed, self._body, failure))


class Client:
    """Requests to one server over connections that are kept open between requests."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._idle: list[_Exchange] = []

    async def connect(self, count: int) -> None:
        """Opens connections until `count` are idle, so that requests do not pay for it. Failures show up later."""
        self._idle = [c for c in self._idle if c.open]
        missing = count - len(self._idle)
        opened = await asyncio.gather(*(self._open() for _ in range(missing)), return_exceptions=True)
        self._idle += [c for c in opened if isinstance(c, _Exchange)]

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def stream(self, path: str, body: dict[str, Any], record: Record) -> None:
        """Sends a streaming request and fills `record`; raises nothing that the server or the network caused."""
        request = self._server.head("POST", path, msgspec.json.encode(body))
        answer = await self._exchange(request, StreamReader(record))
        record.end = time.perf_counter()
        if record.error is not None:
            return
        if answer.failure is not None:
            record.error = answer.failure
        elif answer.status != 200:
            record.error = f"HTTP {answer.status}: {error_text(answer.body)}"
        elif not answer.streamed:
            record.error = "the answer is no event stream"

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET. Raises ClientError when there is no answer."""
        answer = await self._exchange(self._server.head("GET", path, b""), None)
        if answer.failure is not None:
            where = f"http://{self._server.host}:{self._server.port}"
            raise ClientError(f"No answer from {where}: {answer.failure}. Is the server running there?", "url")
        return answer.status, answer.body

    async def _open(self) -> _Exchange:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Exchange, self._server.host, self._server.port)
        return connection

    async def _exchange(self, request: bytes, reader: StreamReader | None) -> _Answer:
        connection: _Exchange | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._take_idle() or await self._open()
                answer = await connection.start(request, reader)
        except TimeoutError:
            doing = "cannot connect" if connection is None else "no end of the answer"
            return _Answer(failure=f"{doing} within {self._timeout_s:g} s")
        except OSError as error:
            return _Answer(failure=f"cannot connect: {error.strerror or error}")
        finally:
            if connection is not None and not connection.settled:
                connection.abort()  # timed out or cancelled: nobody will read the rest
        if connection.open:
            self._idle.append(connection)
        return answer

    def _take_idle(self) -> _Exchange | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None
