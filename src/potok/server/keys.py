"""Who may ask: one check before all routes. What is not listed here as open needs a key."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from potok.errors import ClientError
from potok.server.replies import send_error

#: Paths that need no key: what a load balancer asks, and the answers say nothing but yes or no.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})

_NAMESPACE = "potok.namespace"


class ApiKeys:
    """Keys by the names of their owners; none: everybody may ask."""

    def __init__(self, named: Iterable[tuple[str, str]] = ()) -> None:
        """named: (name, key); a name may have several keys, so that they can be changed one after the other."""
        self._keys = [(name, key.encode()) for name, key in named]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def owner_of(self, authorization: bytes) -> str | None:
        """The name for an Authorization header; None when no key fits. Its time tells nothing of the keys."""
        scheme, _, given = authorization.partition(b" ")
        given = given.strip()
        owner = None
        for name, key in self._keys:
            if hmac.compare_digest(given, key):
                owner = name
        return owner if scheme.lower() == b"bearer" else None


class KeyCheck:
    """ASGI middleware: lets through what has a key, and what is open. The key's name becomes the call's namespace."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"] not in OPEN_PATHS:
            headers = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
            owner = self._keys.owner_of(headers[0]) if len(headers) == 1 else None
            if owner is None:
                await send_error(scope, receive, send, _refusal(given=bool(headers)))
                return
            scope[_NAMESPACE] = owner
        await self._app(scope, receive, send)


def _refusal(given: bool) -> ClientError:
    problem = "the API key is not one of this server's" if given else "an API key is needed"
    return ClientError(f"{problem}; send the header Authorization: Bearer KEY.", None, "invalid_api_key")


def namespace_of(scope: Scope) -> str:
    """The name of the caller's key; empty where no keys are asked for."""
    name: str = scope.get(_NAMESPACE, "")
    return name
