"""LLM: what it takes, what it returns, and that nothing hangs when something goes wrong."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llm_kit import CONTEXT, expected, local_engine, remember_all, scripted

from potok import LLM, ClientError, EngineDead, LoadError, SamplingParams, ServerError
from potok.backends.api import StepInputs
from potok.frontend import TextModel

GREEDY = SamplingParams(temperature=0, max_tokens=8)
A, B, CD, EF = 49, 50, 6998, 9434


def idle(llm: LLM) -> bool:
    """Whether the engine has nothing left to do, waiting for its next word if need be."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        stats = llm._engine.stats
        if stats.running == 0 and stats.waiting == 0 and stats.kv_blocks_used == 0:
            return True
        time.sleep(0.01)
    return False


def test_one_text(llm: LLM, text: TextModel) -> None:
    [answer] = llm.generate("Once upon a time", GREEDY)
    ids = text.tokenizer.encode_prompt("Once upon a time")
    [output] = answer.outputs
    assert (answer.prompt, answer.prompt_token_ids, answer.finished) == ("Once upon a time", ids, True)
    assert output.token_ids == expected(ids, 8)
    assert output.text == text.tokenizer.decode(output.token_ids)
    assert (output.index, output.finish_reason, output.stop_reason) == (0, "length", None)
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


def test_many_prompts_are_answered_in_their_order(llm: LLM) -> None:
    prompts = [[i + 1] * (1 + 37 * i % 101) for i in range(60)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 7) for i in range(60)]
    answers = llm.generate(prompts, params)
    assert [a.prompt_token_ids for a in answers] == prompts
    assert [a.outputs[0].token_ids for a in answers] == [expected(p, 1 + i % 7) for i, p in enumerate(prompts)]
    assert len({a.request_id for a in answers}) == 60
    assert [a.prompt for a in answers] == [None] * 60


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("Hello", [[19556]]),
        (["Hello", "Hello"], [[19556], [19556]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[1, 2], "Hello"], [[1, 2], [19556]]),
        ({"prompt": "Hello"}, [[19556]]),
        ([{"prompt_token_ids": [4, 5]}, {"prompt": "Hello"}], [[4, 5], [19556]]),
        ([], []),
    ],
)
def test_shapes_of_prompts(llm: LLM, given: Any, prompts: list[list[int]]) -> None:
    assert [a.prompt_token_ids for a in llm.generate(given, GREEDY)] == prompts


@pytest.mark.parametrize("given", [7, None, [None], [1.5], {"text": "Hello"}, [b"Hello"], b"Hello", {"prompt": 3}])
def test_other_shapes_are_refused(llm: LLM, given: Any) -> None:
    with pytest.raises(ClientError, match="prompts"):
        llm.generate(given)


def test_n_choices_and_default_parameters(llm: LLM) -> None:
    [answer] = llm.generate([7], SamplingParams(n=3, max_tokens=2))
    assert [output.index for output in answer.outputs] == [0, 1, 2]
    assert all(output.token_ids == expected([7], 2) for output in answer.outputs)
    [answer] = llm.generate([7])
    assert len(answer.outputs[0].token_ids) == 16


def test_logprobs_are_tables_by_token_id(llm: LLM, text: TextModel) -> None:
    [answer] = llm.generate([7], SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    [output] = answer.outputs
    assert output.logprobs is not None
    assert [len(table) for table in output.logprobs] == [2, 2, 2]
    for token, table in zip(output.token_ids, output.logprobs, strict=True):
        assert (table[token].logprob, table[token].rank) == (-0.5, 1)
        assert table[token].decoded_token == text.tokenizer.token_text(token)
        assert (table[token + 1].logprob, table[token + 1].rank) == (-1.5, 2)
    assert output.cumulative_logprob == pytest.approx(-1.5)
    [answer] = llm.generate([7], SamplingParams(temperature=0, max_tokens=1, logprobs=0))
    assert answer.outputs[0].logprobs is not None
    [(token, entry)] = answer.outputs[0].logprobs[0].items()
    assert (token, entry.logprob, entry.rank) == (answer.outputs[0].token_ids[0], -0.5, None)


def test_prompts_are_rated(llm: LLM) -> None:
    """With any number of choices, and with none of their tokens wanted."""
    for n, max_tokens in ((1, 2), (3, 2), (2, 0)):
        [answer] = llm.generate([7, 8, 9], SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=2))
        first, *others = answer.prompt_logprobs or []
        assert first is None and [token in table for token, table in zip([8, 9], others, strict=True)] == [True, True]
        assert all(table[token].logprob == -0.5 for token, table in zip([8, 9], others, strict=True))
        assert all(2 <= len(table) <= 3 for table in others)
        assert all(len(output.token_ids) == max_tokens and output.logprobs is None for output in answer.outputs)
        assert all(output.finish_reason == "length" for output in answer.outputs)
    [answer] = llm.generate([7, 8, 9], GREEDY)
    assert answer.prompt_logprobs is None


