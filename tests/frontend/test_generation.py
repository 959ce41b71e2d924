"""Generation: pieces in, text out, and every way to end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pytest
from hand_fed import HandFedEngine

from potok.errors import ClientError, DeadlineExceeded, EngineDead, ServerError
from potok.finish import Finish
from potok.frontend import FrontEnd, Generation, Piece
from potok.params import SamplingParams, Sharing, Terms
from potok.protocol import TokenLogprobs

A, B, CD, EF = 49, 50, 6998, 9434  # tokens of the default model: "A", "B", "CD", "EF"
PROMPT = [504, 2365]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def rest_of(generation: Generation) -> list[Piece]:
    return [piece async for piece in generation]


def test_pieces_of_one_choice(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(max_tokens=4))
        assert generation.prompt_token_ids == PROMPT
        engine.give(101, [A])
        engine.give(101, [B, CD])
        engine.give(101, [EF], Finish.LENGTH)
        assert await rest_of(generation) == [
            Piece(0, "A", [A]),
            Piece(0, "BCD", [B, CD]),
            Piece(0, "EF", [EF], None, "length"),
        ]
        assert engine.cancelled == []

    run(scenario())


def test_a_reader_waits_for_the_next_step(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(max_tokens=4))
        reader = asyncio.create_task(rest_of(generation))
        for token, finish in ((A, None), (B, None), (2, Finish.STOP)):
            for _ in range(3):
                await asyncio.sleep(0)
            assert not reader.done()
            engine.give(101, [token], finish)
        pieces = await reader
        assert [piece.text for piece in pieces] == ["A", "B", ""]
        assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", None)

    run(scenario())


def test_what_is_there_already_can_be_taken_without_waiting(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(max_tokens=4))
        assert generation.ready() is None
        engine.give(101, [A])
        engine.give(101, [B], Finish.LENGTH)
        assert (await anext(generation)).text == "A"
        assert generation.ready() == Piece(0, "B", [B], None, "length")
        assert generation.ready() is None
        assert await rest_of(generation) == []

    run(scenario())


def test_choices_interleave_and_each_ends_once(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(n=3, max_tokens=2, temperature=1.0))
        first, second, third = engine.submitted
        engine.give(third, [A])
        engine.give(first, [B])
        engine.give(third, [2], Finish.STOP)
        engine.give(second, [CD], Finish.LENGTH)
        engine.give(first, [EF], Finish.LENGTH)
        pieces = await rest_of(generation)
        assert [(p.index, p.text, p.finish_reason) for p in pieces] == [
            (2, "A", None),
            (0, "B", None),
            (2, "", "stop"),
            (1, "CD", "length"),
            (0, "EF", "length"),
        ]

    run(scenario())


def test_a_stop_string_ends_its_choice_in_the_engine_too(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(n=2, max_tokens=9, stop=["CDE"], temperature=1.0))
        first, second = engine.submitted
        engine.give(first, [A])
        engine.give(first, [CD])
        engine.give(first, [EF])
        pieces = [await anext(generation) for _ in range(3)]
        assert [p.text for p in pieces] == ["A", "", ""]
        assert (pieces[2].finish_reason, pieces[2].stop_reason) == ("stop", "CDE")
        assert engine.cancelled == [first]
        engine.give(second, [B], Finish.LENGTH)
        assert [(p.index, p.text) for p in await rest_of(generation)] == [(1, "B")]
        assert engine.cancelled == [first]

    run(scenario())


def test_a_stop_string_in_the_engines_last_chunk_cancels_nothing(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(max_tokens=2, stop=["CD"]))
        engine.give(101, [A])
        engine.give(101, [CD], Finish.LENGTH)
        last = (await rest_of(generation))[-1]
        assert (last.finish_reason, last.stop_reason, last.text) == ("stop", "CD", "")

    run(scenario())


def test_steps_that_were_under_way_when_a_stop_string_matched_are_dropped(
    engine: HandFedEngine, frontend: FrontEnd
) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(max_tokens=9, stop=["B"]))
        for token in (A, B, CD, EF):  # all arrive before the reader's turn
            engine.give(101, [token])
        pieces = await rest_of(generation)
        assert "".join(p.text for p in pieces) == "A"
        assert [t for p in pieces for t in p.token_ids] == [A, B]
        assert engine.cancelled == [101]

    run(scenario())


def test_log_probabilities_come_with_their_tokens(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(max_tokens=2, logprobs=2))
        assert engine.submitted[101][2].logprobs == 2
        engine.give(101, [A, B], Finish.LENGTH, [TokenLogprobs(-0.5, [A, B], [-0.5, -1.5])] * 2)
        [piece] = await rest_of(generation)
        assert piece.logprobs is not None
        assert [(t.token_id, t.text, t.bytes, t.logprob) for t in piece.logprobs] == [
            (A, "A", b"A", -0.5),
            (B, "B", b"B", -0.5),
        ]
        assert [(t.text, t.logprob) for t in piece.logprobs[0].top] == [("A", -0.5), ("B", -1.5)]

    run(scenario())


def test_nothing_to_generate_ends_at_once_without_the_engine(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(n=2, max_tokens=0))
        assert await rest_of(generation) == [Piece(i, "", [], None, "length") for i in range(2)]
        assert engine.submitted == {}
        frontend.generate(PROMPT, SamplingParams(max_tokens=0)).cancel()
        assert engine.cancelled == []

    run(scenario())


RATED = [TokenLogprobs(-0.5, [A], [-0.25])]


def test_a_prompt_is_rated_before_the_other_choices_start(engine: HandFedEngine, frontend: FrontEnd) -> None:
    """Whoever is told of the prompt with a choice's first piece can rely on it, and the others find it cached."""

    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(n=3, max_tokens=1, prompt_logprobs=1, temperature=1.0))
        assert [sampling.prompt_logprobs for _, _, sampling in engine.submitted.values()] == [1]
        engine.give(101, [], prompt_logprobs=RATED)
        assert generation.ready() is None and generation.prompt_logprobs() is None
        assert len(engine.submitted) == 1 and generation.cached_tokens is None
        engine.give(101, [A], Finish.LENGTH, cached_tokens=1)
        assert (await anext(generation)).text == "A"
        assert [(s.prompt_logprobs, s.choice) for _, _, s in engine.submitted.values()] == [(1, 0), (-1, 1), (-1, 2)]
        first, second = generation.prompt_logprobs() or []
        assert first is None and second is not None
        assert (second.token_id, second.logprob, [top.text for top in second.top]) == (PROMPT[1], -0.5, ["A"])
        for id in (102, 103):
            engine.give(id, [B], Finish.LENGTH, cached_tokens=2)
        assert [piece.index for piece in await rest_of(generation)] == [1, 2]
        assert generation.cached_tokens == 1  # what the others found, the first had computed

    run(scenario())


