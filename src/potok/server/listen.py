"""The listening socket, made before anything that costs time. Standard library only."""

from __future__ import annotations

import errno
import socket

from potok.errors import LoadError

#: Connections that may wait to be accepted.
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that already takes connections; they wait until somebody accepts them. Raises LoadError."""
    if not 0 <= port <= 65535:
        raise LoadError(f"--port must be from 0 to 65535, not {port}.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise LoadError(f"--host {host!r} is not a known name or address ({error}).") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last owner has just ended may be taken; one that somebody listens on may not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise LoadError(_explain(error, host, port)) from None
    return listener


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; stop the program that uses it, or choose another --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all of them."
    if error.errno == errno.EACCES:
        return f"port {port} may not be used by this user; choose a --port above 1023."
    return f"cannot listen on {host} port {port}: {error.strerror}."


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
