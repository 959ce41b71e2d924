"""What good requests are answered with: scripted tokens in, OpenAI's JSON and events out."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from server_kit import END, Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
A_TO_K = [49, 50, 6998, 9434, 55, 56, 57, 58, 59]  # A B CD EF G H I J K


def chat_prompt(server: Server, messages: Any = HI) -> list[int]:
    ids: list[int] = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    return ids


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Of the prompt, of the answer, in all."""
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def whole(server: Server, prompt: list[int], **body: Any) -> Any:
    response = server.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(server: Server, prompt: list[int], **body: Any) -> list[Any]:
    """The choices of a stream's chunks; each chunk has one."""
    events = server.events(COMPLETIONS, {"prompt": prompt, "max_tokens": 100, **body})
    assert events.pop() == "[DONE]"
    return [choice for event in events for choice in event["choices"]]


# -- characters ----

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"


@pytest.mark.parametrize(
    ("ids", "text", "deltas"),
    [
        ([10813, 230, 131], "\U0001f336", ["\U0001f336"]),
        ([23274, 115, 40993, 179, 120, 248], None, None),
        ([85, 151, 219], "e\u0301", None),
        ([10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117], FAMILY, None),
        ([115], "\ufffd", ["\ufffd"]),
        ([10813, 230, 455], "\ufffdred", None),
    ],
)
def test_split_characters(server: Server, ids: list[int], text: str | None, deltas: list[str] | None) -> None:
    prompt = server.says([11, 12, 13], ids)
    answer = whole(server, prompt)
    choices = streamed(server, prompt)
    pieces = [choice["text"] for choice in choices if choice["text"]]
    assert "".join(pieces) == answer["text"]
    assert text is None or answer["text"] == text
    assert deltas is None or pieces == deltas
    expected = b"".join(server.text.tokenizer.token_bytes(id) for id in ids).decode(errors="replace")
    assert answer["text"] == expected
    for piece in pieces:  # no character was cut: the parts are whole by themselves
        piece.encode()
    assert answer["finish_reason"] == choices[-1]["finish_reason"] == "stop"


def test_a_character_cut_by_the_limit_is_one_replacement(server: Server) -> None:
    prompt = server.says([11, 12, 13], [10813, 230, 131])
    assert whole(server, prompt, max_tokens=2)["text"] == "\ufffd"
    assert "".join(choice["text"] for choice in streamed(server, prompt, max_tokens=2)) == "\ufffd"


def test_log_probabilities_carry_raw_bytes(server: Server) -> None:
    prompt = chat_prompt(server)
    server.says(prompt, [10813, 230, 131])
    answer = server.openai.chat.completions.create(model="smol", messages=HI, logprobs=True)
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [entry.bytes for entry in content][:3] == [[240, 159], [140], [182]]  # type: ignore[union-attr]
    assert b"".join(bytes(entry.bytes or []) for entry in content[:3]).decode() == "\U0001f336"  # type: ignore


# -- stop strings ----


def test_a_stop_string_over_many_tokens(server: Server) -> None:
    prompt = server.says([21, 22], A_TO_K)
    response = server.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 100, "stop": "DEFGHIJ"}).json()
    assert response["choices"][0]["text"] == "ABC"
    assert response["choices"][0]["finish_reason"] == "stop"
    assert response["choices"][0]["stop_reason"] == "DEFGHIJ"
    assert response["usage"]["completion_tokens"] == 8
    choices = streamed(server, prompt, stop="DEFGHIJ")
    assert "".join(choice["text"] for choice in choices) == "ABC"
    assert choices[-1]["stop_reason"] == "DEFGHIJ"


def test_text_held_back_is_released_when_it_was_no_stop(server: Server) -> None:
    prompt = server.says([21, 23], [49, 50, 6998, 9434, 55, 72, 59])
    texts = [choice["text"] for choice in streamed(server, prompt, stop="DEFGHIJ")]
    assert "".join(texts) == "ABCDEFGXK"
    assert "DEFGX" in texts[3]
    assert whole(server, prompt, stop="DEFGHIJ")["text"] == "ABCDEFGXK"


def test_the_first_of_two_stops_wins_and_may_be_shown(server: Server) -> None:
    prompt = server.says([21, 22], A_TO_K)
    assert whole(server, prompt, stop=["CD", "DEFG"])["text"] == "AB"
    assert whole(server, prompt, stop="DEFGHIJ", include_stop_str_in_output=True)["text"] == "ABCDEFGHIJ"


