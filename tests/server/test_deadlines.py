"""Deadlines over HTTP: what is too late is refused before it costs a prompt, what is cut short ends as it is."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_kit import Script, Server, read_until, send_raw, serving

from potok.backends.api import StepInputs
from potok.frontend import TextModel

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
LATE = [7] * 50


@pytest.fixture(scope="module")
def single_server(text_model: TextModel) -> Iterator[Server]:
    with serving(text_model, Script(), max_num_seqs=1, max_model_len=512, schedule_policy="priority") as server:
        yield server


@pytest.fixture
def single(single_server: Server) -> Iterator[Server]:
    """One runs, at 5 ms a step, and the others wait."""
    single_server.script.step_s = 0.005
    yield single_server
    single_server.script.reset()
    single_server.eventually(single_server.settled)
    assert single_server.service.admission.num_open == 0


@pytest.fixture
def busy(single: Server) -> Iterator[Server]:
    """Its place is taken for longer than the test; `steps` notes the tokens of each."""
    held = send_raw(single, COMPLETIONS, {**LONG, "prompt": [9], "stream": True})
    read_until(held, 2, b"data: ")
    yield single
    held.close()


def tokens_seen(server: Server) -> list[int]:
    """All tokens that the steps compute from now on."""
    seen: list[int] = []

    def watch(inputs: StepInputs) -> None:
        seen.extend(inputs.tokens.tolist())

    server.script.watch = watch
    return seen


def assert_refused(answer: httpx.Response, param: str, allowed_ms: int) -> None:
    error = answer.json()["error"]
    assert answer.status_code == 504
    assert error["code"] == "deadline_exceeded" and error["type"] == "timeout" and error["param"] == param
    assert error["message"].startswith(f"{param} is {allowed_ms}, ")
    assert answer.headers["x-should-retry"] == "false" and "Retry-After" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["timeout_ms", "ttft_timeout_ms"])
def test_a_queued_call_is_refused_at_its_deadline_without_a_prefill(busy: Server, name: str, stream: bool) -> None:
    seen = tokens_seen(busy)
    ended = busy.metric("potok_choices_timed_out_total")
    late = busy.metric("potok_requests_timed_out_total")
    body = {"prompt": LATE, "max_tokens": 4, name: 60, "stream": stream}
    sent_s = time.monotonic()
    answer = busy.http.post(COMPLETIONS, json=body)
    # No sooner than it has to be: a prompt that must be computed by then is given up when it cannot be any more.
    assert time.monotonic() - sent_s >= (0.06 if name == "timeout_ms" else 0.01)
    assert_refused(answer, name, 60)
    assert LATE[0] not in seen and len(seen) > 0
    assert busy.metric("potok_requests_timed_out_total") == late + 1
    assert busy.metric("potok_choices_timed_out_total") == ended + 1


def test_what_a_header_says_is_a_deadline_too(busy: Server) -> None:
    for header, name in (("X-Request-Timeout-Ms", "timeout_ms"), ("x-ttft-timeout-ms", "ttft_timeout_ms")):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert_refused(busy.http.post(CHAT, json=body, headers={header: "60"}), name, 60)
        assert_refused(busy.http.post(CHAT, json={**body, name: 60}, headers={header: "60"}), name, 60)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_short_has_what_was_there(single: Server, stream: bool) -> None:
    prompt = single.says([5, 5], list(range(1000, 1400)))
    body = {"prompt": prompt, **LONG, "timeout_ms": 150, "return_token_ids": True, "stop": ["never to be seen"]}
    cut_before = single.metric("potok_requests_finished_total", reason="timeout")
    if stream:
        *events, done = single.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        assert done == "[DONE]"
        *chunks, usage = events
        choice = chunks[-1]["choices"][0]
        ids = [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
        completion_tokens = usage["usage"]["completion_tokens"]
    else:
        answer = single.http.post(COMPLETIONS, json=body)
        assert answer.status_code == 200
        choice = answer.json()["choices"][0]
        ids, text, completion_tokens = choice["token_ids"], choice["text"], answer.json()["usage"]["completion_tokens"]
    assert choice["finish_reason"] == "length" and choice["stop_reason"] == "timeout_ms"
    assert 1 <= len(ids) < 200 and ids == list(range(1000, 1000 + len(ids))) and completion_tokens == len(ids)
    assert text == single.text.tokenizer.decode(ids, skip_special=True)
    assert single.metric("potok_requests_finished_total", reason="timeout") == cut_before + 1


def test_deadlines_that_are_met_change_nothing(single: Server) -> None:
    body = {"prompt": [5, 6], "max_tokens": 4}
    plain = single.http.post(COMPLETIONS, json=body).json()["choices"]
    hurried = single.http.post(COMPLETIONS, json={**body, "timeout_ms": 60_000, "ttft_timeout_ms": 60_000})
    assert hurried.json()["choices"] == plain


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_choices_those_that_are_too_late_are_empty(single: Server, stream: bool) -> None:
    """One runs and has text, so the call is answered: of the same prompt, and of another one."""
    for prompts in ({"prompt": [5], "n": 2}, {"prompt": [[5], [6]], "echo": True, "logprobs": 1}):
        body = {**prompts, **LONG, "timeout_ms": 150}
        if stream:
            events = single.events(COMPLETIONS, body)[:-1]
            ends = {c["index"]: c for event in events for c in event["choices"] if c["finish_reason"] is not None}
        else:
            ends = {c["index"]: c for c in single.http.post(COMPLETIONS, json=body).json()["choices"]}
        assert set(ends) == {0, 1}
        assert all((c["finish_reason"], c["stop_reason"]) == ("length", "timeout_ms") for c in ends.values())


def test_the_time_counts_from_the_first_byte(single: Server) -> None:
    """A body that comes slowly has used up its sender's patience; the head said how much there is."""
    connection = send_raw(single, COMPLETIONS, {"prompt": LATE, "max_tokens": 4})
    connection.close()
    single.eventually(single.settled)
    seen = tokens_seen(single)
    body = b'{"prompt": [7, 7, 7], "max_tokens": 4}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Request-Timeout-Ms: 100\r\n"
    with socket.create_connection(single.address, timeout=30) as slow:
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        time.sleep(0.15)
        slow.sendall(body)
        assert read_until(slow, 1, b"deadline_exceeded").startswith(b"HTTP/1.1 504 ")
    assert seen == []


