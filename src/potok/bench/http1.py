"""One HTTP/1.1 response out of bytes that may be cut anywhere; no input or output of its own.

Written by hand because the client shares the machine with the server that it measures: a general HTTP library
costs several times what a whole token may cost here.
"""

from __future__ import annotations

from enum import Enum

MAX_HEAD_BYTES = 65536
MAX_LINE_BYTES = 4096


class BadResponse(Exception):
    """The peer does not speak HTTP/1.1 as it should. One sentence."""


class _State(Enum):
    HEAD = 0
    CHUNK_SIZE = 1
    CHUNK_DATA = 2
    TRAILER = 3
    LENGTH = 4  # body of a known length
    UNTIL_CLOSE = 5
    DONE = 6


class ResponseParser:
    """status: 0 until the head is complete. keep_alive: whether the connection may serve another request."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keep_alive = True
        self._state = _State.HEAD
        self._buffer = b""
        self._left = 0  # bytes of the body, or of the chunk with its line end, that are still to come

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    def feed(self, data: bytes) -> bytes:
        """Takes bytes from the connection, returns the bytes of the body among them. Raises BadResponse."""
        if self._state is _State.CHUNK_SIZE and not self._buffer:
            whole = _one_chunk(data)
            if whole is not None:
                return whole
        self._buffer = self._buffer + data if self._buffer else data
        body: list[bytes] = []
        while self._advance(body):
            pass
        return body[0] if len(body) == 1 else b"".join(body)

    def end(self) -> bool:
        """The connection was closed by the peer. True if that completes the response."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.DONE
        return self.done

    def _advance(self, body: list[bytes]) -> bool:
        """One move; False when it needs more bytes or the response is complete."""
        state = self._state
        if state is _State.CHUNK_SIZE:
            line = self._line()
            if line is None:
                return False
            size = _chunk_size(line)
            self._left = size + 2
            self._state = _State.CHUNK_DATA if size else _State.TRAILER
            return True
        if state is _State.CHUNK_DATA:
            return self._chunk_data(body)
        if state is _State.TRAILER:
            line = self._line()
            if line == b"":
                self._finish()
            return bool(line)
        if state is _State.LENGTH:
            piece = self._buffer[: self._left]
            self._buffer = self._buffer[self._left :]
            self._left -= len(piece)
            body.append(piece)
            if self._left == 0:
                self._finish()
            return False
        if state is _State.UNTIL_CLOSE:
            body.append(self._buffer)
            self._buffer = b""
            return False
        if state is _State.HEAD:
            return self._head()
        if self._buffer:
            raise BadResponse("bytes after the end of the response")
        return False

    def _chunk_data(self, body: list[bytes]) -> bool:
        """Passes on what is here of the chunk; its CRLF is the last two bytes of `_left`."""
        have = len(self._buffer)
        if have < self._left:
            piece = self._buffer[: max(0, self._left - 2)]
            body.append(piece)
            self._buffer = self._buffer[len(piece) :]
            self._left -= len(piece)
            return False
        if self._buffer[self._left - 2 : self._left] != b"\r\n":
            raise BadResponse("a chunk is longer than its announced size")
        body.append(self._buffer[: self._left - 2])
        self._buffer = self._buffer[self._left :]
        self._state = _State.CHUNK_SIZE
        return bool(self._buffer)

    def _head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD_BYTES:
            raise BadResponse(f"the response head is longer than {MAX_HEAD_BYTES} bytes")
        if not found:
            return False
        self._buffer = rest
        lines = head.decode("latin-1").split("\r\n")
        version, _, status = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise BadResponse(f"not an HTTP/1.1 status line: {lines[0]!r:.60}")
        code = int(status[:3])
        if code < 200:
            return True  # an interim response; the real head follows
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self.status, self.headers = code, headers
        connection = headers.get("connection", "").lower()
        self.keep_alive = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        self._choose_framing()
        return not self.done

    def _choose_framing(self) -> None:
        length = self.headers.get("content-length")
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._state = _State.CHUNK_SIZE
        elif self.status in {204, 304}:
            self._finish()
        elif length is None:
            self._state = _State.UNTIL_CLOSE
            self.keep_alive = False
        elif not length.isdigit():
            raise BadResponse(f"content-length is {length!r:.40}")
        else:
            self._left = int(length)
            self._state = _State.LENGTH
            if self._left == 0:
                self._finish()

    def _finish(self) -> None:
        self._state = _State.DONE
        if self._buffer:
            raise BadResponse("bytes after the end of the response")

    def _line(self) -> bytes | None:
        """The next line without its end, or None when it is not complete."""
        line, found, rest = self._buffer.partition(b"\r\n")
        if len(line) > MAX_LINE_BYTES:
            raise BadResponse("a line between chunks is too long")
        if not found:
            return None
        self._buffer = rest
        return line


def _one_chunk(data: bytes) -> bytes | None:
    """The content if `data` is exactly one chunk, as it nearly always is when a token is sent; else None."""
    start = data.find(b"\r\n") + 2
    digits = data[: start - 2]
    if not 0 < len(digits) <= 8 or not digits.isalnum() or not data.endswith(b"\r\n"):
        return None
    try:
        size = int(digits, 16)
    except ValueError:
        return None
    return data[start:-2] if size and start + size + 2 == len(data) else None


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        if not digits or digits.startswith((b"+", b"-")) or b"_" in digits:
            raise ValueError
        return int(digits, 16)
    except ValueError:
        raise BadResponse(f"not a chunk size: {line!r:.40}") from None
