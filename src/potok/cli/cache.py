"""potok cache: what a running server's prefix cache holds."""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from potok.errors import ClientError, ServerError

TIMEOUT_S = 30.0


def register(app: typer.Typer) -> None:
    app.command(help="List what a server's prefix cache holds, the most useful first.")(cache)


def cache(
    *,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where the server is.")] = "http://127.0.0.1:8000",
    top: Annotated[int, typer.Option(min=1, max=1000, help="How many prefixes to list.")] = 20,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="Show how prompts begin; without it, only their ids.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Where the server asks for one.", show_default=False)
    ] = None,
) -> None:
    contents = _ask(url, {"top": top, "text": int(show_text)}, api_key)
    # Into a file or a pipe, long lines are not folded.
    out = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000)
    try:
        out.print(_table(contents["prefixes"], show_text))
        for line in _totals(contents):
            out.print(line)
    except (KeyError, TypeError) as error:
        raise ServerError(f"the server at {url} is another version of potok, or no potok at all.") from error


def _ask(url: str, query: dict[str, int], api_key: str | None) -> Any:
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ClientError(f"URL must begin with http:// or https://, not {url!r}.", "url")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{base}/admin/cache?{urllib.parse.urlencode(query)}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return msgspec.json.decode(response.read())
    except urllib.error.HTTPError as error:
        with error:
            said = error.read()
        raise ClientError(f"the server refuses, status {error.code}: {_reason(said)}") from error
    except (OSError, http.client.HTTPException) as error:
        raise ClientError(f"no server answers at {base}: {getattr(error, 'reason', error)}.", "url") from error
    except msgspec.DecodeError as error:
        raise ServerError(f"the server at {base} is no potok.") from error


def _reason(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return body[:200].decode(errors="replace") or "no reason given"


def _table(prefixes: list[dict[str, Any]], show_text: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("tokens", "blocks", "hits"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("key", no_wrap=True)
    table.add_column("begins with", overflow="ellipsis", no_wrap=True)
    for prefix in prefixes:
        if prefix["salted"]:
            beginning = "(salted)"
        else:
            # repr: what a stranger wrote must not command this terminal.
            beginning = repr(prefix["text"]) if show_text else " ".join(map(str, prefix["tokens"]))
        counts = (str(prefix[name]) for name in ("num_tokens", "num_blocks", "hits"))
        table.add_row(*counts, prefix["namespace"] or "-", beginning)
    return table


def _totals(contents: dict[str, Any]) -> list[str]:
    blocks, requests, tokens = contents["blocks"], contents["requests"], contents["tokens"]
    saved = tokens["hits"] / tokens["queries"] if tokens["queries"] else 0.0
    misses = ", ".join(f"{count} {reason}" for reason, count in requests["misses"].items() if count)
    return [
        f"{tokens['hits']} of {tokens['queries']} prompt tokens came from the cache ({saved:.0%}); "
        f"{requests['hits']} of {requests['queries']} requests found something{misses and f' (misses: {misses})'}",
        f"{blocks['total']} blocks of {contents['block_size']} tokens: {blocks['in_use']} in use, "
        f"{blocks['idle']} cached and idle, {contents['evicted_blocks']} dropped so far",
    ]
