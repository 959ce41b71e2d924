"""potok chat: a dialogue in the terminal, with a model of this machine or with any OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Annotated, Any, Protocol, TextIO

import typer

from potok.cli import options
from potok.cli.local_chat import LocalModel
from potok.cli.remote_chat import RemoteModel
from potok.errors import ClientError, PotokError
from potok.params import SamplingParams

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  gives input() line editing and history, where the system has it

HELP = "/clear forgets the dialogue, /exit leaves; Ctrl-C stops an answer."

#: Control characters that a model must not send to a terminal; tab and newline may pass.
_UNPRINTABLE = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}

Message = dict[str, Any]


class Model(Protocol):
    """Whoever answers. Raises PotokError."""

    name: str

    def answer(self, messages: list[Message], params: SamplingParams, show: Callable[[str], None]) -> int:
        """Calls `show` with each part of the answer's text as it comes; returns how many tokens it had."""
        ...

    def close(self) -> None: ...


def register(app: typer.Typer) -> None:
    app.command(help="Talk to a model in the terminal. With a prompt on stdin: answer it and end.")(chat)


def chat(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to the OpenAI-compatible server at this address instead.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="For --url.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 always takes the most probable token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample from the most probable tokens that sum to this.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.", show_default="the rest of the context")
    ] = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KvCacheMemory = None,
    kv_cache_tokens: options.KvCacheTokens = None,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    threads: options.Threads = None,
    kv_cache_dtype: options.KvCacheDtype = "f16",
    activation_bits: options.ActivationBits = 8,
) -> None:
    prompt = None if sys.stdin.isatty() else read_prompt(sys.stdin)
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    opened: Model
    if url is not None:
        opened = RemoteModel(url, api_key)
    else:
        config = options.engine_config(
            options.model_path(model, model_option),
            max_num_seqs=1,  # one person talks
            max_model_len=max_model_len,
            kv_cache_memory=kv_cache_memory,
            kv_cache_tokens=kv_cache_tokens,
            enable_prefix_caching=enable_prefix_caching,
            threads=threads,
            kv_cache_dtype=kv_cache_dtype,
            activation_bits=activation_bits,
        )
        opened = LocalModel(config)
    with contextlib.closing(opened):
        dialogue = Dialogue(opened, params, system, sys.stdout, sys.stderr)
        if prompt is None:
            print(f"{opened.name}. {HELP}", file=sys.stderr)
            talk(dialogue, read=lambda: input("> "))
        else:
            dialogue.ask(prompt)


def read_prompt(source: TextIO) -> str:
    """All of it. Raises ClientError when that is nothing, or no text."""
    try:
        prompt = source.read().strip()
    except UnicodeDecodeError as error:
        raise ClientError(f"the prompt on stdin is not {error.encoding} text.", "prompt") from error
    if not prompt:
        raise ClientError("there is no prompt; give one on stdin.", "prompt")
    return prompt


def talk(dialogue: Dialogue, read: Callable[[], str]) -> None:
    """Until /exit or the end of the input. What goes wrong with one answer is said, and the next may be asked for."""
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line == "/clear":
            dialogue.clear()
        elif line.startswith("/"):
            dialogue.remark(HELP)
        elif line:
            try:
                dialogue.ask(line)
            except PotokError as error:
                dialogue.remark(str(error))
            except KeyboardInterrupt:
                dialogue.remark("stopped")


class Dialogue:
    """What was said so far. Answers go to `out` as they come, remarks to `notes`."""

    def __init__(self, model: Model, params: SamplingParams, system: str | None, out: TextIO, notes: TextIO) -> None:
        self._model = model
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[Message] = []
        self._out = out
        self._notes = notes

    def clear(self) -> None:
        self._messages.clear()

    def remark(self, text: str) -> None:
        print(text, file=self._notes, flush=True)

    def ask(self, question: str) -> None:
        """A question that gets no answer, for whatever reason, is forgotten; half an answer is kept."""
        turn = Turn(self._out)
        asked = {"role": "user", "content": question}
        try:
            tokens = self._model.answer([*self._opening, *self._messages, asked], self._params, turn.show)
        finally:
            if turn.text:
                self._messages += [asked, {"role": "assistant", "content": turn.text}]
                print(file=self._out, flush=True)
        self.remark(turn.speed(tokens))


class Turn:
    """One answer while it comes in."""

    def __init__(self, out: TextIO) -> None:
        self.text = ""
        self._out = out
        self._start = perf_counter()
        self._first: float | None = None

    def show(self, text: str) -> None:
        if self._first is None:
            self._first = perf_counter()
        self.text += text
        self._out.write(text.translate(_UNPRINTABLE))
        self._out.flush()

    def speed(self, tokens: int) -> str:
        """The first token has its own time, for it waits for the whole prompt."""
        end = perf_counter()
        first = end if self._first is None else self._first
        rate = (tokens - 1) / (end - first) if tokens > 1 and end > first else 0.0
        return f"[{tokens} tokens, {rate:.1f} tok/s, first after {first - self._start:.2f} s]"
