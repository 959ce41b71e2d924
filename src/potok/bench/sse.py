"""Server-sent events out of bytes that may be cut anywhere."""

from __future__ import annotations


class SseParser:
    """Collects the `data` of each event; comments and other fields are skipped. Lines end with LF or CRLF."""

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._data: bytes | None = None  # of the unfinished event

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that `data` completes."""
        if not self._rest and self._data is None and _is_one_event(data):
            return [data[6:-2].removesuffix(b"\r")]
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for raw in lines:
            line = raw[:-1] if raw.endswith(b"\r") else raw
            if not line:
                if self._data is not None:
                    events.append(self._data)
                    self._data = None
            elif line.startswith(b"data:"):
                value = line[6:] if line.startswith(b"data: ") else line[5:]
                self._data = value if self._data is None else self._data + b"\n" + value
        return events


def _is_one_event(data: bytes) -> bool:
    """Whether `data` is exactly one event of one line, as it nearly always is when a token is sent."""
    return data.startswith(b"data: ") and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2
