"""`potok chat`: what is sent, what is shown, and what an error does to the dialogue."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from potok.cli.chat import Dialogue, talk
from potok.cli.remote_chat import RemoteModel
from potok.errors import ClientError, PotokError, ServerError
from potok.params import SamplingParams

PARAMS = SamplingParams(temperature=0.5, seed=3, max_tokens=9)


class Parrot:
    """A model that says what it was told to say, in the given parts; an exception among them is raised there."""

    name = "parrot"

    def __init__(self, *answers: list[str | BaseException]) -> None:
        self._answers = list(answers)
        self.heard: list[list[dict[str, Any]]] = []

    def answer(self, messages: list[dict[str, Any]], params: SamplingParams, show: Callable[[str], None]) -> int:
        self.heard.append([dict(message) for message in messages])
        parts = self._answers.pop(0)
        for part in parts:
            if isinstance(part, BaseException):
                raise part
            show(part)
        return len(parts)

    def close(self) -> None:
        """Nothing to close."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def converse(model: Parrot, *lines: str, system: str | None = None) -> tuple[str, str]:
    """What stood on stdout and on stderr after these lines and the end of the input."""
    out, notes = io.StringIO(), io.StringIO()
    left = list(lines)

    def read() -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    talk(Dialogue(model, PARAMS, system, out, notes), read)
    return out.getvalue(), notes.getvalue()


def test_a_dialogue_grows() -> None:
    model = Parrot(["Hel", "lo."], ["Fine."])
    out, notes = converse(model, "Hi", "  ", "How are you?", system="Be brief.")
    assert out == "Hello.\nFine.\n"
    system = {"role": "system", "content": "Be brief."}
    assert model.heard == [
        [system, user("Hi")],
        [system, user("Hi"), assistant("Hello."), user("How are you?")],
    ]
    first, second = notes.splitlines()
    assert first.startswith("[2 tokens, ") and "tok/s" in first
    assert second.startswith("[1 tokens, 0.0 tok/s")


def test_clear_and_exit() -> None:
    model = Parrot(["one"], ["two"], ["never"])
    converse(model, "first", "/clear", "second", "/exit", "third")
    assert model.heard == [[user("first")], [user("second")]]


def test_an_unknown_command_is_not_sent() -> None:
    model = Parrot()
    _, notes = converse(model, "/quit")
    assert model.heard == []
    assert "/exit" in notes


def test_a_refused_question_is_forgotten() -> None:
    model = Parrot([ClientError("messages has 9000 tokens.")], ["yes"])
    out, notes = converse(model, "too long", "ok?")
    assert model.heard[1] == [user("ok?")]
    assert "messages has 9000 tokens." in notes
    assert out == "yes\n"


@pytest.mark.parametrize(("error", "said"), [(KeyboardInterrupt(), "stopped"), (ServerError("it broke."), "it broke.")])
def test_half_an_answer_is_kept(error: BaseException, said: str) -> None:
    model = Parrot(["half an", error], ["more"])
    out, notes = converse(model, "Hi", "Go on")
    assert model.heard[1] == [user("Hi"), assistant("half an"), user("Go on")]
    assert out == "half an\nmore\n"
    assert said in notes


def test_the_terminal_is_safe_from_the_model() -> None:
    out, _ = converse(Parrot(["a\x1b[2Jb\x07\x9bc\td\n", "é東🌶"]), "Hi")
    assert out == "a[2Jbc\td\né東🌶\n"


class ScriptedServer(BaseHTTPRequestHandler):
    """Answers from `self.server.script`: path -> (status, content type, body). Remembers what it was sent."""

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        self.server.heard.append((self.path, self.headers.get("Authorization"), body))  # type: ignore[attr-defined]
        status, kind, answer = self.server.script[self.path]  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


Script = dict[str, tuple[int, str, bytes]]
MODELS = (200, "application/json", b'{"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]}')


@contextmanager
def serving(script: Script) -> Iterator[tuple[str, list[tuple[str, str | None, bytes]]]]:
    server = HTTPServer(("127.0.0.1", 0), ScriptedServer)
    server.script = script  # type: ignore[attr-defined]
    server.heard = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.heard  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def events(*messages: Any) -> tuple[int, str, bytes]:
    lines = [": keep-alive\n\n", *(f"data: {json.dumps(message)}\n\n" for message in messages), "data: [DONE]\n\n"]
    return 200, "text/event-stream", "".join(lines).encode()


def delta(text: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {} if text is None else {"content": text}}], "usage": None}


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_remote_answer(suffix: str) -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 7}}
    script = {
        "/v1/models": MODELS,
        "/v1/chat/completions": events(delta(""), delta("To"), delta("kyö"), delta(None), usage),
    }
    with serving(script) as (url, heard):
        model = RemoteModel(url + suffix, "secret")
        shown: list[str] = []
        assert model.answer([user("capital?")], PARAMS, shown.append) == 7
    assert (model.name, shown) == ("tiny", ["To", "kyö"])
    assert [(path, key) for path, key, _ in heard] == [
        ("/v1/models", "Bearer secret"),
        ("/v1/chat/completions", "Bearer secret"),
    ]
    assert json.loads(heard[1][2]) == {
        "model": "tiny",
        "messages": [user("capital?")],
        "temperature": 0.5,
        "top_p": 1.0,
        "seed": 3,
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_tokens_are_counted_by_texts_where_the_server_does_not_say() -> None:
    script = {"/v1/models": MODELS, "/v1/chat/completions": events(delta("a"), delta("b"))}
    with serving(script) as (url, _):
        assert RemoteModel(url, None).answer([user("x")], PARAMS, lambda _: None) == 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((400, "application/json", b'{"error": {"message": "too hot"}}'), "status 400: too hot"),
        ((502, "text/html", b"<h1>bad</h1>"), "status 502: <h1>bad</h1>"),
        (events(delta("a"), {"error": {"message": "row failed"}}), "row failed"),
        (events(delta("a"), ["?"]), "does not speak OpenAI's API"),
        ((200, "text/event-stream", b"data: {{{\n\n"), "does not speak OpenAI's API"),
    ],
)
def test_what_a_remote_server_refuses(answer: tuple[int, str, bytes], says: str) -> None:
    with serving({"/v1/models": MODELS, "/v1/chat/completions": answer}) as (url, _):
        model = RemoteModel(url, None)
        with pytest.raises(PotokError, match=says):
            model.answer([user("x")], PARAMS, lambda _: None)


def test_no_server_and_no_model() -> None:
    for answer in (b'{"data": []}', b"[]", b"<html>"):
        with (
            serving({"/v1/models": (200, "text/html", answer)}) as (url, _),
            pytest.raises(PotokError, match="does not speak OpenAI's API"),
        ):
            RemoteModel(url, None)
    with pytest.raises(ClientError, match="no server answers"):
        RemoteModel(url, None)
