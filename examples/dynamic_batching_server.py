"""A dynamic-batching inference server in one file: requests come one by one, the model gets them in batches.

    make setup
    .venv/bin/python examples/dynamic_batching_server.py
    curl -s http://127.0.0.1:8001/predict -H 'Content-Type: application/json' \\
        -d '{"text": "What is the capital of Japan?"}'

Many at once, and how they were batched:

    seq 100 | xargs -P 100 -I{} curl -s http://127.0.0.1:8001/predict -H 'Content-Type: application/json' \\
        -d '{"text": "What is {} plus one?"}'
    curl -s http://127.0.0.1:8001/stats

Any function from a list to a list of the same length can take the place of the model. (For language models there is
`potok serve`: it batches at every token, so that short answers do not wait for long ones.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from potok import LLM, ClientError, DynamicBatcher, SamplingParams, Unavailable


class Ask(BaseModel):
    text: str = Field(min_length=1, max_length=1000)


class Answer(BaseModel):
    answer: str


def create_app(model: Callable[[list[str]], list[Any]]) -> FastAPI:
    """model: from texts to answers; an exception in the place of an answer is told to that one's caller."""
    batcher: DynamicBatcher[str, str] = DynamicBatcher(
        model,
        max_batch_size=32,
        max_wait_ms=10,
        max_tokens_per_batch=16_000,
        cost=lambda text: len(text.encode()),  # a token has at least a byte
        max_queue=1000,
        when_full="raise",
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with batcher:  # at the end of the server, whoever waits still gets an answer
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    async def predict(ask: Ask) -> Answer:
        return Answer(answer=await batcher.predict(ask.text))

    @app.get("/stats")
    async def stats() -> dict[str, int | float]:
        now = batcher.stats
        return {
            "batches": now.batches,
            "items": now.items,
            "mean_batch_size": round(now.mean_batch_size, 1),
            "queue_length": now.queue_length,
        }

    @app.exception_handler(ClientError)
    async def refuse(request: Request, error: ClientError) -> JSONResponse:
        if isinstance(error, Unavailable):
            return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": "1"})
        return JSONResponse({"error": str(error)}, status_code=400)

    return app


def answers(llm: LLM, texts: list[str]) -> list[str | ClientError]:
    """The model: what `DynamicBatcher` calls with a batch, on a thread of its own."""
    try:
        outputs = llm.chat(
            [[{"role": "user", "content": text}] for text in texts], SamplingParams(temperature=0, max_tokens=48)
        )
    except ClientError as error:
        # Some text is not for this model; nothing was computed. Halves find out which one, and leave the others alone.
        if len(texts) == 1:
            return [error]
        middle = len(texts) // 2
        return answers(llm, texts[:middle]) + answers(llm, texts[middle:])
    return [output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    with LLM() as default_model:
        uvicorn.run(create_app(partial(answers, default_model)), host="127.0.0.1", port=8001)