def test_an_open_stop_string_at_the_limit(server: Server) -> None:
    prompt = server.says([21, 22], A_TO_K)
    choices = streamed(server, prompt, stop="KZ", max_tokens=9)
    assert "".join(choice["text"] for choice in choices) == "ABCDEFGHIJK"
    assert choices[-1]["finish_reason"] == "length"
    assert all(choice["text"] for choice in choices[:-1]), "a chunk that says nothing"


def test_a_stop_string_in_the_prompt_has_no_effect(server: Server) -> None:
    prompt = server.says(server.text.tokenizer.encode("ABCD"), A_TO_K)
    assert whole(server, prompt, stop="ABCDX")["text"] == "ABCDEFGHIJK"


# -- ends ----


def test_both_end_ids_stop_and_stay_out_of_the_text(server: Server) -> None:
    assert whole(server, server.says([31], [49, END, 50]))["text"] == "A"
    assert whole(server, server.says([32], [49, 0, 50]))["text"] == "A"
    assert whole(server, [31], ignore_eos=True, max_tokens=3)["finish_reason"] == "length"
    assert whole(server, [31], ignore_eos=True, max_tokens=3)["text"] == "AB"
    answer = whole(server, server.says([33], [END]), min_tokens=5, return_token_ids=True)
    assert answer["finish_reason"] == "stop" and answer["token_ids"] == [END + 1] * 5 + [END]
    assert whole(server, server.says([34], [49, 50, 55]), stop_token_ids=[50])["stop_reason"] == 50


def test_begin_id_as_the_file_says(server: Server) -> None:
    tokens = server.http.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]
    assert tokens == [19556]
    usage = server.http.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 1}).json()["usage"]
    assert counts(usage) == (1, 1, 2)


def test_defaults_of_length(server: Server) -> None:
    body = {"prompt": [41], "ignore_eos": True}
    assert server.http.post(COMPLETIONS, json=body).json()["usage"]["completion_tokens"] == 16
    usage = server.http.post(CHAT, json={"messages": HI, "ignore_eos": True}).json()["usage"]
    assert usage["total_tokens"] == 512
    assert server.http.post(COMPLETIONS, json={"prompt": [41], "max_tokens": 0}).json()["choices"][0] == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip


def test_the_context_ends_a_chat_by_the_same_rule(server: Server) -> None:
    def ask(count: int, **body: Any) -> Any:
        messages = [{"role": "user", "content": "a" + " a" * (count - len(chat_prompt(server, A)))}]
        assert len(chat_prompt(server, messages)) == count
        return server.http.post(CHAT, json={"messages": messages, "ignore_eos": True, **body})

    A = [{"role": "user", "content": "a"}]
    for count, limit, given in ((511, {"max_tokens": 1}, 1), (502, {}, 10), (502, {"max_completion_tokens": 50}, 10)):
        response = ask(count, **limit).json()
        assert counts(response["usage"]) == (count, given, count + given)
        assert response["choices"][0]["finish_reason"] == "length"
    for count in (512, 513):
        response = ask(count, max_tokens=1)
        assert response.status_code == 400
        assert f"messages has {count} tokens" in response.text and "512" in response.text


def test_the_context_ends_an_answer(server: Server) -> None:
    for count, limit, given in ((511, {"max_tokens": 1}, 1), (502, {"max_tokens": 50}, 10), (502, {}, 10)):
        body = {"prompt": [5] * count, "ignore_eos": True, **limit}
        response = server.http.post(COMPLETIONS, json=body).json()
        assert counts(response["usage"]) == (count, given, count + given)
        assert response["choices"][0]["finish_reason"] == "length"


# -- streams ----


def test_chunk_order_with_usage(server: Server) -> None:
    server.says(chat_prompt(server), A_TO_K)
    events = server.events(CHAT, {"messages": HI, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(A_TO_K) + 1
    assert all(event["usage"] is None for event in events)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert all(delta.keys() == {"content"} and delta["content"] for delta in deltas[1:-1])
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "ABCDEFGHIJK"
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in [*events, last]}) == 1
    assert counts(server.http.post(CHAT, json={"messages": HI}).json()["usage"]) == counts(last["usage"])


