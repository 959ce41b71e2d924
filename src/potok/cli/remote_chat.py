"""A model behind an OpenAI-compatible server for `potok chat`."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import msgspec

from potok.errors import ClientError, ServerError
from potok.params import SamplingParams

#: What reading a message raises that is not of the expected shape.
NOT_OPENAI = (msgspec.DecodeError, AttributeError, LookupError, TypeError)

TIMEOUT_S = 600.0  # between two parts of an answer


class RemoteModel:
    """Asks the server for its first model; raises ClientError when there is no such server.

    url: with or without the "/v1" at its end.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        if not self._base.startswith(("http://", "https://")):
            raise ClientError(f"--url must begin with http:// or https://, not {url!r}.", "url")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        with self._open("/models", None) as response:
            answer = response.read()
        try:
            self.name = str(msgspec.json.decode(answer)["data"][0]["id"])
        except NOT_OPENAI as error:
            raise ServerError(f"the server at {self._base} does not speak OpenAI's API, or has no model.") from error

    def answer(self, messages: list[dict[str, Any]], params: SamplingParams, show: Callable[[str], None]) -> int:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": messages,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if params.seed is not None:
            body["seed"] = params.seed
        if params.max_tokens is not None:
            body["max_tokens"] = params.max_tokens
        tokens = 0
        with self._open("/chat/completions", msgspec.json.encode(body)) as response:
            try:
                for line in response:
                    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                        continue
                    chunk = _Chunk(msgspec.json.decode(line[5:]))
                    if chunk.text:
                        show(chunk.text)
                    # Texts are counted until the server says how many tokens there were.
                    tokens = chunk.completion_tokens or tokens + bool(chunk.text)
            except NOT_OPENAI as error:
                raise ServerError(f"the server at {self._base} does not speak OpenAI's API.") from error
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"the connection to {self._base} broke: {error}.") from error
        return tokens

    def _open(self, path: str, body: bytes | None) -> http.client.HTTPResponse:
        request = urllib.request.Request(self._base + path, data=body, headers=self._headers)
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read()
            raise ClientError(f"the server refuses, status {error.code}: {_reason(said)}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(
                f"no server answers at {self._base}: {getattr(error, 'reason', error)}.", "url"
            ) from error
        return response

    def close(self) -> None:
        """Nothing stays open between two answers."""


class _Chunk:
    """What one event brought. Raises ServerError when it is an error, and NOT_OPENAI when it is nothing known."""

    def __init__(self, message: Any) -> None:
        if error := message.get("error"):
            raise ServerError(f"the server says: {_message(error)}")
        self.text = "".join(choice.get("delta", {}).get("content") or "" for choice in message.get("choices") or ())
        self.completion_tokens = int((message.get("usage") or {}).get("completion_tokens", 0))


def _reason(body: bytes) -> str:
    try:
        return _message(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "no reason given"


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
