"""What the first screen of the README promises: the official client, unchanged, and the right answer."""

from __future__ import annotations

import openai
from case_kit import Served

ANSWER = "The capital of Japan is Tokyo."


def test_the_capital_of_japan(real_server: Served) -> None:
    client = openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0)
    with client:
        messages = [{"role": "user", "content": "What is the capital of Japan?"}]
        whole = client.chat.completions.create(model="smol", messages=messages, temperature=0)  # type: ignore
        assert whole.choices[0].message.content == ANSWER
        assert whole.choices[0].finish_reason == "stop"
        stream = client.chat.completions.create(model="smol", messages=messages, temperature=0, stream=True)  # type: ignore
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER  # type: ignore
