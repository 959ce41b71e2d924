"""The dialect without HTTP, as batch files use it, and the bytes of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any

import pytest
from server_kit import Script

from potok.backends.modelled.scripted import ScriptedBackend
from potok.engine.thread import threaded_client
from potok.errors import ClientError, ServerError
from potok.frontend import FrontEnd, Piece, TextModel
from potok.params import SamplingParams
from potok.server.dialects import openai
from potok.server.dialects.openai_logprobs import Offsets
from potok.server.dialects.openai_reply import ChatShape, Events, Reply, Shape, TextShape, Wishes


def with_frontend(text: TextModel, script: Script, work: Callable[[FrontEnd], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        backend = ScriptedBackend(script.choose, fails=script.fails)
        engine = threaded_client(backend)
        await engine.start()
        try:
            return await work(FrontEnd(engine, *text))
        finally:
            await engine.stop()

    return asyncio.run(main())


def test_complete_answers_without_http(text_model: TextModel) -> None:
    script = Script()
    script.answers[(5, 6)] = [49, 50]

    async def work(frontend: FrontEnd) -> None:
        answer = await openai.completion(frontend, {"prompt": [5, 6]})
        assert answer["choices"][0]["text"] == "AB" and answer["usage"]["completion_tokens"] == 3
        chat = await openai.chat_completion(
            frontend, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        )
        assert chat["object"] == "chat.completion" and chat["choices"][0]["finish_reason"] == "length"
        for body in ({"prompt": [5], "stream": True}, {"prompt": [5], "nonsense": 1}, [], None):
            with pytest.raises(ClientError):
                await openai.completion(frontend, body)
        script.failing[(7,)] = 2
        with pytest.raises(ServerError):
            await openai.completion(frontend, {"prompt": [7]})

    with_frontend(text_model, script, work)


@pytest.mark.parametrize(
    ("prompt", "text", "tokens", "offsets"),
    [
        ("AB CD", "AB CD", ["<|im_start|>", "AB", " CD"], [0, 0, 2]),
        ("<|im_start|>AB", "<|im_start|>AB", ["<|im_start|>", "AB"], [0, 12]),
        ([1, 6998], "<|im_start|>CD", ["<|im_start|>", "CD"], [0, 12]),
        ([6998], "CD", ["CD"], [0]),
    ],
)
def test_a_begin_token_that_nobody_wrote_is_not_echoed(
    text_model: TextModel, prompt: Any, text: str, tokens: list[str], offsets: list[int]
) -> None:
    """It is one of the prompt's tokens all the same, with no place in the text."""
    tokenizer = copy(text_model.tokenizer)
    tokenizer.add_bos, tokenizer.bos_id = True, 1

    async def work(frontend: FrontEnd) -> None:
        answer = await openai.completion(frontend, {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0})
        [choice] = answer["choices"]
        assert choice["text"] == text
        assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (tokens, offsets)
        assert answer["usage"]["prompt_tokens"] == len(tokens)

    with_frontend(text_model._replace(tokenizer=tokenizer), Script(), work)


def events_of(text: TextModel, shape: Shape, pieces: list[Piece], **wishes: bool) -> list[Any]:
    """Events of a reply to which other pieces are given than its engine's."""

    async def work(frontend: FrontEnd) -> bytes:
        known = {"stream": True, "usage_chunk": False, "token_ids": False, "logprobs": False, **wishes}
        generation = frontend.generate([5], SamplingParams())
        reply = Reply(shape, 'a "model" of \\ names \u00e9', [generation], 1, Wishes(**known))
        events = Events(reply)
        raw = events.take(pieces) + events.end()
        reply.cancel()
        return raw

    raw = with_frontend(text, Script(), work)
    return [json.loads(block[6:]) for block in raw.decode().split("\n\n") if block and block != "data: [DONE]"]


@pytest.mark.parametrize("shape", [TextShape(), ChatShape()])
def test_the_quick_way_to_a_chunk_gives_the_same_json(text_model: TextModel, shape: Shape) -> None:
    """A plain text chunk is put together from bytes; with token ids wanted, the same chunk is encoded from scratch."""
    texts = ['"', "\\", "\n\n", "data: ", "\u2028", "\U0001f336", "\x00", "</script>", "content", "x" * 1000]
    pieces = [Piece(0, text, [i]) for i, text in enumerate(texts)] + [Piece(0, "end", [9], None, "stop", "END")]
    quick = events_of(text_model, shape, pieces)
    slow = events_of(text_model, shape, pieces, token_ids=True)
    assert len(quick) == len(slow) > len(texts)
    for one, other in zip(quick, slow, strict=True):
        other.pop("prompt_token_ids", None)
        for choice in other["choices"]:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        assert {**one, "id": 0, "created": 0} == {**other, "id": 0, "created": 0}
        assert list(one) == list(other)


def test_offsets_count_characters() -> None:
    """Against the definition: characters that are complete before the token, or that it is inside of."""
    words = ["a", "\u00e9", "\u4e16", "\U0001f336", " ", "na\u00efve"]
    data = "".join(words).encode()
    starts = [i for i, byte in enumerate(data) if byte & 0xC0 != 0x80]
    for width in (1, 2, 3, 5):
        offsets = Offsets()
        for at in range(0, len(data), width):
            assert offsets.next(data[at : at + width]) == sum(start <= at for start in starts) - 1
    assert Offsets().next(b"") == 0
