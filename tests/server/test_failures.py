"""When the engine fails: one row, and all of it."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import openai
import pytest
from server_kit import Script, Server, read_until, send_raw, serving

from potok.frontend import INLINE_CHARS, TextModel
from potok.text.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"


def test_a_row_that_fails_in_mid_stream(server: Server) -> None:
    """Its stream ends with an error and without a finish; its neighbour does not notice."""
    server.script.step_s = 0.005
    server.script.failing[(6, 6, 6)] = 5
    bystander = send_raw(server, COMPLETIONS, {"prompt": [5, 5], "max_tokens": 40, "stream": True})
    failed = server.metric("potok_requests_failed_total")
    events = server.events(COMPLETIONS, {"prompt": [6, 6, 6], "max_tokens": 50})
    assert events[-1]["error"]["type"] == "server_error"
    assert len(events) == 6 and all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
    with pytest.raises(openai.APIError):
        list(server.openai.completions.create(model="smol", prompt=[6, 6, 6], max_tokens=50, stream=True))
    response = server.http.post(COMPLETIONS, json={"prompt": [6, 6, 6], "max_tokens": 50})
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
    assert server.metric("potok_requests_failed_total") == failed + 3
    raw = read_until(bystander, 1, b"[DONE]")
    assert b'"finish_reason":"length"' in raw and b"error" not in raw
    bystander.close()


def test_a_failure_among_several_prompts(server: Server) -> None:
    server.script.failing[(6, 6, 6)] = 3
    body: dict[str, Any] = {"prompt": [[5], [6, 6, 6], [5, 5]], "max_tokens": 300}
    assert server.http.post(COMPLETIONS, json=body).status_code == 500
    assert "error" in server.events(COMPLETIONS, body)[-1]


def test_a_failure_on_the_first_token_is_a_status(server: Server) -> None:
    server.script.failing[(6, 6, 6)] = 0
    response = server.http.post(COMPLETIONS, json={"prompt": [6, 6, 6], "stream": True})
    assert response.status_code == 500 and "error" in response.json()


def test_a_prompt_that_never_fits_is_refused_in_the_stream_too(text_model: TextModel) -> None:
    with serving(text_model, Script(), num_blocks=4, max_model_len=0) as server:
        limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
        for stream in (True, False):
            response = server.http.post(COMPLETIONS, json={"prompt": [5] * limit, "stream": stream})
            assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
        assert server.http.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 2}).status_code == 200


def test_the_death_of_the_engine_ends_everything(text_model: TextModel) -> None:
    script = Script()
    with serving(text_model, script) as server:
        script.step_s = 0.01
        stream = send_raw(server, COMPLETIONS, {"prompt": [5], "max_tokens": 400, "stream": True})
        read_until(stream, 3, b"data: ")
        answer: list[Any] = []
        body = {"prompt": [6], "max_tokens": 400}
        whole = threading.Thread(target=lambda: answer.append(server.http.post(COMPLETIONS, json=body)))
        whole.start()
        server.eventually(lambda: server.metric("potok_requests_running") == 2)
        script.raising = ZeroDivisionError("scripted")
        rest = read_until(stream, 1, b"0\r\n\r\n")
        assert b'"error"' in rest and b"[DONE]" not in rest
        whole.join(20)
        assert answer[0].status_code == 500
        assert server.http.get("/health/live").status_code == 503
        assert server.http.get("/health/ready").status_code == 503
        assert server.http.get("/health").status_code == 503
        late = server.http.post(COMPLETIONS, json=body)
        assert late.status_code == 503 and "Retry-After" in late.headers
        assert server.metric("potok_requests_failed_total") == 2
        stream.close()


def test_an_engine_that_hangs_is_not_live(text_model: TextModel) -> None:
    script = Script()
    with serving(text_model, script) as server:
        server.service._heartbeat_s = 0.3
        server.eventually(lambda: server.service.engine.heartbeat_age() < 0.1)
        assert server.http.get("/health/live").status_code == 200
        script.gate.clear()
        connection = send_raw(server, COMPLETIONS, {"prompt": [5], "max_tokens": 4})
        server.eventually(lambda: server.http.get("/health/live").status_code == 503)
        script.gate.set()
        server.eventually(lambda: server.http.get("/health/live").status_code == 200)
        read_until(connection, 1, b"finish_reason")
        connection.close()


def test_health_answers_while_a_long_prompt_is_tokenised(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, entered, gate = Tokenizer.encode, threading.Event(), threading.Event()

    def held(self: Tokenizer, text: str, field: str = "prompt") -> list[int]:
        entered.set()
        assert gate.wait(30)
        return encode(self, text, field)

    monkeypatch.setattr(Tokenizer, "encode", held)
    answers: list[httpx.Response] = []
    body = {"prompt": "na\u00efve caf\u00e9 12345 " * (INLINE_CHARS // 16)}  # longer than what the event loop does
    thread = threading.Thread(target=lambda: answers.append(server.http.post(COMPLETIONS, json=body)))
    thread.start()
    assert entered.wait(30)
    assert server.http.get("/health/live").status_code == 200 and not answers
    gate.set()
    thread.join()
    assert answers[0].status_code == 400  # more tokens than the context has
