"""/admin/cache and `potok cache`: what the tree holds, for whom, and how much of it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from server_kit import Script, Server, read_until, send_raw, serving
from starlette.requests import Request

from potok.cli import execute
from potok.errors import Unavailable
from potok.frontend import TextModel
from potok.server.cache_view import CacheView, is_local

SYSTEM = [19556] * 70


@pytest.fixture(scope="module")
def busy(text_model: TextModel) -> Iterator[Server]:
    """Six prompts behind one beginning of two blocks; then a salted one, and a short one."""
    with serving(text_model, Script(), max_model_len=512) as server:
        for i in range(6):
            post(server, [*SYSTEM[:64], *[30 + i] * 70])
        post(server, [77] * 40, cache_salt="s3cret")
        post(server, [78] * 5)
        yield server


def post(server: Server, prompt: list[int], **body: Any) -> None:
    server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **body}).raise_for_status()


def contents(server: Server, query: str = "") -> Any:
    return server.http.get(f"/admin/cache{query}").raise_for_status().json()


def test_the_shared_beginning_comes_first(busy: Server) -> None:
    found = contents(busy)
    first, *others = found["prefixes"]
    assert (first["num_tokens"], first["num_blocks"], first["hits"]) == (64, 2, 5)
    assert first["tokens"] == SYSTEM[:64] and "text" not in first
    assert [p["num_tokens"] for p in others] == [128] * 6 + [32]
    assert all(p["tokens"] == SYSTEM[:64] and p["hits"] == 0 for p in others[:6])
    assert found["requests"]["queries"] == 8 and found["requests"]["hits"] == 5
    assert found["requests"]["misses"]["too_short"] == 1
    assert found["tokens"]["hits"] == 5 * 64
    assert found["blocks"]["in_use"] == 0 and found["blocks"]["idle"] == 2 + 6 * 2 + 1


def test_salted_prefixes_keep_their_secret(busy: Server) -> None:
    [salted] = [p for p in contents(busy, "?text=1")["prefixes"] if p["salted"]]
    assert salted["tokens"] == [] and salted["text"] == ""
    assert "s3cret" not in busy.http.get("/admin/cache?text=1").text


def test_text_is_told_when_asked_for(busy: Server) -> None:
    assert contents(busy, "?text=1&top=1")["prefixes"][0]["text"] == "Hello" * 64
    assert len(contents(busy, "?top=3")["prefixes"]) == 3


@pytest.mark.parametrize("query", ["top=0", "top=1001", "top=x", "top=-1", "top=", "text=2", "text=yes", "topp=1"])
def test_bad_queries(busy: Server, query: str) -> None:
    response = busy.http.get(f"/admin/cache?{query}")
    assert response.status_code == 400 and response.json()["error"]["param"] == query.partition("=")[0]


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.7", False), ("::ffff:10.0.0.7", False)],
)
def test_without_keys_only_this_machine_may_ask(host: str, local: bool) -> None:
    assert is_local(host) == local


def test_an_engine_in_a_long_step_keeps_nobody_waiting(server: Server) -> None:
    async def ask(patience_s: float) -> Any:
        view = CacheView(server.service, guarded=False, patience_s=patience_s)
        return await view.answer(Request({"type": "http", "query_string": b"", "headers": [], "client": None}))

    def answer(patience_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(ask(patience_s), server.loop).result(20)

    server.script.gate.clear()
    connection = send_raw(server, "/v1/completions", {"prompt": [5], "max_tokens": 1})
    server.eventually(lambda: server.service.num_calls == 1)
    server.eventually(lambda: _is_unavailable(lambda: answer(0.05)))
    server.script.gate.set()
    read_until(connection, 1, b"total_tokens")
    connection.close()
    assert answer(20)["block_size"] == 32


def _is_unavailable(ask: Callable[[], Any]) -> bool:
    try:
        ask()
    except Unavailable as error:
        return error.code == "overloaded"
    return False


def test_the_command(busy: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["cache", busy.url, "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["tokens", "blocks", "hits", "key", "begins", "with"]
    assert lines[1].split()[:6] == ["64", "2", "5", "-", "19556", "19556"]
    assert len(lines) == 5 and "320 of" in lines[3] and "15 cached and idle" in lines[4]
    assert execute(["cache", f"{busy.url}/v1", "--show-text"]) == 0
    said = capsys.readouterr().out
    assert "'HelloHello" in said and "(salted)" in said and "s3cret" not in said


def test_the_command_says_what_is_wrong(busy: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["cache", "http://127.0.0.1:9"]) == 2
    assert execute(["cache", "127.0.0.1:9"]) == 2
    assert execute(["cache", busy.url, "--top", "0"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and "no server answers" in errors[0] and "http://" in errors[1]