def test_cached_tokens_are_those_of_the_first_choice_whoever_speaks_first(
    engine: HandFedEngine, frontend: FrontEnd
) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(n=2, max_tokens=2, temperature=1.0))
        engine.give(102, [A], cached_tokens=2)
        assert (await anext(generation)).index == 1 and generation.cached_tokens is None
        engine.give(101, [A], cached_tokens=1)
        assert (await anext(generation)).index == 0 and generation.cached_tokens == 1
        generation.cancel()

    run(scenario())


def test_a_prompt_can_be_rated_without_an_answer(engine: HandFedEngine, frontend: FrontEnd) -> None:
    """The engine samples a token all the same; nobody is shown it."""

    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(n=2, max_tokens=0, logprobs=1, prompt_logprobs=0))
        assert [max_tokens for _, max_tokens, _ in engine.submitted.values()] == [1]
        engine.give(101, [], prompt_logprobs=RATED)
        engine.give(101, [2], Finish.STOP, [TokenLogprobs(-0.5, [], [])])
        assert await rest_of(generation) == [Piece(i, "", [], None, "length") for i in range(2)]
        assert len(generation.prompt_logprobs() or []) == 2
        assert len(engine.submitted) == 1 and engine.cancelled == []

    run(scenario())


def test_cancelling_while_the_prompt_is_rated(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(n=3, prompt_logprobs=0))
        generation.cancel()
        assert engine.cancelled == [101]
        assert await rest_of(generation) == []
        assert len(engine.submitted) == 1

    run(scenario())