def test_no_usage_chunk_unless_asked(server: Server) -> None:
    for options in (None, {}, {"include_usage": False}):
        events = server.events(COMPLETIONS, {"prompt": [42], "max_tokens": 2, "stream_options": options})
        assert all("usage" not in event and event["choices"] for event in events[:-1])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_several_choices(server: Server, path: str) -> None:
    start: dict[str, Any] = {"prompt": [51, 52]} if path == COMPLETIONS else {"messages": HI}
    body = {**start, "n": 3, "max_tokens": 4, "stream_options": {"include_usage": True}}
    events = server.events(path, body)[:-1]
    usage = events.pop()["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens"] == (2 if path == COMPLETIONS else len(chat_prompt(server)))
    ends = [c["index"] for e in events for c in e["choices"] if c["finish_reason"] is not None]
    assert sorted(ends) == [0, 1, 2]
    roles = [c["index"] for e in events for c in e["choices"] if "role" in c.get("delta", {})]
    assert roles == ([] if path == COMPLETIONS else [0, 1, 2])
    complete = server.http.post(path, json={**start, "n": 3, "max_tokens": 4}).json()
    assert [choice["index"] for choice in complete["choices"]] == [0, 1, 2]
    assert counts(complete["usage"]) == counts(usage)
    for choice in complete["choices"]:
        mine = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        parts = [c.get("text") or c.get("delta", {}).get("content") or "" for c in mine]
        assert "".join(parts) == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])


def test_several_prompts(server: Server) -> None:
    server.says([61], [49])
    server.says([62, 63], [50, 50])
    body = {"prompt": [[61], [62, 63]], "n": 2, "return_token_ids": True}
    response = server.http.post(COMPLETIONS, json=body).json()
    assert [(c["index"], c["text"]) for c in response["choices"]] == [(0, "A"), (1, "A"), (2, "BB"), (3, "BB")]
    assert [c["prompt_token_ids"] for c in response["choices"]] == [[61], [61], [62, 63], [62, 63]]
    assert counts(response["usage"]) == (3, 10, 13)
    events = server.events(COMPLETIONS, body)
    assert events.pop() == "[DONE]"
    texts = dict.fromkeys(range(4), "")
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "A", 1: "A", 2: "BB", 3: "BB"}
    words = server.http.post(COMPLETIONS, json={"prompt": ["Hello", "Hello world"], "max_tokens": 1}).json()
    assert words["usage"]["prompt_tokens"] == 3 and len(words["choices"]) == 2


def test_token_ids_in_both_dialects(server: Server) -> None:
    prompt = chat_prompt(server)
    for p in (prompt, [71]):
        server.says(p, [10813, 230, 131, 49])
    ids = [10813, 230, 131, 49, END]
    answer = server.http.post(CHAT, json={"messages": HI, "return_token_ids": True}).json()
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (prompt, ids)
    assert whole(server, [71], return_token_ids=True)["token_ids"] == ids
    events = server.events(CHAT, {"messages": HI, "return_token_ids": True})[:-1]
    assert [event.get("prompt_token_ids") for event in events] == [prompt] + [None] * (len(events) - 1)
    chunks = streamed(server, [71], return_token_ids=True)
    for choices in ([e["choices"][0] for e in events], chunks):
        assert [id for choice in choices for id in choice.get("token_ids", [])] == ids
    assert [choice.get("prompt_token_ids") for choice in chunks] == [[71]] + [None] * (len(chunks) - 1)


# -- log-probabilities ----


