"""Seeded answers over HTTP: the same on repeat, among neighbours, streamed and not; their choices differ."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from case_kit import Served

SEEDED = {
    "prompt": [504, 2365, 6354, 16438, 905],
    "max_tokens": 24,
    "temperature": 1,
    "seed": 7,
    "ignore_eos": True,
    "return_token_ids": True,
}


def choices(answer: Any) -> list[tuple[str, list[int]]]:
    return [(c["text"], c["token_ids"]) for c in sorted(answer["choices"], key=lambda c: c["index"])]


def ask(server: Served, **changes: Any) -> list[tuple[str, list[int]]]:
    return choices(server.http.post("/v1/completions", json=SEEDED | changes).raise_for_status().json())


def stream(server: Served) -> tuple[str, list[int]]:
    text, ids = "", []
    with server.http.stream("POST", "/v1/completions", json=SEEDED | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                ids += choice["token_ids"]
    return text, ids


def test_on_repeat_and_streamed(real_server: Served) -> None:
    [once] = ask(real_server)
    assert len(once[1]) == 24 and once[0]
    assert ask(real_server) == [once]
    assert stream(real_server) == once
    assert ask(real_server, seed=8) != [once]


def test_among_seven_neighbours_and_a_twin(real_server: Served) -> None:
    alone = ask(real_server)

    async def main() -> list[Any]:
        async with httpx.AsyncClient(base_url=real_server.url, timeout=60) as client:
            other = [SEEDED | {"prompt": [504 + i] * (5 + 20 * i)} for i in range(7)]
            bodies = [SEEDED, *other, SEEDED]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.raise_for_status().json() for answer in answers]

    first, *_, last = asyncio.run(main())
    assert choices(first) == choices(last) == alone


def test_choices_differ_and_the_pair_repeats(real_server: Served) -> None:
    pair = ask(real_server, n=2)
    assert pair[0] != pair[1] and ask(real_server, n=2) == pair
    assert pair[:1] == ask(real_server), "the first of two is the one alone"


def test_without_a_seed_two_answers_differ(real_server: Served) -> None:
    assert ask(real_server, seed=None) != ask(real_server, seed=None)
