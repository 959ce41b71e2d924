"""How one OpenAI-compatible server is asked: which fields it takes, how it counts prompts, and prompts that differ."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from potok.bench.client import Client
from potok.bench.stream import Record
from potok.bench.workloads import prompt
from potok.errors import ClientError

PROBE_OUTPUT_TOKENS = 4

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Wording:
    """Which prompts: functions of the seed; the first `shared_words` are the same in all."""

    seed: int
    shared_words: int = 0


class Asker:
    """Streaming requests to one server, no two of them with the same prompt.

    endpoint: a key of PATHS. model: None for the first one that the server names. notes: what was learned about the
    server that qualifies the figures, a sentence each.
    """

    def __init__(self, client: Client, endpoint: str, model: str | None, wording: Wording) -> None:
        self.notes: list[str] = []
        self.model = model or ""
        self._client = client
        self._endpoint = endpoint
        self._wording = wording
        #: Better measurements, but a server may not know them: each is dropped when the server refuses it by name.
        self._optional: dict[str, Any] = {
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        self._extra_tokens = 0  # of a prompt, that are not its words
        self._next_index = 0

    async def prepare(self, prompt_tokens: int) -> None:
        """Learns with a few short requests which fields the server takes, and how many words make a prompt.

        Raises ClientError when the server cannot be used at all.
        """
        self.model = self.model or await _first_model(self._client)
        counted = await self._probe(prompt_tokens)
        if counted is None:
            self.notes.append(
                "The server reports no usage: a text delta is taken for a token, a word for a prompt token."
            )
            return
        if counted != prompt_tokens:
            self._extra_tokens = counted - prompt_tokens
            counted = await self._probe(prompt_tokens)
        if counted != prompt_tokens:
            self.notes.append(
                f"Prompts are {counted} tokens by the server's count, where {prompt_tokens} were asked for."
            )

    def body(self, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        """Of the next request."""
        shared = self._wording.shared_words
        num_words = max(shared + 1, prompt_tokens - self._extra_tokens)
        text = prompt(self._wording.seed, self._next_index, num_words, shared)
        self._next_index += 1
        shape = {"prompt": text} if self._endpoint == "completions" else {"messages": [_message(text)]}
        return {"model": self.model, "max_tokens": output_tokens, "stream": True} | shape | self._optional

    async def ask(self, body: dict[str, Any], record: Record) -> None:
        await self._client.stream(PATHS[self._endpoint], body, record)

    async def _probe(self, prompt_tokens: int) -> int | None:
        """Prompt tokens that the server counts for a prompt of this length, or None when it does not say."""
        while True:
            record = Record(due=time.perf_counter())
            await self.ask(self.body(prompt_tokens, PROBE_OUTPUT_TOKENS), record)
            if record.error is None:
                return record.prompt_tokens
            self._drop_refused_field(record.error)

    def _drop_refused_field(self, error: str) -> None:
        refused = [name for name in self._optional if name in error] if error.startswith("HTTP 4") else []
        if not refused:
            raise ClientError(f"The server did not answer a first short request: {error}.", "url")
        for name in refused:
            del self._optional[name]
            self.notes.append(f"The server does not take {name}, so it was left out.")


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def _first_model(client: Client) -> str:
    status, body = await client.get("/v1/models")
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        raise ClientError(f"/v1/models names no model (HTTP {status}); name it with --model.", "model") from None
