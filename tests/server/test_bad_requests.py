"""What is refused: with OpenAI's error shape, naming the field, before the engine is asked for anything."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest
from server_kit import Server, read_until, send_raw

from potok.params import BOUNDS
from potok.server.limits import MAX_BODY_BYTES, MAX_CHOICES_PER_CALL, MAX_PROMPT_LOGPROBS
from potok.text.chat import RESERVED
from potok.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def refused(server: Server, path: str, body: Any, param: str | None, status: int = 400) -> dict[str, Any]:
    """Posts `body` (JSON, or bytes as they are) and checks the shape of the refusal; gives the error."""
    steps = server.service.engine.stats.steps
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"].endswith((".", "?")) and "\n" not in error["message"]
    assert server.service.engine.stats.steps == steps
    return dict(error)


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [1, 49152], [-1], [1, 2.5], [True], None, [None], {}, 5, ["a", [1]], [[1], "a"]]
)
def test_degenerate_prompts(server: Server, prompt: Any) -> None:
    refused(server, COMPLETIONS, {"prompt": prompt, "max_tokens": 2}, "prompt")


def test_a_missing_prompt_and_no_messages(server: Server) -> None:
    refused(server, COMPLETIONS, {"max_tokens": 2}, "prompt")
    refused(server, CHAT, {"messages": []}, "messages")
    refused(server, CHAT, {}, "messages")


def test_a_bad_prompt_among_good_ones_is_named_and_starts_nothing(server: Server) -> None:
    refused(server, COMPLETIONS, {"prompt": [[1], [2], [49152]]}, "prompt[2]")


@pytest.mark.parametrize("prompt", ["\u0004", "\U00050000"])
def test_bytes_without_a_token_do_not_break_the_server(server: Server, prompt: str) -> None:
    response = server.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
    assert response.status_code in (200, 400)


@pytest.mark.parametrize("name", [name for name in BOUNDS if name not in ("logit_bias", "logprobs")])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_number_is_held_to_its_bounds(server: Server, path: str, name: str) -> None:
    start = {"prompt": [1]} if path == COMPLETIONS else {"messages": HI}
    bound = BOUNDS[name]
    below, above = (int(bound.low) - 1, int(bound.high) + 1) if bound.integer else (bound.low - 1, bound.high + 1)
    for value in (below, above, "1", True, [], {}, 10**300, *([1.5] if bound.integer else [])):
        error = refused(server, path, {**start, name: value}, name)
        assert name in error["message"]


@pytest.mark.parametrize("value", [1_000_000, 21, -1, 2.5, "5", True])
def test_top_logprobs_has_bounds(server: Server, value: Any) -> None:
    refused(server, CHAT, {"messages": HI, "logprobs": True, "top_logprobs": value}, "top_logprobs")
    refused(server, COMPLETIONS, {"prompt": [1], "logprobs": value}, "logprobs")


def test_fields_that_need_another(server: Server) -> None:
    refused(server, CHAT, {"messages": HI, "top_logprobs": 5}, "top_logprobs")
    for path, start in ((COMPLETIONS, {"prompt": [1]}), (CHAT, {"messages": HI})):
        for stream in ({}, {"stream": False}, {"stream": None}):
            options = {"stream_options": {"include_usage": True}}
            refused(server, path, {**start, **stream, **options}, "stream_options")
    refused(server, CHAT, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens")
    refused(server, COMPLETIONS, {"prompt": [1], "min_tokens": 9, "max_tokens": 8}, "min_tokens")


@pytest.mark.parametrize("bias", [{"49152": 1}, {"-1": 1}, {"abc": 1}, {"5": 101}, {"5": None}, {"5": "1"}, [], 5])
def test_logit_bias(server: Server, bias: Any) -> None:
    refused(server, COMPLETIONS, {"prompt": [19556], "logit_bias": bias}, "logit_bias")


@pytest.mark.parametrize("ids", [[None], [49152], [-3], ["2"], [[2]], 2, {}])
def test_stop_token_ids(server: Server, ids: Any) -> None:
    refused(server, COMPLETIONS, {"prompt": [19556], "stop_token_ids": ids}, "stop_token_ids")


@pytest.mark.parametrize("stop", ["", [""], [None], [1], 5, {}, ["x"] * 17, "x" * 1025])
def test_stop(server: Server, stop: Any) -> None:
    refused(server, COMPLETIONS, {"prompt": [1], "stop": stop}, "stop")


def test_too_many_choices(server: Server) -> None:
    refused(server, COMPLETIONS, {"prompt": [1], "n": 5_000_000}, "n")
    refused(server, COMPLETIONS, {"prompt": [[1]] * (MAX_CHOICES_PER_CALL // 128 + 1), "n": 128}, "n")
    refused(server, COMPLETIONS, {"prompt": [[1]] * 1025}, "prompt")


UNSUPPORTED = {
    "tools": [{"type": "function"}],
    "tool_choice": "auto",
    "functions": [{}],
    "response_format": {"type": "json_object"},
    "best_of": 4,
    "suffix": "x",
    "audio": {},
    "modalities": ["audio"],
    "chat_template": "{{ messages }}",
    "use_beam_search": True,
    "priority": 1,
    "reasoning_effort": "high",
    "store": True,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_never_ignored(server: Server, name: str) -> None:
    error = refused(server, CHAT, {"messages": HI, name: UNSUPPORTED[name]}, name)
    assert error["code"] in ("not_supported", "unknown_field")
    refused(server, COMPLETIONS, {"prompt": [1], name: UNSUPPORTED[name]}, name)


def test_echo_is_for_completions(server: Server) -> None:
    assert refused(server, CHAT, {"messages": HI, "echo": True}, "echo")["code"] == "not_supported"


@pytest.mark.parametrize("salt", ["", "x" * 513, 5, ["x"], {}, True])
def test_salts(server: Server, salt: Any) -> None:
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": [1]})):
        refused(server, path, {**body, "cache_salt": salt}, "cache_salt")


def test_prompt_logprobs_are_not_for_streams_nor_without_bound(server: Server) -> None:
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": [1]})):
        refused(server, path, {**body, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs")
    most = MAX_PROMPT_LOGPROBS // (500 * 21)
    error = refused(server, COMPLETIONS, {"prompt": [[1] * 500] * (most + 1), "prompt_logprobs": 20}, "prompt")
    assert str(MAX_PROMPT_LOGPROBS) in error["message"]


def test_fields_that_ask_for_nothing_are_fine(server: Server) -> None:
    nothing = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "echo": False, "user": "me",
        "prompt_logprobs": None, "store": False, "modalities": ["text"], "service_tier": "auto", "stop": None,
        "logit_bias": None, "stream_options": None, "n": None, "temperature": None, "seed": None, "length_penalty": 1.0,
    }  # fmt: skip
    body = {"messages": HI, "max_tokens": 1, **nothing}
    assert server.http.post(CHAT, json=body).status_code == 200


def test_an_unknown_field_gets_a_hint(server: Server) -> None:
    error = refused(server, COMPLETIONS, {"prompt": [1], "max_token": 5}, "max_token")
    assert "max_tokens" in error["message"]
    refused(server, CHAT, {"messages": HI, "top_logits": 3}, "top_logits")
    refused(server, COMPLETIONS, {"prompt": [1], "x" * 100_000: 3}, "x" * 512)


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        {},
        {"role": "user"},
        {"role": "wizard", "content": "hi"},
        {"role": ["user"], "content": "hi"},
        {"role": "user", "content": 5},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": ["hi"]},
        {"role": "user", "content": "hi", "name": 5},
        {"role": "assistant", "content": "", "tool_calls": [{}]},
    ],
)
def test_messages_that_are_none(server: Server, message: Any) -> None:
    error = refused(server, CHAT, {"messages": [HI[0], message]}, "messages[1]")
    assert "messages[1]" in error["message"]


def test_template_arguments_cannot_take_the_place_of_ours(server: Server) -> None:
    for arguments in (*({name: []} for name in RESERVED), {"x": "y" * 20_000}, {"x": [1] * 20_000}, [], "x"):
        body = {"messages": HI, "chat_template_kwargs": arguments}
        refused(server, CHAT, body, "chat_template_kwargs")
        refused(server, "/tokenize", body, "chat_template_kwargs")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": [1], "temperature": NaN}',
        b'{"prompt": [1], "temperature": Infinity}',
        b'{"prompt": [1], "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": [' + b"9" * 5000 + b"]}",
        b"[]",
        b"null",
        b'"prompt"',
    ],
    ids=lambda body: body[:24].decode(errors="replace"),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_json_is_taken_strictly(server: Server, path: str, body: bytes) -> None:
    refused(server, path, body, None)


def test_integers_beyond_64_bits(server: Server) -> None:
    refused(server, COMPLETIONS, b'{"prompt": [' + b"9" * 300 + b"]}", "prompt")
    for name in ("seed", "temperature", "max_tokens"):
        refused(server, COMPLETIONS, f'{{"prompt": [1], "{name}": {"9" * 300}}}'.encode(), name)


def test_a_body_over_the_limit_is_refused_before_it_is_read(server: Server) -> None:
    with socket.create_connection(server.address, timeout=30) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {10**12}\r\n\r\n"
        connection.sendall(head.encode())
        answer = read_until(connection, 1, b"}}")
    assert answer.startswith(b"HTTP/1.1 413 ") and b'"code":"body_too_large"' in answer


def test_a_body_over_the_limit_in_chunks(server: Server) -> None:
    def parts() -> Any:
        for _ in range(MAX_BODY_BYTES // 2**20 + 4):
            yield b"x" * 2**20

    headers = {"Content-Type": "application/json"}
    for content in (parts(), b"x" * (MAX_BODY_BYTES + 1)):
        response = server.http.post(CHAT, content=content, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


def test_headers_without_end(server: Server) -> None:
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: ")
        answer = b""
        for _ in range(1000):
            try:
                connection.sendall(b"x" * 10_000)
            except OSError:
                break
        else:
            raise AssertionError("ten megabytes of headers were taken")
        with contextlib.suppress(OSError):
            answer = connection.recv(1000)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"x" * 70_000 + b"\r\n")
        assert read_until(connection, 1, b"\r\n").startswith(b"HTTP/1.1 400 ")
    big = {"prompt": "word " * 100, "max_tokens": 1, "user": "x" * 500, "stop": ["y" * 1000] * 16}
    for _ in range(40):  # heads are counted by themselves, not the bodies of a connection
        assert server.http.post(COMPLETIONS, json=big).status_code == 200


def test_the_content_type_must_be_json(server: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = server.http.post(CHAT, content=b'{"messages": []}', headers={"Content-Type": kind})
        assert response.status_code == 415, kind
    response = server.http.post(
        COMPLETIONS,
        content=b'{"prompt": [1], "max_tokens": 1}',
        headers={"Content-Type": "Application/JSON; charset=utf-8"},
    )
    assert response.status_code == 200


def test_unknown_models_routes_and_methods(server: Server) -> None:
    error = refused(server, CHAT, {"messages": HI, "model": "gpt-5"}, "model", 404)
    assert error["code"] == "model_not_found" and "smol" in error["message"]
    for response, status in ((server.http.get("/v1/nothing"), 404), (server.http.get(CHAT), 405)):
        assert response.status_code == status
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}


def test_the_context_is_a_limit_with_both_numbers(server: Server) -> None:
    for count in (512, 513):
        error = refused(server, COMPLETIONS, {"prompt": [5] * count, "max_tokens": 1}, "prompt")
        assert str(count) in error["message"] and "512" in error["message"]
        assert error["code"] == "context_length_exceeded"
    error = refused(server, CHAT, {"messages": [{"role": "user", "content": "word " * 600}]}, "messages")
    assert "512" in error["message"]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenising eight megabytes without a word's end takes seconds and a gigabyte."""
    text = "<|" * (MAX_BODY_BYTES // 2 - 100)
    encode, longest = Tokenizer.encode, 0

    def watched(self: Tokenizer, text: str, field: str = "prompt") -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(self, text, field)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    refused(server, COMPLETIONS, {"prompt": "word " * 600}, "prompt")
    assert longest == 5 * 600
    for path, body, param in (
        (COMPLETIONS, {"prompt": text}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", text]}, "prompt[1]"),
        (CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        error = refused(server, path, body, param)
        assert error["code"] == "context_length_exceeded" and "512 tokens" in error["message"]
    assert longest == 5 * 600


def test_a_refused_call_is_counted_and_accepts_nothing(server: Server) -> None:
    accepted = server.metric("potok_requests_accepted_total")
    before = server.metric("potok_requests_rejected_total", status="400")
    refused(server, COMPLETIONS, {"prompt": []}, "prompt")
    assert server.metric("potok_requests_rejected_total", status="400") == before + 1
    assert server.metric("potok_requests_accepted_total") == accepted


def test_half_a_body_and_gone(server: Server) -> None:
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b'Content-Length: 100\r\n\r\n{"prompt"')
        server.eventually(lambda: server.service.num_calls == 1)
    server.eventually(lambda: server.service.num_calls == 0)


def test_many_calls_at_once_are_bounded(server: Server) -> None:
    server.script.gate.clear()
    server.service._max_calls, kept = 3, server.service._max_calls
    try:
        held = [send_raw(server, COMPLETIONS, {"prompt": [7, 7, i], "max_tokens": 2}) for i in range(3)]
        server.eventually(lambda: server.service.num_calls == 3)
        response = server.http.post(COMPLETIONS, json={"prompt": [1]})
        assert response.status_code == 503 and int(response.headers["Retry-After"]) > 0
        assert server.http.get("/health/ready").status_code == 200
    finally:
        server.service._max_calls = kept
        server.script.gate.set()
    for connection in held:
        assert read_until(connection, 1, b"finish_reason").startswith(b"HTTP/1.1 200")
        connection.close()
