"""When a request came, and by when its sender wants an answer, as its head says."""

from __future__ import annotations

import re
import time
from typing import Any

from starlette.types import Scope

from potok.errors import ClientError
from potok.params import TERM_BOUNDS, check_number, shown

#: Header (as ASGI spells it) -> the field of a body that means the same.
TIMEOUTS = {b"x-request-timeout-ms": "timeout_ms", b"x-ttft-timeout-ms": "ttft_timeout_ms"}

_ARRIVED = "potok.arrived_us"
_INTEGER = re.compile(rb"[0-9]{1,18}")


def note_arrival(scope: Any) -> None:
    """Called with the first byte of a request: its body may come much later, and so may the one who reads it."""
    scope[_ARRIVED] = _now_us()


def arrived_us(scope: Scope) -> int:
    """Of time.monotonic(), in microseconds. Now, under an HTTP server that did not note it."""
    arrived: int = scope.get(_ARRIVED) or _now_us()
    return arrived


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def timeouts_of(scope: Scope) -> dict[str, int]:
    """Deadlines of the head, by the names that they have in a body. Raises ClientError naming the header."""
    found: dict[str, int] = {}
    for header, value in scope["headers"]:
        name = TIMEOUTS.get(header)
        if name is None:
            continue
        spelt = header.decode().title().replace("Ttft", "TTFT")
        if name in found:
            raise ClientError(f"the header {spelt} is there twice; send it once.", spelt, "conflict")
        if not _INTEGER.fullmatch(value):
            raise ClientError(
                f"{spelt} must be an integer, not {shown(value.decode('latin-1'))}.", spelt, "invalid_type"
            )
        found[name] = int(value)
        check_number(spelt, found[name], {spelt: TERM_BOUNDS[name]})
    return found