@pytest.mark.parametrize("top", [0, 1, 20])
def test_chat_logprobs(server: Server, top: int) -> None:
    server.says(chat_prompt(server), A_TO_K)
    answer = server.http.post(CHAT, json={"messages": HI, "logprobs": True, "top_logprobs": top}).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["A", "B", "CD", "EF", "G", "H", "I", "J", "K", "<|im_end|>"]
    for entry in content:
        assert entry["bytes"] == list(entry["token"].encode())
        assert len(entry["top_logprobs"]) == top
        values = [t["logprob"] for t in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert all(t.keys() == {"token", "logprob", "bytes"} for t in entry["top_logprobs"])
    events = server.events(CHAT, {"messages": HI, "logprobs": True, "top_logprobs": top})
    parts = [e["choices"][0]["logprobs"] for e in events[:-1]]
    assert [entry for part in parts if part for entry in part["content"]] == content


@pytest.mark.parametrize("top", [0, 2])
def test_completion_logprobs(server: Server, top: int) -> None:
    prompt = server.says([81], [10813, 230, 131, 49, 455, 50])
    answer = whole(server, prompt, logprobs=top)
    logprobs = answer["logprobs"]
    assert answer["text"] == "\U0001f336AredB"
    assert logprobs["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x8c", "bytes:\\xb6", "A", "red", "B", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 0, 0, 1, 2, 5, 6]
    assert logprobs["token_logprobs"] == [-0.5] * 7
    assert all(len(tops) == max(top, 1) for tops in logprobs["top_logprobs"])
    chunks = [choice["logprobs"] for choice in streamed(server, prompt, logprobs=top)]
    for name, values in logprobs.items():
        assert [value for chunk in chunks if chunk for value in chunk[name]] == values


def test_every_event_is_strict_json(server: Server) -> None:
    def fail(constant: str) -> None:
        raise AssertionError(constant)

    body = {"messages": HI, "logprobs": True, "top_logprobs": 20, "max_tokens": 5, "stream": True}
    with server.http.stream("POST", CHAT, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.read().decode().splitlines():
            if line and line != "data: [DONE]":
                json.loads(line.removeprefix("data: "), parse_constant=fail)


# -- the clients ----


def test_openai_client_streams(server: Server) -> None:
    server.says(chat_prompt(server), A_TO_K)
    stream = server.openai.chat.completions.create(
        model="smol", messages=HI, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 5}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "ABCDEFGHIJK"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens > 0
    text = server.openai.completions.create(model="smol", prompt=server.says([91], A_TO_K), stream=True, logprobs=1)
    assert "".join(c.choices[0].text for c in text) == "ABCDEFGHIJK"


def test_openai_client_reads_our_errors(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(model="smol", messages=HI, temperature=3)
    assert caught.value.param == "temperature" and "2" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("other")


def test_models(server: Server) -> None:
    models = server.openai.models.list().data
    assert [model.id for model in models] == ["smol"]
    assert server.openai.models.retrieve("smol").model_dump()["max_model_len"] == 512


def test_messages_as_clients_send_them_back(server: Server) -> None:
    """The answer's own message, nulls and all, and text in parts."""
    answer = server.openai.chat.completions.create(model="smol", messages=HI, max_tokens=2)
    again = [
        *HI,
        answer.choices[0].message.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": "so?"}]},
    ]
    response = server.http.post(CHAT, json={"messages": again, "max_tokens": 1})
    assert response.status_code == 200, response.text
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert chat_prompt(server, parts) == chat_prompt(server)
    developer = [{"role": "developer", "content": "Be brief."}, *HI]
    assert chat_prompt(server, developer) == chat_prompt(server, [{"role": "system", "content": "Be brief."}, *HI])


# -- tokens, ids, versions ----


def test_tokenize_and_detokenize(server: Server) -> None:
    answer = server.http.post("/tokenize", json={"prompt": "Hello world", "return_token_strs": True}).json()
    assert answer == {"count": 2, "max_model_len": 512, "tokens": [19556, 905], "token_strs": ["Hello", " world"]}
    assert server.http.post("/detokenize", json={"tokens": [19556, 905]}).json() == {"prompt": "Hello world"}
    for prompt, tokens in (
        ("", []),
        ("1234567", [33, 34, 35, 36, 37, 38, 39]),
        ("  two  spaces", [216, 827, 216, 5600]),
        ("I'll don't", [57, 3060, 1326, 982]),
        ("a\tb", [81, 197, 82]),
        ("e\u0301", [85, 151, 219]),
        ("\U0001f336", [10813, 230, 131]),
        ("\ufeffHi", [186, 136, 140, 26843]),
    ):
        assert server.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"] == tokens
        assert server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == prompt
    chat = server.http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False, "model": "smol"}).json()
    assert chat["token_strs"] is None and chat["count"] < len(chat_prompt(server))
    assert "<|im_start|>" in server.http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens"),
    ):
        response = server.http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), (path, body)


def test_request_ids_are_echoed_and_nothing_else(server: Server) -> None:
    for path, status in (("/health", 200), ("/nothing", 404)):
        response = server.http.get(path, headers={"X-Request-Id": "mine-1"})
        assert (response.status_code, response.headers["x-request-id"]) == (status, "mine-1")
    two = [server.http.get("/health").headers["x-request-id"] for _ in range(2)]
    assert two[0] != two[1] and all(len(name) == 32 for name in two)
    for name in ("x" * 129, "a b", "a\tb", "\u00e9".encode("latin-1").decode("latin-1")):
        raw = server.http.get("/health", headers=httpx.Headers({"X-Request-Id": name}, encoding="latin-1"))
        assert raw.headers["x-request-id"] != name
    body = {"prompt": [1], "max_tokens": 1}
    same = [server.http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "twin"}) for _ in range(2)]
    assert same[0].json()["id"] != same[1].json()["id"]


def test_versions_and_pings(server: Server) -> None:
    assert server.http.get("/version").json()["version"]
    for method, path in (("GET", "/ping"), ("POST", "/ping"), ("GET", "/health"), ("GET", "/health/live")):
        response = server.http.request(method, path)
        assert (response.status_code, response.content) == (200, b"")


def test_the_page_of_the_routes_knows_the_bounds(server: Server) -> None:
    schema = server.http.get("/openapi.json").json()["paths"][CHAT]["post"]["requestBody"]
    properties = schema["content"]["application/json"]["schema"]["properties"]
    assert properties["temperature"] == {"type": "number", "minimum": 0.0, "maximum": 2.0, "default": 1.0}
    assert "tools" not in properties
