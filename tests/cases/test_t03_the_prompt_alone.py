"""A completion of no tokens with echo: the prompt comes back with its log-probabilities, those of a real model."""

from __future__ import annotations

import pytest
from case_kit import Served

PROMPT = "The capital of Japan is Tokyo. The capital of France is"


def test_the_prompt_alone(real_server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    answer = real_server.answer(body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == PROMPT
    assert len(logprobs["tokens"]) == answer["usage"]["prompt_tokens"] == len(logprobs["token_logprobs"])
    assert logprobs["token_logprobs"][0] is None and all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert real_server.answer(body)["choices"] == answer["choices"]


def test_with_an_answer_the_numbers_are_those_of_its_tokens(real_server: Served) -> None:
    """What was answered, given as a prompt, is rated with the very numbers that it was sampled with."""
    alone = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    answer = real_server.ask(alone)
    echoed = real_server.ask({**alone, "echo": True})
    assert echoed["text"] == PROMPT + answer["text"]
    count = len(answer["logprobs"]["tokens"])
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert echoed["logprobs"][name][-count:] == answer["logprobs"][name], name
    offsets = answer["logprobs"]["text_offset"]
    assert echoed["logprobs"]["text_offset"][-count:] == [len(PROMPT) + offset for offset in offsets]
    rated = real_server.ask({**alone, "prompt": PROMPT + answer["text"], "max_tokens": 0, "echo": True})
    assert rated["logprobs"] == echoed["logprobs"]


def test_max_tokens_0_without_echo(real_server: Served) -> None:
    choice = real_server.ask({"prompt": PROMPT, "max_tokens": 0, "logprobs": 1})
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("", "length", [])


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [1, 49152], [-1], [1, 2.5], [True], None])
def test_degenerate_prompts_are_no_better_with_echo(real_server: Served, prompt: object) -> None:
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    assert real_server.http.post("/v1/completions", json=body).status_code == 400
