"""What a caller is told about its prompt: cached tokens, log-probabilities, echo. The numbers are the script's."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server_kit import END, Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
A, B, CD, EF = 49, 50, 6998, 9434


def post(server: Server, body: dict[str, Any], path: str = COMPLETIONS) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def cached(answer: Any) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


# -- cached tokens ----


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_cached_tokens_whole_and_streamed(server: Server, path: str) -> None:
    words = f"{path} " + "flow " * 100
    start: dict[str, Any] = (
        {"prompt": words} if path == COMPLETIONS else {"messages": [{"role": "user", "content": words}]}
    )
    body = {**start, "max_tokens": 4, "ignore_eos": True}
    first, second = post(server, body, path), post(server, body, path)
    length = first["usage"]["prompt_tokens"]
    # All whole blocks of 32; the last one's tokens can be had but for one, whose logits are needed.
    assert length - 32 <= cached(second) < length and cached(second) % 32 == 0
    assert cached(first) < cached(second)
    events = server.events(path, {**body, "stream_options": {"include_usage": True}})
    assert events[-2]["usage"] == second["usage"]


def test_cached_tokens_are_told_when_a_stop_string_ended_the_answer(server: Server) -> None:
    prompt = server.says([17] * 70, [A, B, CD])
    body = {"prompt": prompt, "stop": ["B"]}
    first, second = post(server, body), post(server, body)
    assert second["choices"][0]["stop_reason"] == "B"
    assert (cached(first), cached(second)) == (0, 64)


def test_with_n_choices_it_is_what_was_there_before_the_call(server: Server) -> None:
    """The others share what the first computes; that is not counted, and each prompt counts once."""
    body = {"prompt": [[18] * 80, [19] * 80], "n": 3, "max_tokens": 4}
    hits = server.metric("potok_prefix_cache_hits_total")
    first, second = post(server, body), post(server, body)
    assert server.metric("potok_prefix_cache_hits_total") - hits > 2 * 2 * 64
    assert (cached(first), cached(second)) == (0, 2 * 64)
    assert second["usage"]["prompt_tokens"] == 160


def test_a_salt_keeps_others_out(server: Server) -> None:
    body = {"prompt": [20] * 70, "max_tokens": 4}
    post(server, body)
    for salt, expected in (("mine", 0), ("mine", 64), ("yours", 0), (None, 64)):
        assert cached(post(server, {**body, "cache_salt": salt})) == expected, salt
    chat = {"messages": [{"role": "user", "content": "salt " * 50}], "max_tokens": 4}
    post(server, chat, CHAT)
    assert cached(post(server, {**chat, "cache_salt": "mine"}, CHAT)) == 0
    assert cached(post(server, {**chat, "cache_salt": "mine"}, CHAT)) > 0


# -- log-probabilities of prompts ----


def test_prompt_logprobs_as_vllm_has_them(server: Server) -> None:
    body = {"prompt": [A, B, CD], "max_tokens": 1, "prompt_logprobs": 1, "n": 2}
    choices = post(server, body)["choices"]
    assert len(choices) == 2
    for choice in choices:
        first, second, third = choice["prompt_logprobs"]
        assert first is None
        assert second[str(B)] == {"logprob": -0.5, "rank": None, "decoded_token": "B"}
        assert third[str(CD)]["decoded_token"] == "CD"
        # The script would have said 1001 and 1002 there.
        assert (second["1001"]["rank"], third["1002"]["rank"], len(second), len(third)) == (1, 1, 2, 2)
        assert choice["logprobs"] is None
    chat = post(server, {"messages": HI, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}, CHAT)
    ids = chat["prompt_token_ids"]
    assert [None if p is None else [*p] for p in chat["prompt_logprobs"]] == [None, *([str(id)] for id in ids[1:])]
    assert "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in post(server, {"prompt": [A], "max_tokens": 1})["choices"][0]


def test_one_token_has_nothing_to_rate(server: Server) -> None:
    answer = post(server, {"prompt": [A], "max_tokens": 0, "prompt_logprobs": 3})
    assert answer["choices"][0]["prompt_logprobs"] == [None] and answer["usage"]["completion_tokens"] == 0


# -- echo ----


def test_echo(server: Server) -> None:
    server.says([A, B], [CD, EF])
    answer = post(server, {"prompt": [A, B], "echo": True})
    assert answer["choices"][0]["text"] == "ABCDEF" and answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 3  # with the end
    assert post(server, {"prompt": "Hello <|im_end|> there", "echo": True, "max_tokens": 0})["choices"][0] == {
        "index": 0, "text": "Hello <|im_end|> there", "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip


def test_echo_with_logprobs(server: Server) -> None:
    server.says([A, CD], [EF, B])
    [choice] = post(server, {"prompt": [A, CD], "echo": True, "logprobs": 2, "max_tokens": 2})["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "ACDEFB"
    assert logprobs["tokens"] == ["A", "CD", "EF", "B"]
    assert logprobs["text_offset"] == [0, 1, 3, 5]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None and all("CD" in top for top in logprobs["top_logprobs"][1:2])


@pytest.mark.parametrize(("told", "echoed"), [(0, 3), (3, 0), (2, 2)])
def test_echo_and_prompt_logprobs_each_have_their_own_number(server: Server, told: int, echoed: int) -> None:
    """The tokens asked about are far from what the script would say, so each comes beside its alternatives."""
    body = {"prompt": [A, B, CD], "echo": True, "logprobs": echoed, "prompt_logprobs": told, "max_tokens": 0}
    [choice] = post(server, body)["choices"]
    assert [len(position) for position in choice["prompt_logprobs"][1:]] == [told + 1] * 2
    assert [len(position) for position in choice["logprobs"]["top_logprobs"][1:]] == [echoed + 1] * 2


def test_the_prompt_alone(server: Server) -> None:
    """T03: max_tokens 0 with echo and log-probabilities, of several prompts and choices."""
    body = {
        "prompt": [[A, B, CD], [EF]],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 0,
        "return_token_ids": True,
    }
    answer = post(server, body)
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == 4
    for choice, tokens in zip(answer["choices"], (["A", "B", "CD"],) * 2 + (["EF"],) * 2, strict=True):
        assert choice["text"] == "".join(tokens) and choice["finish_reason"] == "length" and choice["token_ids"] == []
        assert choice["logprobs"]["tokens"] == tokens
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(tokens) - 1)
    generated = server.metric("potok_generation_tokens_total")
    assert post(server, {"prompt": [A], "echo": True, "max_tokens": 0})["choices"][0]["text"] == "A"
    assert server.metric("potok_generation_tokens_total") == generated  # nothing to compute, nothing computed


@pytest.mark.parametrize("wishes", [{}, {"logprobs": 1}, {"return_token_ids": True}, {"logprobs": 0, "n": 3}])
def test_a_stream_echoes_the_prompt_first(server: Server, wishes: dict[str, Any]) -> None:
    for prompt in ([A, CD], "na\u00efve <|im_start|>\U0001f336"):
        for max_tokens in (0, 3):
            body = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "ignore_eos": True, **wishes}
            whole = post(server, body)["choices"]
            events = server.events(COMPLETIONS, body)
            assert events.pop() == "[DONE]"
            for expected in whole:
                chunks = [c for e in events for c in e["choices"] if c["index"] == expected["index"]]
                assert chunks[0]["text"] == expected["text"][: len(chunks[0]["text"])] != ""
                assert max_tokens == 0 or len(chunks) > 2
                assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
                assert chunks[-1]["finish_reason"] == expected["finish_reason"]
                if "logprobs" in wishes:
                    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                        parts = [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][name]]
                        assert parts == expected["logprobs"][name], name
                if "return_token_ids" in wishes:
                    assert chunks[0]["prompt_token_ids"] == expected["prompt_token_ids"]
                    assert [id for chunk in chunks for id in chunk["token_ids"]] == expected["token_ids"]


def test_offsets_are_places_in_the_text(server: Server) -> None:
    prompt = "na\u00efve \u4e16\u754c <|im_end|>\n\U0001f336\u200d e\u0301 twice twice"
    [choice] = post(server, {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 5, "ignore_eos": True})[
        "choices"
    ]
    assert choice["text"].startswith(prompt)
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token), (token, offset)


def test_stop_strings_are_not_looked_for_in_the_prompt(server: Server) -> None:
    server.says([A, B, EF], [CD, A, B])
    [choice] = post(server, {"prompt": [A, B, EF], "echo": True, "stop": ["AB"]})["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("ABEFCD", "AB")


def test_the_official_client_reads_it(server: Server) -> None:
    server.says([A, B], [CD, END])
    whole = server.openai.completions.create(model="smol", prompt=[A, B], echo=True, logprobs=1, max_tokens=2)
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.tokens == ["A", "B", "CD", "<|im_end|>"]
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = server.openai.completions.create(model="smol", prompt=[A, B], echo=True, max_tokens=2, stream=True)
    assert [chunk.choices[0].text for chunk in stream][:2] == ["AB", "CD"]
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        server.openai.completions.create(model="smol", prompt=[A], extra_body={"cache_salt": ""})
