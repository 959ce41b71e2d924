"""X-Request-Id: what a client calls its request is echoed, and used for nothing."""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ECHOED = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestId:
    """ASGI middleware: every response carries the request's X-Request-Id, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        name = given if _ECHOED.fullmatch(given) else secrets.token_hex(16).encode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", name)]}
            await send(message)

        await self._app(scope, receive, send_named)
