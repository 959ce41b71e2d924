"""What a load test is asked for, and how options of the benchmarks are read and refused."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields

from potok.errors import ClientError


def flag(name: str) -> str:
    """The command's option for a field of this name."""
    return "--" + name.replace("_", "-")


def at_least(options: object, least: int, *names: str) -> None:
    """Raises ClientError naming the first of these fields that is smaller."""
    for name in names:
        value = getattr(options, name)
        if value < least:
            raise ClientError(f"{flag(name)} must be at least {least}, not {value}.", name)


def above_zero(options: object, *names: str) -> None:
    """Raises ClientError naming the first of these fields that is not."""
    for name in names:
        value = getattr(options, name)
        if not value > 0:
            raise ClientError(f"{flag(name)} must be above 0, not {value}.", name)


def some_of(name: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raises ClientError unless `values` are some of `known`, each once."""
    if not values or not set(values) <= set(known) or len(set(values)) < len(values):
        raise ClientError(f"{flag(name)} must be some of {','.join(known)}, not {','.join(values)!r}.", name)


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Those that an option lists, separated by commas."""
    try:
        return tuple(int(part) for part in _parts(text))
    except ValueError:
        raise _unreadable(name, "whole numbers", text) from None


def numbers(name: str, text: str) -> tuple[float, ...]:
    """As whole_numbers, of any numbers."""
    try:
        return tuple(float(part) for part in _parts(text))
    except ValueError:
        raise _unreadable(name, "numbers", text) from None


def words(text: str) -> tuple[str, ...]:
    """Those that an option lists, separated by commas."""
    return tuple(_parts(text))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _unreadable(name: str, kind: str, text: str) -> ClientError:
    return ClientError(f"{flag(name)} must be {kind} separated by commas, not {text!r}.", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Fields are named after the command's options.

    clients is used when rate is empty. duration: of the arrivals at each rate. seed: of prompts and arrivals.
    prompt_tokens and output_tokens: of each request; the first shared_prefix_tokens of all prompts are the same.
    """

    url: str = "http://127.0.0.1:8000"
    clients: tuple[int, ...] = (1, 8, 32, 100)
    requests_per_client: int = 3
    rate: tuple[float, ...] = ()  # requests/s
    duration: float = 60.0  # seconds
    prompt_tokens: int = 48
    output_tokens: int = 128
    shared_prefix_tokens: int = 0
    endpoint: str = "completions"  # or "chat"
    ttft_ms: float = 2000.0
    gap_ms: float = 150.0
    model: str | None = None  # None: the first that /v1/models names
    api_key: str | None = None
    seed: int = 0
    timeout: float = 600.0  # seconds, of one request

    def check(self) -> None:
        """Raises ClientError naming the first option that makes no sense."""
        at_least(self, 1, "requests_per_client", "prompt_tokens", "output_tokens")
        above_zero(self, "duration", "ttft_ms", "gap_ms", "timeout")
        if not self.rate and not (self.clients and all(c >= 1 for c in self.clients)):
            raise ClientError("--clients must be numbers from 1 up, such as 1,8,32.", "clients")
        if not all(0 < rate <= 10_000 for rate in self.rate):
            raise ClientError("--rate must be numbers above 0 and at most 10000 (requests a second).", "rate")
        if self.endpoint not in {"completions", "chat"}:
            raise ClientError(f"--endpoint must be completions or chat, not {self.endpoint}.", "endpoint")
        if not 0 <= self.shared_prefix_tokens < self.prompt_tokens:
            raise ClientError(
                f"--shared-prefix-tokens must be from 0 to {self.prompt_tokens - 1}, that is below --prompt-tokens.",
                "shared_prefix_tokens",
            )

    def command(self) -> str:
        """The command line that asks for the same; the API key is not in it."""
        line = ["potok", "bench", "serve"]
        always = {"url", "seed"} | (set() if self.rate else {"clients"})
        unused = {"api_key"} | ({"clients", "requests_per_client"} if self.rate else set())
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in always or (field.name not in unused and value != field.default):
                text = ",".join(f"{v:g}" for v in value) if isinstance(value, tuple) else str(value)
                line += [flag(field.name), text]
        return shlex.join(line)
