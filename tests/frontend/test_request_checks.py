"""What is refused before any engine work, and what the engine is asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hand_fed import VOCAB, HandFedEngine

from potok.errors import ClientError
from potok.frontend import FrontEnd, resolve
from potok.params import SamplingParams
from potok.protocol import Sampling
from potok.text.chat import ChatTemplate

ENDS = frozenset({0, 2})
CONTEXT = 64  # of the hand-fed engine


@pytest.mark.parametrize(
    ("ids", "index", "value"),
    [
        ([1, VOCAB], 1, VOCAB),
        ([-1], 0, -1),
        ([1, 2.5], 1, 2.5),
        ([True], 0, True),
        ([5, None], 1, None),
        ([5, "6"], 1, "'6'"),
        ([[1]], 0, "[1]"),
        ([1, 10**40], 1, 10**39),
    ],
)
def test_a_bad_id_is_named_with_its_place(engine: HandFedEngine, ids: list[Any], index: int, value: Any) -> None:
    with pytest.raises(ClientError) as raised:
        resolve(ids, SamplingParams(), engine.info, ENDS)
    assert f"prompt[{index}] must be a token id from 0 to 49151, not {value}"[:60] in str(raised.value)
    assert raised.value.param == "prompt"


def test_an_empty_prompt_is_refused(engine: HandFedEngine) -> None:
    with pytest.raises(ClientError, match="prompt is empty"):
        resolve([], SamplingParams(), engine.info, ENDS)


def test_first_and_last_id_are_legal(engine: HandFedEngine) -> None:
    assert resolve([0, VOCAB - 1], SamplingParams(), engine.info, ENDS).max_tokens == 16


@pytest.mark.parametrize(
    ("prompt_len", "asked", "given"),
    [(1, None, 63), (63, None, 1), (63, 1, 1), (54, 50, 10), (54, 10, 10), (54, 9, 9), (1, 0, 0)],
)
def test_the_answer_fits_the_context(engine: HandFedEngine, prompt_len: int, asked: int | None, given: int) -> None:
    assert resolve([7] * prompt_len, SamplingParams(max_tokens=asked), engine.info, ENDS).max_tokens == given


@pytest.mark.parametrize("prompt_len", [CONTEXT, CONTEXT + 1, 10_000])
@pytest.mark.parametrize("max_tokens", [None, 0, 1])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    engine: HandFedEngine, prompt_len: int, max_tokens: int | None
) -> None:
    with pytest.raises(ClientError) as raised:
        resolve([7] * prompt_len, SamplingParams(max_tokens=max_tokens), engine.info, ENDS, "messages")
    assert f"messages has {prompt_len} tokens" in str(raised.value)
    assert str(CONTEXT) in str(raised.value)
    assert (raised.value.param, raised.value.code) == ("messages", "context_length_exceeded")


def test_defaults_on_the_wire(engine: HandFedEngine) -> None:
    [sampling] = resolve([7], SamplingParams(seed=3), engine.info, ENDS).samplings
    assert sampling == Sampling(temperature=1.0, seed=3, stop_ids=(0, 2))


def test_every_field_reaches_the_wire(engine: HandFedEngine) -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=9,
        top_p=0.75,
        min_p=0.125,
        seed=5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={8: 1.0, 3: -2.0},
        min_tokens=2,
        stop_token_ids=[11, 2],
        logprobs=0,
    )
    [sampling] = resolve([7], params, engine.info, ENDS).samplings
    assert sampling == Sampling(
        temperature=0.5,
        top_k=9,
        top_p=0.75,
        min_p=0.125,
        seed=5,
        choice=0,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias=((3, -2.0), (8, 1.0)),
        stop_ids=(0, 2, 11),
        min_tokens=2,
        logprobs=0,
    )


def test_ignore_eos_leaves_the_callers_stop_ids(engine: HandFedEngine) -> None:
    [sampling] = resolve([7], SamplingParams(ignore_eos=True, stop_token_ids=[2, 5]), engine.info, ENDS).samplings
    assert sampling.stop_ids == (2, 5)


@pytest.mark.parametrize(("asked", "wire"), [(1e-5, 1e-5), (9.9e-6, 0.0), (0.0, 0.0), (2.0, 2.0)])
def test_tiny_temperatures_are_greedy(engine: HandFedEngine, asked: float, wire: float) -> None:
    assert resolve([7], SamplingParams(temperature=asked), engine.info, ENDS).samplings[0].temperature == wire


@pytest.mark.parametrize(("asked", "wire"), [(-1, 0), (0, 0), (1, 1)])
def test_top_k_off(engine: HandFedEngine, asked: int, wire: int) -> None:
    assert resolve([7], SamplingParams(top_k=asked), engine.info, ENDS).samplings[0].top_k == wire


@pytest.mark.parametrize(("asked", "wire"), [(0, 0), (-1, 2**64 - 1), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1)])
def test_seeds_travel_as_64_bits(engine: HandFedEngine, asked: int, wire: int) -> None:
    assert resolve([7], SamplingParams(seed=asked), engine.info, ENDS).samplings[0].seed == wire


def test_choices_share_a_seed_and_differ_in_their_index(engine: HandFedEngine) -> None:
    samplings = resolve([7], SamplingParams(n=4), engine.info, ENDS).samplings
    assert [s.choice for s in samplings] == [0, 1, 2, 3]
    assert len({s.seed for s in samplings}) == 1


def test_a_seed_that_is_not_given_is_drawn_from_all_64_bits(engine: HandFedEngine) -> None:
    seeds = [resolve([7], SamplingParams(), engine.info, ENDS).samplings[0].seed for _ in range(200)]
    assert len(set(seeds)) == 200
    assert 2**63 <= max(seeds) < 2**64


def test_what_is_refused_starts_nothing(engine: HandFedEngine, frontend: FrontEnd) -> None:
    async def scenario() -> None:
        for ids, params in (
            ([7], SamplingParams(temperature=float("nan"))),
            ([7], SamplingParams(n=129)),
            ([7], SamplingParams(stop_token_ids=[VOCAB])),
            ([7] * CONTEXT, SamplingParams()),
            ([VOCAB], SamplingParams()),
        ):
            with pytest.raises(ClientError):
                frontend.generate(ids, params)
        assert engine.submitted == {}

    asyncio.run(scenario())


def test_texts_are_encoded_alike_on_and_off_the_loop(frontend: FrontEnd) -> None:
    async def scenario() -> None:
        for length in (10, 10_000):
            text = "naïve " * length
            assert await frontend.encode_prompt(text) == frontend.tokenizer.encode_prompt(text)
            messages = [{"role": "user", "content": text}]
            assert await frontend.encode_chat(messages) == frontend.chat.encode(messages)

    asyncio.run(scenario())


def test_a_model_without_a_template_completes_but_does_not_chat(engine: HandFedEngine, text: Any) -> None:
    async def scenario() -> None:
        frontend = FrontEnd(engine, text.tokenizer, ChatTemplate(None, text.tokenizer), "plain")
        assert await frontend.encode_prompt("Hello") == [19556]
        with pytest.raises(ClientError, match="no chat template"):
            await frontend.encode_chat([{"role": "user", "content": "hi"}])

    asyncio.run(scenario())
