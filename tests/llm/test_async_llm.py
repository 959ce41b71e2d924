"""AsyncLLM: outputs that grow, requests that end when nobody listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from llm_kit import CONTEXT, expected, scripted

from potok import AsyncLLM, ClientError, EngineDead, LoadError, RequestOutput, SamplingParams, ServerError
from potok.backends.modelled.scripted import ScriptedBackend
from potok.engine.thread import threaded_client
from potok.frontend import TextModel

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def run(
    scenario: Callable[[AsyncLLM], Coroutine[Any, Any, None]], text: TextModel, backend: ScriptedBackend | None = None
) -> None:
    async def main() -> None:
        engine = threaded_client(backend or scripted())
        await engine.start()
        async with AsyncLLM.over(engine, text) as llm:
            await asyncio.wait_for(scenario(llm), 60)

    asyncio.run(main())


async def until_idle(llm: AsyncLLM) -> None:
    deadline = time.monotonic() + 30
    stats = llm.frontend.engine.stats  # type: ignore[attr-defined]
    while stats.running or stats.waiting or stats.kv_blocks_used:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
        stats = llm.frontend.engine.stats  # type: ignore[attr-defined]


def test_outputs_grow_and_the_last_is_finished(text: TextModel) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        outputs = [output async for output in llm.generate("Once upon", GREEDY)]
        ids = text.tokenizer.encode_prompt("Once upon")
        whole = expected(ids, 8)
        assert [o.outputs[0].token_ids for o in outputs] == [whole[: i + 1] for i in range(8)]
        assert [o.finished for o in outputs] == [False] * 7 + [True]
        assert {(o.request_id, o.prompt, tuple(o.prompt_token_ids)) for o in outputs} == {
            ("0", "Once upon", tuple(ids))
        }
        last = outputs[-1].outputs[0]
        assert (last.text, last.finish_reason) == (text.tokenizer.decode(whole), "length")
        assert all(last.text.startswith(o.outputs[0].text.rstrip("\ufffd")) for o in outputs)

    run(scenario, text)


def test_what_is_told_about_the_prompt(text: TextModel) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        prompt = [11 + i for i in range(40)]
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
        outputs = [output async for output in llm.generate(prompt, params)]
        assert all(len(output.prompt_logprobs or []) == 40 for output in outputs)
        assert outputs[0].prompt_logprobs is outputs[2].prompt_logprobs  # made once, whatever the length of the answer
        counts = []
        salted: Any = {"prompt_token_ids": prompt, "cache_salt": "mine"}
        for given in (prompt, salted, salted):
            counts.append((await last_of(llm.generate(given, GREEDY))).num_cached_tokens)
        assert counts == [32, 0, 32]
        dialogue = [{"role": "user", "content": "Hi " * 40}]
        counts = [(await last_of(llm.chat(dialogue, GREEDY, cache_salt=s))).num_cached_tokens for s in ("a", "a", "b")]
        assert counts[0] == counts[2] == 0 and counts[1]
        for given in ({"text": "Hello"}, 5, {"prompt": "Hello", "cache_salt": ""}):
            with pytest.raises(ClientError):
                llm.generate(given, GREEDY)  # type: ignore[arg-type]

    run(scenario, text)


async def last_of(outputs: Any) -> RequestOutput:
    return [output async for output in outputs][-1]


def test_many_at_once_equal_their_solo_answers(text: TextModel) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        prompts = [[20 + i] * (1 + 11 * i % 60) for i in range(30)]
        answers = await asyncio.gather(*(last_of(llm.generate(prompt, GREEDY)) for prompt in prompts))
        assert [a.outputs[0].token_ids for a in answers] == [expected(p, 8) for p in prompts]

    run(scenario, text)


def test_choices_grow_side_by_side(text: TextModel) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        params = SamplingParams(n=3, max_tokens=4, logprobs=1)
        answer = await last_of(llm.generate([7], params))
        assert [o.token_ids for o in answer.outputs] == [expected([7], 4)] * 3
        assert [len(o.logprobs or ()) for o in answer.outputs] == [4] * 3

    run(scenario, text)


def test_chat_may_use_the_rest_of_the_context(text: TextModel) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        dialogue = [{"role": "user", "content": "Hi"}]
        answer = await last_of(llm.chat(dialogue))
        assert answer.prompt_token_ids == text.chat.encode(dialogue)
        assert len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) == CONTEXT

    run(scenario, text)


@pytest.mark.parametrize("how", ["break", "aclose", "task"])
def test_leaving_early_ends_the_request(text: TextModel, how: str) -> None:
    async def first(llm: AsyncLLM) -> None:
        outputs = llm.generate([7], SamplingParams(max_tokens=None))
        async for _ in outputs:
            if how == "break":
                break
            if how == "aclose":
                await outputs.aclose()
                break

    async def scenario(llm: AsyncLLM) -> None:
        task = asyncio.create_task(first(llm))
        if how == "task":
            await asyncio.sleep(0.05)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until_idle(llm)
        assert llm.frontend.engine.stats.generation_tokens < CONTEXT / 2  # type: ignore[attr-defined]

    run(scenario, text, scripted(seconds_per_step=0.005))


def test_refused_and_failed_requests(text: TextModel) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(ClientError, match=r"prompt\[0\]"):
            await last_of(llm.generate([-1], GREEDY))
        with pytest.raises(ServerError, match="not finite"):
            await last_of(llm.generate([66], GREEDY))
        assert (await last_of(llm.generate([5], GREEDY))).outputs[0].token_ids == expected([5], 8)

    run(scenario, text, scripted(fails=lambda history: history[0] == 66 and len(history) == 3))


def test_closing_ends_open_answers(text: TextModel) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        task = asyncio.create_task(last_of(llm.generate([7], SamplingParams(max_tokens=None))))
        await asyncio.sleep(0.05)
        await llm.close()
        with pytest.raises(EngineDead):
            await task
        await llm.close()
        with pytest.raises(ServerError, match="not running"):
            llm.generate([7], GREEDY)

    run(scenario, text, scripted(seconds_per_step=0.005))


def test_it_must_be_started() -> None:
    with pytest.raises(ServerError, match="start"):
        AsyncLLM().generate("Hello")


def test_a_missing_model_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        with pytest.raises(LoadError, match=r"nowhere\.gguf"):
            async with AsyncLLM("nowhere.gguf"):
                pass

    asyncio.run(scenario())