def test_openais_client_does_not_try_again(busy: Server) -> None:
    """It would try a 504 twice more, each time later than its caller can wait."""
    received = busy.metric("potok_requests_accepted_total")
    with openai.OpenAI(base_url=f"{busy.url}/v1", api_key="none", max_retries=3) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="smol", prompt=LATE, extra_body={"timeout_ms": 50})
        assert caught.value.status_code == 504 and caught.value.code == "deadline_exceeded"
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="smol", prompt=LATE, stream=True, extra_headers={"X-TTFT-Timeout-Ms": "50"})
    assert busy.metric("potok_requests_accepted_total") == received + 2


@pytest.mark.parametrize("value", [0, -1, 86_400_001, 1.5, "100", True, [5]])
@pytest.mark.parametrize("name", ["timeout_ms", "ttft_timeout_ms"])
def test_bounds_of_the_fields(single: Server, name: str, value: Any) -> None:
    for path, rest in ((COMPLETIONS, {"prompt": [5]}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
        answer = single.http.post(path, json={**rest, name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


@pytest.mark.parametrize("value", ["0", "-1", "86400001", "1.5", "", "9" * 30, "1e3", "\xb2"])
def test_bounds_of_the_headers(single: Server, value: str) -> None:
    for header in ("X-Request-Timeout-Ms", "X-TTFT-Timeout-Ms"):
        answer = single.http.post(
            COMPLETIONS, json={"prompt": [5]}, headers=[(header.encode(), value.encode("latin-1"))]
        )
        assert answer.status_code == 400 and answer.json()["error"]["param"] == header


def test_two_places_that_say_different_things(single: Server) -> None:
    answer = single.http.post(
        COMPLETIONS, json={"prompt": [5], "timeout_ms": 5000}, headers={"X-Request-Timeout-Ms": "6000"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "conflict"
    headers = [("X-Request-Timeout-Ms", "5000"), ("X-Request-Timeout-Ms", "5000")]
    answer = single.http.post(COMPLETIONS, json={"prompt": [5]}, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "conflict"


def test_priority_reaches_the_scheduler(busy: Server) -> None:
    """Two calls wait, and the later one with the lower number is computed first."""
    busy.script.step_s = 0.001
    seen = tokens_seen(busy)
    later = send_raw(busy, COMPLETIONS, {"prompt": [701, 701], "max_tokens": 2, "priority": 5})
    busy.eventually(lambda: busy.metric("potok_requests_waiting") == 1)
    first = send_raw(busy, COMPLETIONS, {"prompt": [702, 702], "max_tokens": 2, "priority": -(2**31)})
    assert read_until(later, 1, b"finish_reason").startswith(b"HTTP/1.1 200")
    assert read_until(first, 1, b"finish_reason").startswith(b"HTTP/1.1 200")
    assert seen.index(702) < seen.index(701)
    for connection in (later, first):
        connection.close()


def test_a_priority_without_effect_is_refused(server: Server) -> None:
    answer = server.http.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1, "priority": 1})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "priority" and "fcfs" in error["message"]
    assert server.http.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1, "priority": 0}).status_code == 200
    assert server.http.post(COMPLETIONS, json={"prompt": [5], "priority": 2**31}).json()["error"]["code"] == (
        "out_of_range"
    )
