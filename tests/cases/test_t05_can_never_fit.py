"""Requests that are too large for the KV memory: refused at once or cut at the limit, and nobody waits behind them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from case_kit import Served

B = {"prompt": [504 + i for i in range(20)], "max_tokens": 5, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def tiny_pool() -> Iterator[Served]:
    server = Served("--block-size", "16", "--kv-cache-tokens", "512")
    yield server
    server.close()


def test_the_context_is_lowered_and_said(tiny_pool: Served) -> None:
    said = "".join(tiny_pool.said)
    assert "512 tokens: as asked" in said
    assert "max_model_len 512: all that the KV memory holds; the model's context is 8192" in said


def test_too_long_a_prompt_is_refused_at_once_and_the_next_is_served(tiny_pool: Served) -> None:
    alone = tiny_pool.ask({**B, "cache_salt": "alone"})
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(tiny_pool.http.post, "/v1/completions", json={"prompt": [700] * 700, "max_tokens": 5})
        time.sleep(0.01)
        served = pool.submit(tiny_pool.ask, B)
        assert refused.result().status_code == 400
        assert served.result() == alone
    error = refused.result().json()["error"]
    assert "700 tokens" in error["message"] and "512" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_too_long_an_answer_ends_at_the_limit(tiny_pool: Served) -> None:
    answer = tiny_pool.answer({"prompt": [700] * 400, "max_tokens": 400, "ignore_eos": True})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512
    tiny_pool.eventually(tiny_pool.empty, 5.0)
