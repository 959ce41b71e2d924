"""Short answers as ASGI messages."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from potok.errors import ClientError, DeadlineExceeded, Unavailable
from potok.server.dialects.openai_errors import body_of, status_of

#: How long a client may go on sending a body that was refused, before the connection is closed under it, in seconds.
LINGER_S = 1.0


class Json(Response):
    """A JSON response. Made here and not by starlette's JSONResponse, for msgspec's speed and strictness."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: Exception) -> Json:
    headers = {}
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, DeadlineExceeded):
        headers["x-should-retry"] = "false"  # OpenAI's clients would try a 504 again, after its deadline
    if status_of(error) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Json(body_of(error), status_of(error), headers)


async def send_error(scope: Scope, receive: Receive, send: Send, error: Exception) -> None:
    """Sends an error that may come before the client has sent its whole body.

    A connection that is closed while its client still sends is reset, and then the client may lose the answer. So after
    refusing a body for its size we go on taking it for a moment.
    """
    response = error_response(error)
    if not (isinstance(error, ClientError) and error.code == "body_too_large"):
        await response(scope, receive, send)
        return
    response.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
