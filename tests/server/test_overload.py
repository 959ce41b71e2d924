"""More calls than may wait: the rest is refused at once, whatever the engine does, and everything is given back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from server_kit import Script, Server, raw_request, read_until, send_raw, serving

from potok.config import ServerConfig
from potok.frontend import TextModel
from potok.protocol import Chunk

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ALICE, BOB = "alice-key-1", "bob-key-22"


@pytest.fixture(scope="module")
def narrow_server(text_model: TextModel) -> Iterator[Server]:
    with serving(text_model, Script(), config=ServerConfig(max_waiting=4), max_num_seqs=2, max_model_len=512) as server:
        yield server


@pytest.fixture
def narrow(narrow_server: Server) -> Iterator[Server]:
    """Two run, four wait. Quiet before and after the test."""
    yield narrow_server
    narrow_server.script.reset()
    narrow_server.eventually(narrow_server.settled)
    assert narrow_server.service.admission.num_open == 0


def post(server: Server, body: dict[str, Any], path: str = COMPLETIONS, key: str = "none") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=30)


def burst(server: Server, bodies: list[dict[str, Any]], admitted: int) -> list[httpx.Response]:
    """Sends all at once to an engine that stands still until all but `admitted` of them are answered."""
    server.script.gate.clear()
    answered = threading.Semaphore(0)

    def one(body: dict[str, Any]) -> httpx.Response:
        try:
            return post(server, body)
        finally:
            answered.release()

    with ThreadPoolExecutor(len(bodies)) as pool:
        calls = [pool.submit(one, body) for body in bodies]
        try:
            for _ in range(len(bodies) - admitted):
                assert answered.acquire(timeout=30)
            assert server.http.get("/health").status_code == 200
            assert server.service.admission.num_open == admitted * bodies[0].get("n", 1)
        finally:
            server.script.gate.set()
        return [call.result() for call in calls]


def test_six_of_twenty_are_served_and_the_others_refused_at_once(
    narrow: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_before = narrow.metric("potok_requests_crowded_out_total", reason="queue_full")
    accepted_before = narrow.metric("potok_requests_accepted_total")
    client: Any = narrow.service.engine
    dispatch, waiting = client._dispatch, []

    def watch(chunks: list[Chunk]) -> None:  # each time that the engine has spoken
        waiting.append(client.stats.waiting)
        dispatch(chunks)

    monkeypatch.setattr(client, "_dispatch", watch)
    answers = burst(narrow, [{"prompt": [7, i], "max_tokens": 3} for i in range(20)], admitted=6)
    assert sorted(answer.status_code for answer in answers) == [200] * 6 + [429] * 14
    for answer in answers:
        if answer.status_code == 429:
            error = answer.json()["error"]
            assert error["code"] == "queue_full" and error["type"] == "rate_limit_error"
            assert error["param"] is None and "4 may" in error["message"]
            assert int(answer.headers["Retry-After"]) >= 1
        else:
            assert answer.json()["usage"]["completion_tokens"] == 3
    assert max(waiting) == 4
    narrow.eventually(narrow.settled)
    assert narrow.metric("potok_requests_crowded_out_total", reason="queue_full") == refused_before + 14
    assert narrow.metric("potok_requests_accepted_total") == accepted_before + 6
    assert post(narrow, {"prompt": [7], "max_tokens": 2}).status_code == 200


def test_choices_count_and_what_can_never_be_taken_is_a_bad_request(narrow: Server) -> None:
    for body in ({"prompt": [5], "n": 7}, {"prompt": [[5]] * 7}, {"prompt": [[5], [6]], "n": 4}):
        answer = post(narrow, {**body, "max_tokens": 2})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"
        assert "Retry-After" not in answer.headers
    assert len(post(narrow, {"prompt": [5], "n": 6, "max_tokens": 2}).json()["choices"]) == 6
    answers = burst(narrow, [{"prompt": [5], "n": 3, "max_tokens": 2}] * 3, admitted=2)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429]


def test_nothing_is_read_or_tokenised_of_a_call_that_is_refused(narrow: Server) -> None:
    narrow.script.gate.clear()
    held = [send_raw(narrow, COMPLETIONS, {"prompt": [7, i], "max_tokens": 2}) for i in range(6)]
    narrow.eventually(lambda: narrow.service.admission.num_open == 6)
    tokenizer, encoded = narrow.text.tokenizer, []
    narrow.service.frontend().tokenizer = Counted(tokenizer, encoded)  # type: ignore[assignment]
    try:
        assert post(narrow, {"prompt": "Once upon a time"}).status_code == 429
        answer = narrow.http.post(COMPLETIONS, content=b"{", headers={"Content-Type": "application/json"})
        assert answer.status_code == 429
        assert encoded == []
    finally:
        narrow.service.frontend().tokenizer = tokenizer
    narrow.script.gate.set()
    for connection in held:
        read_until(connection, 1, b"finish_reason")
        connection.close()


def test_a_connection_outlives_a_refusal_that_came_before_the_body(narrow: Server) -> None:
    narrow.script.gate.clear()
    held = [send_raw(narrow, COMPLETIONS, {"prompt": [7, i], "max_tokens": 2}) for i in range(6)]
    narrow.eventually(lambda: narrow.service.admission.num_open == 6)
    request = raw_request(COMPLETIONS, {"prompt": "x" * 300_000})
    with socket.create_connection(narrow.address, timeout=30) as connection:
        connection.sendall(request[:1000])
        assert read_until(connection, 1, b"queue_full").startswith(b"HTTP/1.1 429 ")
        narrow.script.gate.set()
        for one in held:
            read_until(one, 1, b"finish_reason")
            one.close()
        narrow.eventually(lambda: narrow.service.admission.num_open == 0)
        connection.sendall(request[1000:] + raw_request(COMPLETIONS, {"prompt": [5], "max_tokens": 2}))
        assert b"HTTP/1.1 200 OK" in read_until(connection, 1, b"finish_reason")


class Counted:
    """A tokenizer that notes what it is given."""

    def __init__(self, tokenizer: Any, encoded: list[str]) -> None:
        self._tokenizer, self._encoded = tokenizer, encoded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_prompt(self, text: str, field: str) -> Any:
        self._encoded.append(text)
        return self._tokenizer.encode_prompt(text, field)


def test_a_place_is_given_back_whatever_becomes_of_the_call(narrow: Server) -> None:
    """Refused by its fields or by the engine, failed in the engine, left by its client in every phase."""
    server = narrow
    server.script.failing[(6, 6)] = 3
    server.script.step_s = 0.005
    long = {"prompt": [7, 7], "max_tokens": 400, "ignore_eos": True}
    for stream in (True, False):
        for body in (
            {"prompt": []},
            {"prompt": [5] * 600},
            {"prompt": "a", "stop": [""]},
            {"prompt": [6, 6], "max_tokens": 9},
            {"prompt": [5], "max_tokens": 0},
            {"prompt": [5, 6], "n": 2, "prompt_logprobs": 1, "max_tokens": 2},
        ):
            post(server, {**body, "stream": stream})
            server.eventually(lambda: server.service.admission.num_open == 0)
        held = [send_raw(server, COMPLETIONS, {**long, "stream": stream}) for _ in range(6)]
        server.eventually(lambda: server.service.admission.num_open == 6)
        assert post(server, {"prompt": [5]}).status_code == 429
        for connection in held:
            connection.close()
        server.eventually(lambda: server.service.admission.num_open == 0)
        assert server.service.admission._num_unsent == 0


def test_waiting_tokens_and_a_stream_that_frees_its_place(text_model: TextModel) -> None:
    config = ServerConfig(max_waiting_tokens=300)
    with serving(text_model, Script(), config=config, max_num_seqs=1, max_model_len=512) as server:
        server.script.gate.clear()
        bodies = [{"prompt": [7] * 200, "max_tokens": 2}, {"prompt": [8] * 200, "max_tokens": 2}]
        held = [send_raw(server, COMPLETIONS, body) for body in bodies]
        server.eventually(lambda: server.service.admission.num_open == 2)
        server.eventually(lambda: server.service.admission._num_unsent == 0)
        answer = post(server, {"prompt": [9] * 101, "max_tokens": 2})
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
        held.append(send_raw(server, COMPLETIONS, {"prompt": [9] * 100, "max_tokens": 2}))
        server.eventually(lambda: server.service.admission.num_open == 3)
        server.script.gate.set()
        for connection in held:
            assert read_until(connection, 1, b"finish_reason").startswith(b"HTTP/1.1 200")
            connection.close()
        server.eventually(server.settled)


@pytest.fixture(scope="module")
def limited(text_model: TextModel) -> Iterator[Server]:
    config = ServerConfig(key_requests=2, key_tokens_per_minute=600)
    keys = [("alice", ALICE), ("alice", "alice-key-2"), ("bob", BOB), ("carol", "carol-key-333"), ("dan", "dan-key-4")]
    with serving(text_model, Script(), api_keys=keys, config=config, max_model_len=512) as server:
        yield server


def test_requests_of_one_key(limited: Server) -> None:
    server = limited
    server.script.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": [7], "max_tokens": 2}
        held = [pool.submit(post, server, body, key=key) for key in (ALICE, "alice-key-2")]
        server.eventually(lambda: server.service.admission.num_open == 2)
        answer = post(server, body, key=ALICE)
        error = answer.json()["error"]
        assert answer.status_code == 429 and error["code"] == "too_many_requests"
        assert int(answer.headers["Retry-After"]) >= 1
        free = pool.submit(post, server, body, key=BOB)
        server.script.gate.set()
        assert [call.result().status_code for call in (*held, free)] == [200] * 3
    server.eventually(lambda: server.service.admission.num_open == 0)
    assert post(server, body, key=ALICE).status_code == 200


def test_tokens_of_one_key(limited: Server) -> None:
    """Prompt and answer are charged: 400 and 300 are 100 more than a minute's, and the debt takes ten seconds."""
    key = "carol-key-333"
    assert post(limited, {"prompt": [7] * 400, "max_tokens": 100, "ignore_eos": True}, key=key).status_code == 200
    limited.eventually(lambda: limited.service.admission.num_open == 0)
    assert post(limited, {"prompt": [7], "max_tokens": 199, "ignore_eos": True}, key=key).status_code == 200
    answer = post(limited, {"prompt": [7], "max_tokens": 1}, key=key)
    error = answer.json()["error"]
    assert answer.status_code == 429 and error["code"] == "rate_limited" and "600 tokens a minute" in error["message"]
    assert 5 <= int(answer.headers["Retry-After"]) <= 10
    assert post(limited, {"prompt": [7], "max_tokens": 1}, key="dan-key-4").status_code == 200


def test_openais_client_tries_again_when_it_was_told_to(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads Retry-After, waits so long, and is served."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        narrow.script.gate.set()
        for connection in held:
            read_until(connection, 1, b"finish_reason")
            connection.close()
        narrow.eventually(lambda: narrow.service.admission.num_open == 0)

    narrow.script.gate.clear()
    held = [send_raw(narrow, COMPLETIONS, {"prompt": [7, i], "max_tokens": 2}) for i in range(6)]
    narrow.eventually(lambda: narrow.service.admission.num_open == 6)
    with openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="smol", prompt=[5], max_tokens=2)
        assert caught.value.code == "queue_full" and caught.value.type == "rate_limit_error"
    monkeypatch.setattr("openai._base_client.time.sleep", sleep)
    with openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=1) as client:
        answer = client.completions.create(model="smol", prompt=[5], max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert slept == [int(caught.value.response.headers["Retry-After"])]
