"""Bodies that nobody would send, many of them: every answer is 200 or a 4xx in OpenAI's shape, and the engine lives on.

Seeded; a body that fails is printed, and can be sent alone.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from server_kit import Script, parse_events

from potok.backends.modelled.scripted import ScriptedBackend
from potok.config import ServerConfig
from potok.engine.thread import threaded_client
from potok.frontend import FrontEnd, TextModel
from potok.server.app import create_app
from potok.server.dialects.fields import Field
from potok.server.dialects.openai_fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from potok.server.keys import ApiKeys
from potok.server.service import Service

BODIES_PER_ROUTE = 500
CONTEXT = 64
PROBE = {"prompt": [504, 2365, 6354, 16438], "max_tokens": 16, "temperature": 0, "return_token_ids": True}

HI = {"role": "user", "content": "hi"}
TEMPLATES: dict[str, tuple[dict[str, Field], list[dict[str, Any]]]] = {
    "/v1/completions": (COMPLETION, [{"prompt": "hi"}, {"prompt": [1, 2, 3]}, {"prompt": ["a", "b"]}]),
    "/v1/chat/completions": (
        CHAT,
        [{"messages": [HI]}, {"messages": [HI, {"role": "assistant", "content": "ho"}, HI]}],
    ),
    "/tokenize": (TOKENIZE, [{"prompt": "hi"}, {"messages": [HI]}]),
    "/detokenize": (DETOKENIZE, [{"tokens": [1, 2, 3]}]),
}

TEXTS = [
    "", "a", "\x00", "\n", "\u00e9", "\U0001f336", "\ufffe", "\ufdd0\ufdd1", "\u0301", "<|im_end|>", "<|im_start|>",
    "{{ messages }}", "{% raise %}", "user", "assistant", "system", "tool", "text", "smol", "x" * 5000, "\u4e2d" * 300,
    "-1", "1e9", "null", "data: [DONE]\n\n", "\u2028", "..//", "\U00050000", "\x7f\x80",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 3, 7, 20, 21, 63, 64, 65, 128, 129, 49151, 49152, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63,
    2**64, -(2**63), 10**30, 10**400, 10**4299, 0.0, -0.0, 0.5, 1.0, 2.0, 1e-320, 1e-9, 1e308, -1e308, 3.0000000001,
]  # fmt: skip
KEYS = [
    "type", "text", "role", "content", "name", "include_usage", "self", "messages", "strftime_now", "tool_calls",
    "function", "arguments", "5", "-5", "49152", "", "__class__", "prompt", "max_token", "raise_exception", "image_url",
]  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(10 if depth < 4 else 7)
    if kind < 3:
        return rng.choice(TEXTS)
    if kind < 6:
        return rng.choice(NUMBERS)
    if kind == 6:
        return rng.choice([None, True, False])
    if kind == 7:
        return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind == 8:
        return [rng.choice(NUMBERS[:14]) for _ in range(rng.choice([0, 1, 3, 62, 64, 70]))]
    return [value(rng, depth + 1) for _ in range(rng.randrange(4))]


def message(rng: random.Random) -> Any:
    made: dict[str, Any] = {"role": rng.choice(["user", "assistant", "system", "developer", "tool", rng.choice(TEXTS)])}
    made["content"] = rng.choice([rng.choice(TEXTS), [{"type": "text", "text": rng.choice(TEXTS)}], value(rng)])
    if rng.random() < 0.2:
        made[rng.choice(KEYS)] = value(rng)
    return made if rng.random() < 0.9 else value(rng)


def body(rng: random.Random, fields: dict[str, Field], starts: list[dict[str, Any]]) -> dict[str, Any]:
    """A good body with a few fields replaced, added or dropped; most often still short to answer."""
    made = dict(rng.choice(starts))
    if "max_tokens" in fields:
        made |= {"max_tokens": rng.choice([0, 1, 3]), "stream": rng.random() < 0.3}
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        name = rng.choice([*fields, rng.choice(KEYS)])
        made[name] = [message(rng) for _ in range(rng.randrange(4))] if name == "messages" else value(rng)
    if rng.random() < 0.1:
        made.pop(rng.choice(list(made)))
    return made


def mangled(rng: random.Random, good: bytes) -> bytes:
    """A few bytes changed, cut out or doubled."""
    data = bytearray(good)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.randrange(3)] = bytes(
            rng.choice([[], [rng.randrange(256)], list(b'"{}[],:\\'), list(good[:9])])
        )
    return bytes(data)


@pytest.mark.parametrize("path", TEMPLATES)
def test_every_answer_is_an_answer_or_a_refusal(path: str, text_model: TextModel) -> None:
    rng = random.Random(path)
    fields, starts = TEMPLATES[path]

    def bodies() -> Any:
        for _ in range(BODIES_PER_ROUTE):
            data = json.dumps(body(rng, fields, starts), allow_nan=False).encode()
            yield mangled(rng, data) if rng.random() < 0.2 else data

    seen: dict[int, int] = {}

    async def send(client: httpx.AsyncClient) -> None:
        for data in bodies():
            response = await client.post(path, content=data)
            assert response.status_code == 200 or 400 <= response.status_code < 500, (response.status_code, data)
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
            if response.status_code != 200:
                error = response.json()["error"]
                assert error.keys() == {"message", "type", "param", "code"}, (error, data)
                assert error["type"] == "invalid_request_error" and len(error["message"]) < 1000, (error, data)
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert parse_events(response.content)[-1] == "[DONE]", (response.content, data)
            else:
                json.loads(response.content, parse_constant=pytest.fail)

    in_process(text_model, send)
    assert seen[200] > BODIES_PER_ROUTE / 10 and seen[400] > BODIES_PER_ROUTE / 10, seen


def in_process(text: TextModel, work: Callable[[httpx.AsyncClient], Any]) -> None:
    """Runs `work` against the application without sockets; a bug in a route is raised. Then nothing is left of it."""

    async def main() -> None:
        engine = threaded_client(ScriptedBackend(Script().choose), max_model_len=CONTEXT)
        await engine.start()
        try:
            service = Service(engine, ServerConfig())
            service.ready(FrontEnd(engine, *text))
            transport = httpx.ASGITransport(create_app(service, ApiKeys()), raise_app_exceptions=True)
            headers = {"Content-Type": "application/json"}
            async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
                before = (await client.post("/v1/completions", json=PROBE)).json()["choices"]
                await work(client)
                assert (await client.post("/v1/completions", json=PROBE)).json()["choices"] == before
                assert (await client.get("/health")).status_code == 200
            await asyncio.sleep(0.7)  # a heartbeat
            stats = engine.stats
            assert (service.num_calls, stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0, 0)
        finally:
            await engine.stop()

    asyncio.run(main())
