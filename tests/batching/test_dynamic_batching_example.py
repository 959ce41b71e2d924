"""examples/dynamic_batching_server.py, over HTTP with another model, and its own model without HTTP."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
from dynamic_batching_server import answers, create_app

from potok import LLM, ClientError

Posts = list[dict[str, Any]]


def post_all(model: Any, posts: Posts) -> tuple[list[httpx.Response], dict[str, float]]:
    """The answers to all, posted at once, and what /stats says afterwards."""

    async def main() -> tuple[list[httpx.Response], dict[str, float]]:
        app = create_app(model)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://example") as client,
        ):
            responses = await asyncio.gather(*(client.post("/predict", json=body) for body in posts))
            return responses, (await client.get("/stats")).json()

    return asyncio.run(main())


def test_a_hundred_requests_share_batches_and_get_their_own_answers() -> None:
    batches: list[int] = []

    def shout(texts: list[str]) -> list[str]:
        batches.append(len(texts))
        return [text.upper() for text in texts]

    responses, stats = post_all(shout, [{"text": f"text {i}"} for i in range(100)])
    assert [response.json() for response in responses] == [{"answer": f"TEXT {i}"} for i in range(100)]
    assert max(batches) <= 32
    assert (stats["batches"], stats["items"], stats["queue_length"]) == (len(batches), 100, 0)
    assert len(batches) < 20


def test_what_is_wrong_is_told_to_its_sender() -> None:
    def picky(texts: list[str]) -> list[Any]:
        return [ClientError("no digits, please.") if text.isdigit() else text for text in texts]

    responses, _ = post_all(picky, [{"text": "a"}, {"text": "7"}, {"text": ""}, {"txt": "b"}, {"text": "c" * 1001}])
    assert [response.status_code for response in responses] == [200, 400, 422, 422, 422]
    assert responses[1].json() == {"error": "no digits, please."}


def test_a_full_queue_is_503() -> None:
    gate = threading.Event()

    def wait(texts: list[str]) -> list[str]:
        assert gate.wait(20)
        return texts

    async def main() -> None:
        app = create_app(wait)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://example") as client,
        ):
            posts = [asyncio.create_task(client.post("/predict", json={"text": "x"})) for _ in range(1033)]
            refused, _ = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
            gate.set()
            statuses = [(await post).status_code for post in posts]
            assert statuses.count(503) == len(refused) == 1
            response = refused.pop().result()
            assert response.headers["Retry-After"] == "1"
            assert "1000 items wait already" in response.json()["error"]

    asyncio.run(main())


def test_its_own_model_takes_batches_and_a_bad_text_fails_alone() -> None:
    with LLM() as llm:
        first, bad, last = answers(llm, ["What is the capital of Japan?", "\u0004", "What is the capital of Japan?"])
    assert first == last == "The capital of Japan is Tokyo."
    assert isinstance(bad, ClientError)
