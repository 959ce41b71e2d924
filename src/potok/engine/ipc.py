"""The wire between the API process and the engine process: a PAIR socket at each end of a Unix socket, msgpack frames.

The only module that knows zmq. Both ends queue without limit, on purpose: zmq's alternative is to block, and an engine
that waits for a slow API process makes every client wait. What can queue up is bounded by the requests alive: each
sends one Submit and at most one Cancel, and is answered with at most max_tokens tokens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import zmq

from potok.errors import LoadError
from potok.protocol import FromEngine, ToEngine

#: Longest path of a Unix socket that every system takes, in bytes.
MAX_SOCKET_PATH = 103

#: How long an end that closes goes on delivering what it has sent, in milliseconds.
LINGER_MS = 1000


class EngineEnd:
    """The engine's end. Use it from one thread."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _pair(self._context)
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def receive(self, timeout: float) -> list[ToEngine]:
        """All messages that have arrived; when there are none, waits up to `timeout` seconds for the first."""
        if timeout > 0:
            self._socket.poll(max(1, round(timeout * 1000)))
        return [self._decoder.decode(frame) for frame in _drain(self._socket)]

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        """Returns when all that was sent is delivered, or after a second."""
        self._socket.close(linger=LINGER_MS)
        self._context.term()


class ClientEnd:
    """The API process's end, for an event loop: nothing here blocks. Use it from one thread.

    endpoint: where the engine must connect, in a folder that only this user may enter.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="potok-"))  # mode 0700
        path = self._folder / "engine"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            self._folder.rmdir()
            raise LoadError(
                f"the folder for temporary files, {self._folder.parent}, has a name that is too long for a Unix "
                "socket; set TMPDIR to a shorter one."
            )
        self.endpoint = f"ipc://{path}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _pair(self._context)
        self._socket.bind(self.endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    @property
    def fd(self) -> int:
        """Becomes readable when messages may have arrived. It tells a change, not a state: `receive` must follow."""
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, message: ToEngine) -> bool:
        """True when messages have arrived too: sending may have used up the change of `fd` that would have told so."""
        # With nobody at the other end zmq refuses the frame. The engine is gone then, and its host says so.
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> list[FromEngine]:
        """All messages that have arrived, perhaps none."""
        return [self._decoder.decode(frame) for frame in _drain(self._socket)]

    def remove_name(self) -> None:
        """Once the engine is connected the socket needs no name; without one, nothing stays behind if we are killed."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self.remove_name()


def _pair(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    return socket


def _drain(socket: zmq.Socket[bytes]) -> list[bytes]:
    frames = []
    while True:
        try:
            frames.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return frames