def test_the_terms_of_a_call_go_to_the_engine(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        terms = Terms(Sharing("alice", "salt"), 0, 3, 4, 5, True)
        frontend.generate(PROMPT, SamplingParams(n=2, temperature=1.0), "prompt", terms)
        assert list(engine.terms.values()) == [terms, terms]

    run(scenario())


def test_a_failed_choice_ends_the_call_and_its_other_choices(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(n=3, max_tokens=9, temperature=1.0))
        first, second, third = engine.submitted
        engine.give(first, [A])
        engine.give(second, [], Finish.ERROR, error="the logits were not finite")
        assert (await anext(generation)).text == "A"
        with pytest.raises(ServerError, match="not finite") as raised:
            await anext(generation)
        assert not isinstance(raised.value, EngineDead)
        assert sorted(engine.cancelled) == [first, third]
        assert await rest_of(generation) == []

    run(scenario())


def test_a_deadline_before_any_token_is_an_error(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(n=2, temperature=1.0))
        first, second = engine.submitted
        engine.give(second, [], Finish.TIMEOUT, error="timeout_ms is 5, too little.", param="timeout_ms")
        with pytest.raises(DeadlineExceeded, match="too little") as raised:
            await anext(generation)
        assert (raised.value.param, raised.value.code) == ("timeout_ms", "deadline_exceeded")
        assert engine.cancelled == [first]
        assert await rest_of(generation) == []

    run(scenario())


def test_a_deadline_later_ends_a_choice_with_what_it_has(engine: HandFedEngine, frontend: FrontEnd) -> None:
    """Text that was held back for a stop string is part of that; a choice that has nothing ends empty."""

    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(n=3, temperature=1.0, stop=["AAB"]))
        first, second, third = engine.submitted
        engine.give(first, [A])
        engine.give(second, [], Finish.TIMEOUT, error="too late", param="timeout_ms")
        engine.give(third, [A], Finish.TIMEOUT, error="too late", param="timeout_ms")
        engine.give(first, [], Finish.TIMEOUT, error="too late", param="timeout_ms")
        pieces = await rest_of(generation)
        ends = {piece.index: piece for piece in pieces if piece.finish_reason is not None}
        assert {(end.finish_reason, end.stop_reason) for end in ends.values()} == {("length", "timeout_ms")}
        texts = ["".join(piece.text for piece in pieces if piece.index == index) for index in range(3)]
        assert texts == ["A", "", "A"]
        assert engine.cancelled == []

    run(scenario())


def test_a_refusal_by_the_engine_blames_the_field(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams())
        engine.give(101, [], Finish.ERROR, error="prompt needs 9 blocks of 4.", param="prompt")
        with pytest.raises(ClientError, match="9 blocks") as raised:
            await anext(generation)
        assert raised.value.param == "prompt"

    run(scenario())


def test_the_end_of_the_engine_is_told_apart(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams())
        engine.dead = True
        engine.give(101, [], Finish.ERROR, error="the engine stopped: out of memory")
        with pytest.raises(EngineDead, match="out of memory"):
            await anext(generation)

    run(scenario())


def test_cancel_may_be_called_twice_and_ends_a_waiting_reader(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(n=2, temperature=1.0))
        reader = asyncio.create_task(rest_of(generation))
        await asyncio.sleep(0)
        generation.cancel()
        generation.cancel()
        assert await reader == []
        assert engine.cancelled == list(engine.submitted)

    run(scenario())


def test_cancelling_the_reading_task_cancels_the_requests(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams())
        reader = asyncio.create_task(rest_of(generation))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert engine.cancelled == [101]

    run(scenario())


def test_leaving_the_block_cancels(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        engine_was_told = []
        async with frontend.generate(PROMPT, SamplingParams()) as generation:
            engine.give(101, [A])
            async for _ in generation:
                break
            engine_was_told += engine.cancelled
        assert (engine_was_told, engine.cancelled) == ([], [101])

    run(scenario())


def test_a_generation_that_is_dropped_cancels_itself(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams())
        engine.give(101, [A])
        assert (await anext(generation)).text == "A"
        del generation
        gc.collect()
        await asyncio.sleep(0)
        assert engine.cancelled == [101]

    run(scenario())


def test_a_finished_generation_that_is_dropped_cancels_nothing(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams())
        engine.give(101, [A], Finish.LENGTH)
        await rest_of(generation)
        engine.sinks[101] = print  # a later request with a number that the old one must not touch
        del generation
        gc.collect()
        await asyncio.sleep(0)
        assert engine.cancelled == []

    run(scenario())


def test_a_slow_reader_loses_nothing(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        generation = frontend.generate(PROMPT, SamplingParams(max_tokens=60))
        ids = [A, B, CD, EF] * 15
        for at, token in enumerate(ids):
            engine.give(101, [token], Finish.LENGTH if at == 59 else None)
        pieces = await rest_of(generation)
        assert "".join(p.text for p in pieces) == "ABCDEF" * 15
        assert [t for p in pieces for t in p.token_ids] == ids

    run(scenario())
