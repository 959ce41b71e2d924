"""What one streamed generation said: token times and counts, from the events of either OpenAI endpoint."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import msgspec

from potok.bench.sse import SseParser


@dataclass(slots=True)
class Record:
    """One request as the client saw it. Times are seconds on one monotonic clock.

    due: when it should have been sent; waiting for a free connection counts against the server.
    times: arrival of each delta that held text. A role chunk and an empty delta are not tokens.
    prompt_tokens, output_tokens: the server's count (its usage chunk), or None when it sent none.
    error: kind of failure, or None. finish: the finish_reason.
    """

    due: float
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish: str | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        """The server's count where it gave one, else the number of deltas that held text."""
        return len(self.times) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text, or None when none came."""
        return self.times[0] - self.due if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive deltas."""
        return [b - a for a, b in itertools.pairwise(self.times)]


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None  # of a completion
    delta: _Delta | None = None  # of a chat completion
    finish_reason: str | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_EVENTS = msgspec.json.Decoder(_Event)


class StreamReader:
    """Feeds the body of an event stream into a Record. `record.error` is set by an error event or by bad JSON."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._sse = SseParser()
        self._done = False

    def feed(self, body: bytes, now: float) -> None:
        """Takes the bytes that arrived at `now`; several tokens in one read share its time."""
        record = self._record
        for data in self._sse.feed(body):
            if data == b"[DONE]":
                self._done = True
                continue
            try:
                event = _EVENTS.decode(data)
            except msgspec.DecodeError as error:
                record.error = f"an event that is no OpenAI chunk: {error}"
                continue
            if len(event.error) and event.error != b"null":
                record.error = f"error event: {error_text(bytes(event.error))}"
            if event.usage is not None:
                record.prompt_tokens = event.usage.prompt_tokens
                record.output_tokens = event.usage.completion_tokens
            for choice in event.choices:
                delta = choice.delta
                if choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)):
                    record.times.append(now)
                if choice.finish_reason:
                    record.finish = choice.finish_reason

    def end(self) -> None:
        """The response is complete. A stream without a finish_reason and a [DONE] was cut."""
        if self._record.error is None and not (self._done and self._record.finish):
            missing = "[DONE]" if self._record.finish else "finish_reason"
            self._record.error = f"the stream ended without {missing}"


def error_text(body: bytes) -> str:
    """The message in an error object of any of the usual shapes, else the start of the text."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        value = body.decode("utf-8", "replace")
    for _ in range(3):  # {"error": {"message": ...}}, {"message": ...}, {"detail": ...}
        if not isinstance(value, dict):
            break
        value = value.get("error") or value.get("message") or value.get("detail") or str(value)
    return " ".join(str(value).split())[:200]
