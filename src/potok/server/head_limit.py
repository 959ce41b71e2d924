"""uvicorn's HTTP protocol with two things more.

The head of a request is bounded: the parser beneath would gather headers without end. The arrival of its first byte is
noted: deadlines count from there.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from potok.server.arrival import note_arrival
from potok.server.limits import MAX_HEAD_BYTES


class BoundedHeadProtocol(HttpToolsProtocol):
    """Answers 400 and closes when a request line and its headers are longer than MAX_HEAD_BYTES and one read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's headers are longer than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        note_arrival(self.scope)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        # The read that ends a message may hold the beginning of the next one's head; it is not counted.
        self._head_bytes = 0
        super().on_message_complete()
