"""LLM: the whole engine in the calling process, for scripts. Calls from any number of threads share one batch."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from potok.config import EngineConfig
from potok.engine.build import build_engine
from potok.engine.local import LocalEngine
from potok.errors import PotokError
from potok.finish import Finish
from potok.frontend import Resolved, TextModel, check_priority, failure, open_text_model, resolve
from potok.llm.outputs import CompletionOutput, RequestOutput, of_prompt
from potok.llm.prompts import Message, Prompt, Prompts, dialogues_of, one_for_each, priorities_of, prompts_of
from potok.llm.settings import Settings
from potok.params import SamplingParams, Sharing, Terms, check_salt, terms_of
from potok.protocol import Chunk
from potok.text.assembler import ChoiceAssembler, PromptAssembler
from potok.weights.default_model import find_default_model


class _Asked(NamedTuple):
    prompt: str | None
    ids: list[int]
    params: SamplingParams
    resolved: Resolved
    terms: Terms


class _Choice:
    """One request in flight on behalf of a call. prompt: its first choice has it. id: the engine's, None at its end."""

    __slots__ = ("assembler", "id", "output", "prompt", "resolved")

    def __init__(
        self, output: CompletionOutput, assembler: ChoiceAssembler, resolved: Resolved, prompt: PromptAssembler | None
    ) -> None:
        self.output = output
        self.assembler = assembler
        self.resolved = resolved
        self.prompt = prompt
        self.id: int | None = None

    def add(self, chunk: Chunk) -> None:
        if self.prompt is not None and not self.prompt.told:
            self.prompt.push(chunk)
        self.output.add(self.assembler.push(self.resolved.wanted(chunk)))