def test_cached_tokens_and_salts(llm: LLM) -> None:
    prompt = [11 + i for i in range(40)]
    params = SamplingParams(n=2, temperature=0, max_tokens=3)

    def cached(given: Any) -> int | None:
        [answer] = llm.generate(given, params)
        assert answer.prompt_token_ids == prompt
        assert [output.token_ids for output in answer.outputs] == [expected(prompt, 3)] * 2
        return answer.num_cached_tokens

    mine: Any = {"prompt_token_ids": prompt, "cache_salt": "mine"}
    assert [cached(given) for given in (prompt, prompt, mine, mine, prompt)] == [0, 32, 0, 32, 32]
    assert cached([{"prompt_token_ids": prompt, "cache_salt": None}]) == 32
    [nothing] = llm.generate(prompt, SamplingParams(max_tokens=0))
    assert nothing.num_cached_tokens is None


def test_dialogues_have_salts_too(llm: LLM) -> None:
    dialogue = [{"role": "user", "content": "What is 2+2? " * 10}]
    counts = [llm.chat(dialogue, GREEDY, cache_salt=salt)[0].num_cached_tokens for salt in (None, "a", "a", "b", None)]
    assert counts[0] == counts[1] == counts[3] == 0
    assert counts[2] == counts[4] != 0


@pytest.mark.parametrize("salt", ["", "x" * 513, 5, "\ud800"])
def test_salts_that_are_none(llm: LLM, salt: Any) -> None:
    with pytest.raises(ClientError, match="cache_salt"):
        llm.generate({"prompt": "Hello", "cache_salt": salt}, GREEDY)
    with pytest.raises(ClientError, match="cache_salt"):
        llm.chat([{"role": "user", "content": "Hi"}], GREEDY, cache_salt=salt)


def test_stop_strings_end_the_request_in_the_engine(text: TextModel) -> None:
    ids = [A, B, CD, EF]
    script = scripted(lambda history: ids[(len(history) - 1) % 4])
    with LLM.over(local_engine(script), text) as llm:
        [answer] = llm.generate([7], SamplingParams(max_tokens=None, stop=["CDE"]))
        [output] = answer.outputs
        assert (output.text, output.finish_reason, output.stop_reason) == ("AB", "stop", "CDE")
        assert output.token_ids == ids
        assert idle(llm)
        # The context would be 511. The engine goes on until the interpreter switches threads, 5 ms or some 50 steps.
        assert llm._engine.stats.generation_tokens < 256


def test_nothing_to_generate(llm: LLM) -> None:
    [first, second] = llm.generate([[7], [8]], [SamplingParams(max_tokens=0), GREEDY])
    assert (first.outputs[0].text, first.outputs[0].finish_reason) == ("", "length")
    assert second.outputs[0].token_ids == expected([8], 8)


def test_chat_uses_the_template_and_the_rest_of_the_context(llm: LLM, text: TextModel) -> None:
    dialogue = [{"role": "user", "content": "What is 2+2?"}]
    ids = text.chat.encode(dialogue)
    [answer] = llm.chat(dialogue)
    assert answer.prompt_token_ids == ids
    assert len(ids) + len(answer.outputs[0].token_ids) == CONTEXT
    answers = llm.chat([dialogue, [{"role": "user", "content": "Hi"}]], GREEDY)
    assert [a.prompt_token_ids for a in answers] == [ids, text.chat.encode([{"role": "user", "content": "Hi"}])]


def test_a_call_with_one_bad_request_computes_nothing(llm: LLM) -> None:
    for prompts, params, says in (
        ([[1], [49152]], GREEDY, r"prompts\[1\]\[0\] must be a token id"),
        ([[1], []], GREEDY, r"prompts\[1\] is empty"),
        ([[1], [2] * CONTEXT], GREEDY, rf"prompts\[1\] has {CONTEXT} tokens"),
        ([[1], [2]], [GREEDY], "1 entries for 2 prompts"),
        ([1], SamplingParams(temperature=3), "temperature"),
    ):
        with pytest.raises(ClientError, match=says):
            llm.generate(prompts, params)
    assert llm._engine.stats.generation_tokens == 0


