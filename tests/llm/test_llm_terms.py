"""Deadlines and priorities of LLM and AsyncLLM."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from llm_kit import expected, local_engine, scripted

from potok import LLM, AsyncLLM, ClientError, DeadlineExceeded, SamplingParams
from potok.backends.api import StepInputs
from potok.engine.thread import threaded_client
from potok.frontend import TextModel

LONG = SamplingParams(temperature=0, max_tokens=400, n=1)


def slow(inputs: StepInputs) -> None:
    time.sleep(0.005)


def test_answers_end_with_what_is_there(text: TextModel) -> None:
    """Two run at once: the third prompt has nothing, and that is no reason to lose the others' answers."""
    with LLM.over(local_engine(scripted(on_step=slow), max_num_seqs=2), text) as llm:
        answers = [answer.outputs[0] for answer in llm.generate([[1], [2], [3]], LONG, timeout_ms=150)]
        for prompt, answer in enumerate(answers, start=1):
            assert (answer.finish_reason, answer.stop_reason) == ("length", "timeout_ms")
            assert answer.token_ids == expected([prompt], len(answer.token_ids))
        assert [bool(answer.token_ids) for answer in answers] == [True, True, False]
        assert len(answers[0].token_ids) < 100


def test_nothing_by_the_deadline_is_an_error(text: TextModel) -> None:
    with LLM.over(local_engine(scripted(on_step=slow)), text) as llm:
        for name in ("timeout_ms", "ttft_timeout_ms"):
            with pytest.raises(DeadlineExceeded, match=name) as caught:
                llm.generate([[1] * 300, [2] * 300], LONG, **{name: 1})
            assert caught.value.param == name
        [answer] = llm.generate([1], LONG, ttft_timeout_ms=60_000)
        assert answer.outputs[0].token_ids == expected([1], 400)


def test_priorities_order_the_queue(text: TextModel) -> None:
    order: list[int] = []

    def note(inputs: StepInputs) -> None:
        while not order and len(engine._mailbox._sinks) < 4:  # until all have been asked
            time.sleep(0.001)
        order.extend(inputs.tokens.tolist())

    engine = local_engine(scripted(on_step=note), max_num_seqs=1, schedule_policy="priority")
    with LLM.over(engine, text) as llm:
        one = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([[99], [11], [22], [33]], one, priority=[-9, 5, -5, 0])
        assert order == [99, 22, 33, 11]
        llm.generate([1], one, priority=-3)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"ttft_timeout_ms": 1.5}, "ttft_timeout_ms"),
        ({"timeout_ms": True}, "timeout_ms"),
        ({"priority": "high"}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"priority": [1]}, "priority"),
        ({"priority": [0, None]}, "priority"),
        ({"priority": 1}, "priority"),  # under a policy that looks at none
    ],
)
def test_bounds(llm: LLM, arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(ClientError) as caught:
        llm.generate([[1], [2]], LONG, **arguments)
    assert caught.value.param == param
    dialogues = [[{"role": "user", "content": "hi"}]] * 2
    with pytest.raises(ClientError):
        llm.chat(dialogues, LONG, **arguments)
    assert llm._engine.stats.steps == 0


def test_async(text: TextModel) -> None:
    async def main() -> None:
        engine = threaded_client(scripted(on_step=slow), max_num_seqs=1)
        await engine.start()
        async with AsyncLLM.over(engine, text) as llm:
            outputs = [output async for output in llm.generate([1], LONG, timeout_ms=150)]
            last = outputs[-1].outputs[0]
            assert outputs[-1].finished and (last.finish_reason, last.stop_reason) == ("length", "timeout_ms")
            assert last.token_ids == expected([1], len(last.token_ids))
            with pytest.raises(DeadlineExceeded):
                async for _ in llm.chat([{"role": "user", "content": "hi"}], LONG, ttft_timeout_ms=1):
                    pass
            with pytest.raises(ClientError, match="priority"):
                async for _ in llm.generate([1], LONG, priority=1):
                    pass

    asyncio.run(main())
