"""The body of a request: read with limits, decoded strictly."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from potok.errors import ClientError
from potok.server.limits import BODY_PATIENCE_S, MAX_BODY_BYTES


class Disconnected(Exception):
    """The client left before it had sent its request."""


async def read_json(scope: Scope, receive: Receive) -> Any:
    """The body as Python values. Raises ClientError, or Disconnected.

    msgspec is strict: no NaN or Infinity, no lone surrogates, no bad UTF-8, no number beyond its type, no deep nesting.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        # Also what keeps web pages of others from using a server on this machine: browsers ask before they send JSON.
        raise ClientError("send the header Content-Type: application/json.", "Content-Type", "content_type")
    body = await _read(headers.get(b"content-length", b""), receive)
    # While a hostile body becomes millions of lists, the collector would look through them again and again, in vain.
    gc.disable()
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ClientError(f"the body is not valid JSON: {error}.", None, "invalid_json") from None
    except RecursionError:
        raise ClientError("the body is not valid JSON: it is nested too deeply.", None, "invalid_json") from None
    finally:
        gc.enable()


async def _read(content_length: bytes, receive: Receive) -> bytes:
    too_large = ClientError(f"the body may have {MAX_BODY_BYTES} bytes; send less.", None, "body_too_large")
    if content_length.isdigit() and int(content_length[:20]) > MAX_BODY_BYTES:
        raise too_large
    parts = []
    size = 0
    while True:
        try:
            message = await asyncio.wait_for(receive(), BODY_PATIENCE_S)
        except TimeoutError:
            raise ClientError(
                f"no part of the body came for {BODY_PATIENCE_S:g} seconds; send it again.", None, "timeout"
            ) from None
        if message["type"] == "http.disconnect":
            raise Disconnected
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_large
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