class LLM:
    """A model in this process.

        with LLM() as llm:
            [answer] = llm.generate("The capital of Japan is", SamplingParams(temperature=0))
            print(answer.outputs[0].text)

    model: path of a GGUF file; None is the default model. Settings are those of `potok serve` (see EngineConfig).
    Raises LoadError when model or settings cannot be used. Safe to call from many threads, and it
    blocks: inside an event loop use AsyncLLM. The engine ends with `close`, or when the object is dropped.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **settings: Unpack[Settings]) -> None:
        path = find_default_model() if model is None else Path(model)
        text = open_text_model(path)
        self._bind(LocalEngine(build_engine(EngineConfig(model=str(path), **settings))), text)

    @classmethod
    def over(cls, engine: LocalEngine, text: TextModel) -> Self:
        """An LLM over an engine that runs already. `close` ends that engine too."""
        self = cls.__new__(cls)
        self._bind(engine, text)
        return self

    def _bind(self, engine: LocalEngine, text: TextModel) -> None:
        self._engine = engine
        self._text = text
        self._numbers = count()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        priority: int | Sequence[int] = 0,
        timeout_ms: int | None = None,
        ttft_timeout_ms: int | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt; answers come in the order of the prompts.

        prompts: text, token ids, a dict {"prompt": text} or {"prompt_token_ids": ids}, or a list of these. A dict may
        have a "cache_salt" too: only prompts with the same salt share their KV.
        sampling_params: one for all, or one for each; None is the default, 16 tokens at temperature 1.
        progress: draws a bar on the terminal.
        priority: of all, or of each; lower comes earlier; needs `schedule_policy="priority"`.
        timeout_ms, ttft_timeout_ms: from now until every answer ends with what is there ("length"), and until it must
        have begun.
        Raises ClientError, before anything is computed, when a prompt or parameter is out of bounds, ServerError,
        after all others have ended, when one failed, and DeadlineExceeded when none has a token by a deadline.
        KeyboardInterrupt cancels all.
        """
        listed = prompts_of(prompts)
        terms = _terms(priorities_of(priority, len(listed)), timeout_ms, ttft_timeout_ms)
        asked = [
            self._ask(prompt, params, f"prompts[{i}]" if len(listed) > 1 else "prompt", terms[i])
            for i, (prompt, params) in enumerate(one_for_each(listed, sampling_params, SamplingParams()))
        ]
        return self._answer(asked, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        timeout_ms: int | None = None,
        ttft_timeout_ms: int | None = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answers a dialogue, or a list of dialogues, of messages {"role", "content"}, as `generate` does prompts.

        sampling_params: None is the rest of the context at temperature 1. cache_salt: of all these dialogues.
        """
        salt = "" if cache_salt is None else check_salt(cache_salt)
        dialogues = dialogues_of(messages)
        terms = _terms(priorities_of(priority, len(dialogues)), timeout_ms, ttft_timeout_ms)
        encoded = [self._text.chat.encode(dialogue, **template_arguments) for dialogue in dialogues]
        asked = [
            self._ask(Prompt(ids, salt), params, "messages", terms[i])
            for i, (ids, params) in enumerate(one_for_each(encoded, sampling_params, SamplingParams(max_tokens=None)))
        ]
        return self._answer(asked, progress)

    def _ask(self, prompt: Prompt, params: SamplingParams, field: str, terms: Terms) -> _Asked:
        tokenizer = self._text.tokenizer
        content, salt = prompt
        ids = tokenizer.encode_prompt(content, field) if isinstance(content, str) else content
        check_priority(terms.priority, self._engine.info)
        resolved = resolve(ids, params, self._engine.info, tokenizer.end_ids, field)
        terms = terms._replace(sharing=Sharing(salt=salt))
        return _Asked(content if isinstance(content, str) else None, ids, params, resolved, terms)

    def _answer(self, asked: list[_Asked], progress: bool) -> list[RequestOutput]:
        if _in_event_loop():
            warnings.warn(
                "LLM blocks the running event loop until all answers are there; use potok.AsyncLLM inside async code.",
                RuntimeWarning,
                stacklevel=3,
            )
        outputs = [
            RequestOutput(
                str(next(self._numbers)), one.prompt, one.ids, [CompletionOutput(i) for i in range(one.params.n)]
            )
            for one in asked
        ]
        prompts = [PromptAssembler(self._text.tokenizer, one.ids, one.params) for one in asked]
        choices = [
            _Choice(
                output,
                ChoiceAssembler(self._text.tokenizer, one.params),
                one.resolved,
                None if output.index else prompt,
            )
            for one, answer, prompt in zip(asked, outputs, prompts, strict=True)
            for output in answer.outputs
        ]
        with _bar(len(choices), progress) as ended:
            self._settle(asked, choices, ended)
        for answer, prompt in zip(outputs, prompts, strict=True):
            answer.prompt_logprobs = of_prompt(prompt.logprobs())
            answer.num_cached_tokens = prompt.cached_tokens
        return outputs

    def _settle(self, asked: list[_Asked], choices: list[_Choice], ended: Callable[[], None]) -> None:
        """Runs all choices to their ends; the engine's thread only appends to a queue, the text is made here."""
        engine = self._engine
        chunks: SimpleQueue[tuple[_Choice, Chunk]] = SimpleQueue()
        first_error: PotokError | None = None
        too_late: PotokError | None = None
        live = len(choices)
        try:
            waiting = iter(choices)
            for one in asked:
                for index, sampling in enumerate(one.resolved.samplings):
                    choice = next(waiting)
                    max_tokens = one.resolved.to_compute(index)
                    if max_tokens == 0:
                        chunks.put((choice, Chunk(0, [], Finish.LENGTH)))
                    else:
                        sink = partial(_put, chunks, choice)
                        choice.id = engine.submit(one.ids, max_tokens, sampling, sink, one.terms)
            while live:
                choice, chunk = chunks.get()
                if choice.output.finish_reason is not None:
                    continue  # the engine's last word after a stop string
                if chunk.finish is Finish.ERROR or chunk.finish is Finish.CANCELLED:
                    first_error = first_error or failure(chunk, engine)
                    choice.output.finish_reason = "error"
                else:
                    if chunk.finish is Finish.TIMEOUT:
                        too_late = too_late or failure(chunk, engine)
                    choice.add(chunk)
                if choice.output.finish_reason is not None:
                    live -= 1
                    ended()
                    if chunk.finish is None and choice.id is not None:
                        engine.cancel(choice.id)
                    choice.id = None
        finally:
            for choice in choices:
                if choice.id is not None:
                    engine.cancel(choice.id)
        if too_late is not None and not any(choice.output.token_ids for choice in choices):
            first_error = first_error or too_late
        if first_error is not None:
            raise first_error

    def close(self) -> None:
        """Ends the engine; calls that still wait on other threads fail. May be called again."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _terms(priorities: list[int], timeout_ms: int | None, ttft_timeout_ms: int | None) -> list[Terms]:
    """Of each prompt; all count from now."""
    now_us = time.monotonic_ns() // 1000
    timeouts = {"timeout_ms": timeout_ms, "ttft_timeout_ms": ttft_timeout_ms}
    return [terms_of(Sharing(), priority=one, arrived_us=now_us, whole=True, **timeouts) for one in priorities]


def _put(chunks: SimpleQueue[tuple[_Choice, Chunk]], choice: _Choice, chunk: Chunk) -> None:
    chunks.put((choice, chunk))


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Yields what to call when one of `total` has ended."""
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("", total=total)
        yield partial(bar.advance, task)
