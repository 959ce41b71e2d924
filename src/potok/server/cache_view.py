"""GET /admin/cache: what the prefix cache holds and what it has saved. For the owner of the server, not for clients.

Who begins a prompt with what is the callers' business. So ids are told and no text, unless asked for; a prefix that was
salted tells neither; an API key sees what was cached under its own name, and the key named "admin" sees all. A server
without keys answers only callers on the same machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any

from starlette.requests import Request

from potok.errors import ClientError, Unavailable
from potok.protocol import CachedPrefix, Stats
from potok.server.keys import namespace_of
from potok.server.service import Service
from potok.text.tokenizer import Tokenizer

ADMIN = "admin"

DEFAULT_TOP = 20
MAX_TOP = 1000

#: How long to wait for the engine, which answers between two steps, in seconds.
PATIENCE_S = 10.0


class CacheView:
    def __init__(self, service: Service, *, guarded: bool, patience_s: float = PATIENCE_S) -> None:
        """guarded: callers have shown a key."""
        self._service = service
        self._guarded = guarded
        self._patience_s = patience_s
        self._one_at_a_time = asyncio.Lock()  # the engine stops for it: about 1 ms for each 1000 blocks

    async def answer(self, request: Request) -> dict[str, Any]:
        """Raises ClientError."""
        top, text = _query(request)
        # No client address: a Unix socket.
        if not self._guarded and request.client is not None and not is_local(request.client.host):
            raise ClientError(
                "without --api-key, /admin/cache answers only callers on the server's own machine.", None, "forbidden"
            )
        frontend, engine = self._service.frontend(), self._service.engine
        owner = namespace_of(request.scope)
        try:
            async with asyncio.timeout(self._patience_s), self._one_at_a_time:
                prefixes = await engine.describe_cache(top, None if owner in ("", ADMIN) else owner)
        except TimeoutError:
            raise Unavailable("the engine is in a long step; try again in a moment.", code="overloaded") from None
        tokenizer = frontend.tokenizer if text else None
        return {
            **_totals(engine.stats, engine.info.block_size),
            "prefixes": [_entry(prefix, tokenizer) for prefix in prefixes],
        }


def _totals(stats: Stats, block_size: int) -> dict[str, Any]:
    return {
        "block_size": block_size,
        "blocks": {"total": stats.kv_blocks_total, "in_use": stats.kv_blocks_used, "idle": stats.kv_blocks_idle},
        "requests": {"queries": stats.prefix_queries, "hits": stats.prefix_hits, "misses": stats.prefix_misses},
        "tokens": {"queries": stats.prefix_queried_tokens, "hits": stats.prefix_hit_tokens},
        "evicted_blocks": stats.evicted_blocks,
    }


def _entry(prefix: CachedPrefix, tokenizer: Tokenizer | None) -> dict[str, Any]:
    entry = {
        "num_tokens": prefix.num_tokens,
        "num_blocks": prefix.num_blocks,
        "hits": prefix.hits,
        "namespace": prefix.namespace,
        "salted": prefix.salted,
        "tokens": prefix.tokens,
    }
    if tokenizer is not None:
        entry["text"] = tokenizer.decode(prefix.tokens, skip_special=False)
    return entry


def _query(request: Request) -> tuple[int, bool]:
    given = dict(request.query_params)
    top, text = given.pop("top", str(DEFAULT_TOP)), given.pop("text", "0")
    for name in given:
        raise ClientError(f"unknown parameter {name[:40]!r}; there are top and text.", name[:40], "unknown_field")
    if not (top.isascii() and top.isdigit() and 1 <= int(top[:9]) <= MAX_TOP):
        raise ClientError(f"top must be from 1 to {MAX_TOP}, not {top[:40]!r}.", "top", "out_of_range")
    if text not in ("0", "1"):
        raise ClientError(f"text must be 0 or 1, not {text[:40]!r}.", "text", "out_of_range")
    return int(top), text == "1"


def is_local(host: str) -> bool:
    """Whether an address is this machine's own."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