def test_a_failing_request_is_raised_after_all_others_have_ended(text: TextModel) -> None:
    lengths = []

    def remember(history: Any) -> int:
        lengths.append(len(history))
        return remember_all(history)

    backend = scripted(remember, fails=lambda history: history[0] == 66 and len(history) == 3)
    with LLM.over(local_engine(backend), text) as llm:
        with pytest.raises(ServerError, match="not finite"):
            llm.generate([[66], [5], [6]], SamplingParams(temperature=0, max_tokens=40))
        assert lengths.count(40) == 2  # both neighbours came to their ends
        assert idle(llm)
        assert llm.generate([5], GREEDY)[0].outputs[0].token_ids == expected([5], 8)


def test_an_engine_that_breaks_ends_the_call(text: TextModel, capfd: pytest.CaptureFixture[str]) -> None:
    def break_at_third(inputs: StepInputs) -> None:
        if inputs.positions.max() >= 3:
            raise RuntimeError("broken on purpose")

    with LLM.over(local_engine(scripted(on_step=break_at_third)), text) as llm:
        with pytest.raises(EngineDead, match="broken on purpose"):
            llm.generate([[1], [2]], GREEDY)
        with pytest.raises(EngineDead, match="broken on purpose"):
            llm.generate([1], GREEDY)
    assert "broken on purpose" in capfd.readouterr().err


def test_calls_from_many_threads_join_one_batch(text: TextModel) -> None:
    sizes = []
    backend = scripted(on_step=lambda inputs: sizes.append(len(inputs.q_indptr) - 1), seconds_per_step=0.002)
    with LLM.over(local_engine(backend), text) as llm, ThreadPoolExecutor(8) as pool:
        params = SamplingParams(temperature=0, max_tokens=30)
        prompts = [[10 + i] * (3 + i) for i in range(8)]
        answers = list(pool.map(lambda prompt: llm.generate(prompt, params), prompts))
        assert [a[0].outputs[0].token_ids for a in answers] == [expected(p, 30) for p in prompts]
        assert max(sizes) == 8
        assert len(sizes) < 8 * 30 / 2


def test_an_interrupt_cancels_everything(text: TextModel) -> None:
    def interrupt(inputs: StepInputs) -> None:
        if inputs.positions.max() == 20:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # as Ctrl-C does
        time.sleep(0.002)

    with LLM.over(local_engine(scripted(on_step=interrupt)), text) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2], [3]], SamplingParams(temperature=0, max_tokens=None))
        assert idle(llm)
        assert llm._engine.stats.generation_tokens < 3 * CONTEXT / 2


def test_closing_ends_calls_that_wait(text: TextModel) -> None:
    entered = threading.Event()

    def step(inputs: StepInputs) -> None:
        entered.set()
        time.sleep(0.005)

    llm = LLM.over(local_engine(scripted(on_step=step)), text)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, [1], SamplingParams(max_tokens=None))
        assert entered.wait(30)
        llm.close()
        with pytest.raises(EngineDead, match="closed"):
            call.result(5)
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([1], GREEDY)


def test_a_dropped_llm_ends_its_engine(text: TextModel) -> None:
    before = set(threading.enumerate())
    llm = LLM.over(local_engine(scripted()), text)
    [thread] = [t for t in threading.enumerate() if t.name == "potok-engine" and t not in before]
    del llm
    thread.join(30)
    assert not thread.is_alive()


def test_inside_an_event_loop_it_warns_and_answers(llm: LLM) -> None:
    async def scenario() -> list[int]:
        with pytest.warns(RuntimeWarning, match="AsyncLLM") as caught:
            [answer] = llm.generate([7], GREEDY)
        assert caught[0].filename == __file__
        return answer.outputs[0].token_ids

    assert asyncio.run(scenario()) == expected([7], 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate([7], GREEDY)


def test_the_progress_bar_counts_answers(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1], [2], [3]], GREEDY, progress=True)
    assert "3/3" in capfd.readouterr().err
    llm.generate([[1], [2], [3]], GREEDY)
    assert capfd.readouterr() == ("", "")


def test_a_missing_model_is_one_sentence() -> None:
    with pytest.raises(LoadError, match=r"nowhere\.gguf"):
        LLM("nowhere.gguf")


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="max_sequences"):
        LLM(max_sequences=3)  # type: ignore[call-arg]
