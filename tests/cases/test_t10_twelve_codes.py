"""Twelve chats at once over HTTP are each answered as if alone: same ids, same text, same log-probabilities."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
from case_kit import Served

CODES = [100003 + 70001 * i for i in range(12)]
#: Words of padding, so that prompts have about 60 to 310 tokens with the template's own: up to many chunks.
PADDING = (0, 25, 90, 250)
ABORTED_OF_TWELVE = 3


def body(desk: int) -> dict[str, Any]:
    asked = f"Desk {desk} has code {CODES[desk]}. Repeat the code." + " please" * PADDING[desk % 4]
    return {
        "messages": [{"role": "user", "content": asked}],
        "max_tokens": 10,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 4,
        "return_token_ids": True,
    }


async def ask(client: httpx.AsyncClient, desk: int, after_s: float = 0.0) -> Any:
    await asyncio.sleep(after_s)
    response = await client.post("/v1/chat/completions", json=body(desk))
    answer = response.raise_for_status().json()
    del answer["usage"]["prompt_tokens_details"]  # what was cached is the one thing that others may change
    return answer["prompt_token_ids"], answer["choices"], answer["usage"]


async def ask_all(client: httpx.AsyncClient, leaving: dict[int, float]) -> dict[int, Any]:
    """Answers by desk, of those that stay. leaving: desk -> seconds until it closes its connection."""

    async def one(desk: int) -> Any:
        try:
            return await asyncio.wait_for(ask(client, desk, 0.03 * desk), leaving.get(desk))
        except TimeoutError:
            return None

    answers = await asyncio.gather(*(one(desk) for desk in range(12)))
    return {desk: answer for desk, answer in enumerate(answers) if desk not in leaving}


@pytest.fixture(scope="module")
def alone(shared_real_server: Served) -> dict[int, Any]:
    async def main() -> dict[int, Any]:
        async with httpx.AsyncClient(base_url=shared_real_server.url, timeout=60) as client:
            return {desk: await ask(client, desk) for desk in range(12)}

    return asyncio.run(main())


@pytest.mark.parametrize("seed", [None, 1])
def test_everybody_gets_their_own_answer(real_server: Served, alone: dict[int, Any], seed: int | None) -> None:
    """With a seed, three of the twelve leave at some moment: in the queue, in their prompt, in their answer."""
    rng = random.Random(seed)
    leaving = {} if seed is None else {d: rng.uniform(0.05, 2.0) for d in rng.sample(range(12), ABORTED_OF_TWELVE)}

    async def main() -> dict[int, Any]:
        async with httpx.AsyncClient(base_url=real_server.url, timeout=60) as client:
            return await ask_all(client, leaving)

    answers = asyncio.run(main())
    assert len(answers) == 12 - len(leaving)
    for desk, answer in answers.items():
        assert answer == alone[desk], desk
        [choice] = answer[1]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) > 0
        others = [code for i, code in enumerate(CODES) if i != desk]
        assert not any(str(code) in choice["message"]["content"] for code in others)


def test_the_prompts_are_of_mixed_lengths(alone: dict[int, Any]) -> None:
    lengths = [usage["prompt_tokens"] for _, _, usage in alone.values()]
    assert min(lengths) < 70 and max(lengths) > 250 and len({tuple(ids) for ids, _, _ in alone.values()}) == 12
