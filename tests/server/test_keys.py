"""Who may ask: every route but health needs a key, and callers with different keys share nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import typer
from fastapi.routing import APIRoute
from server_kit import Script, Server, serving

from potok.cli.api_keys import parse_keys
from potok.config import ServerConfig
from potok.frontend import TextModel
from potok.server.app import create_app
from potok.server.keys import OPEN_PATHS, ApiKeys

ALICE, BOB, ADMIN = "alice-key-1", "bob-key-22", "root-key-333"
KEYS = [("alice", ALICE), ("alice", "alice-key-2"), ("bob", BOB), ("admin", ADMIN)]


@pytest.fixture(scope="module")
def guarded(text_model: TextModel) -> Iterator[Server]:
    with serving(text_model, Script(), api_keys=KEYS, max_model_len=512) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(server: Server, key: str, prompt: list[int], **body: Any) -> int:
    """Cached tokens."""
    response = server.http.post(
        "/v1/completions", json={"prompt": prompt, "max_tokens": 4, **body}, headers=bearer(key)
    )
    cached: int = response.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_every_route_is_closed_but_health(guarded: Server) -> None:
    """All that are registered, those that FastAPI adds of its own included, and what is not registered at all."""
    app = create_app(guarded.service, ApiKeys(KEYS))
    routes = [(route.path, method) for route in app.routes for method in getattr(route, "methods", None) or ()]
    assert len(routes) > 15 and ("/docs", "GET") in routes and ("/openapi.json", "GET") in routes
    assert any(isinstance(route, APIRoute) and route.path == "/admin/cache" for route in app.routes)
    for path, method in [*routes, ("/nowhere", "GET"), ("/health/", "GET"), ("//health", "GET"), ("/Health", "GET")]:
        response = guarded.http.request(method, path.replace("{name:path}", "smol"))
        if path in OPEN_PATHS:
            assert response.status_code == 200, path
        else:
            assert response.status_code == 401, (path, method)
            assert response.headers["www-authenticate"] == "Bearer" and "x-request-id" in response.headers
            if method != "HEAD":
                error = response.json()["error"]
                assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", ALICE, f"Basic {ALICE}", f"Bearer {ALICE[:-1]}", f"Bearer {ALICE}x", f"Bearer x {ALICE}",
     f"Bearer {ALICE.upper()}", "Bearer \xff", f"Bearer{ALICE}", "Bearer alice"],
)  # fmt: skip
def test_what_is_no_key(guarded: Server, header: str) -> None:
    response = guarded.http.get("/v1/models", headers={"Authorization": header.encode("latin-1")})
    assert response.status_code == 401
    assert "alice-key" not in response.text


def test_two_headers_are_none(guarded: Server) -> None:
    headers = httpx.Headers([("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {ALICE}")])
    assert guarded.http.get("/v1/models", headers=headers).status_code == 401


def test_keys_open_all_routes(guarded: Server) -> None:
    for _, key in KEYS:
        assert guarded.http.get("/v1/models", headers=bearer(key)).status_code == 200
        assert guarded.http.get("/metrics", headers={"Authorization": f"bearer  {key}"}).status_code == 200
    assert guarded.http.get("/nowhere", headers=bearer(BOB)).status_code == 404


def test_different_names_share_nothing_and_the_same_name_does(guarded: Server) -> None:
    prompt = [23] * 100
    assert ask(guarded, ALICE, prompt) == 0
    assert ask(guarded, BOB, prompt) == 0
    assert ask(guarded, ALICE, prompt) == 96
    assert ask(guarded, "alice-key-2", prompt) == 96
    assert ask(guarded, ALICE, prompt, cache_salt="x") == 0
    assert ask(guarded, BOB, prompt, cache_salt="x") == 0  # nor do salts reach over


def test_who_sees_what_of_the_cache(guarded: Server) -> None:
    ask(guarded, ALICE, [24] * 100)
    ask(guarded, BOB, [25] * 100)

    def seen(key: str) -> set[str]:
        found = guarded.http.get("/admin/cache?top=1000&text=1", headers=bearer(key)).raise_for_status().json()
        return {prefix["namespace"] for prefix in found["prefixes"]}

    assert seen(ALICE) == {"alice"} and seen(BOB) == {"bob"} and seen(ADMIN) == {"alice", "bob"}


def test_the_official_client(guarded: Server) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=BOB, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["smol"]
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model="smol", prompt="Hi")
        assert caught.value.code == "invalid_api_key"


# -- flags ----


def test_keys_with_names_and_without() -> None:
    assert parse_keys(["a=k1", "b=k2", "b=k3", "sk-plain"]) == (
        ("a", "k1"),
        ("b", "k2"),
        ("b", "k3"),
        ("default", "sk-plain"),
    )
    assert parse_keys(["c2VjcmV0IQ=="]) == (("default", "c2VjcmV0IQ=="),)
    assert parse_keys(["a=c2VjcmV0IQ=="]) == (("a", "c2VjcmV0IQ=="),)
    assert parse_keys(["a=x=y"]) == (("a", "x=y"),)
    assert parse_keys(["a=k", "a=k"]) == (("a", "k"),)
    assert parse_keys([]) == ()


@pytest.mark.parametrize(
    "given", [[""], ["a b"], ["a=b c"], ["schl\u00fcssel"], ["a=k-twice", "b=k-twice"], ["x" * 513]]
)
def test_bad_keys_are_refused_and_not_shown(given: list[str]) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        parse_keys(given)
    assert not any(text.partition("=")[2] and text.partition("=")[2] in caught.value.message for text in given)


def test_settings_do_not_show_keys() -> None:
    assert ALICE not in repr(ServerConfig(api_keys=(("alice", ALICE),)))
