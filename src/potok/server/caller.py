"""Who makes a call, and since when: what a dialect is told beside the body. No HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from potok.errors import ClientError
from potok.params import Sharing, Terms, terms_of


class Door(Protocol):
    """Lets requests in. Both raise ClientError; `ask` comes first, before anything is computed of the prompts."""

    def ask(self, num_requests: int) -> None: ...

    def weigh(self, prompt_tokens: Sequence[int]) -> None:
        """prompt_tokens: of each request."""


class OpenDoor:
    def ask(self, num_requests: int) -> None:
        pass

    def weigh(self, prompt_tokens: Sequence[int]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Caller:
    """namespace: of its API key. arrived_us: of time.monotonic(), when the first byte of its call came.

    timeouts: deadlines that came beside the body, in ms, by their names in the body.
    """

    namespace: str = ""
    arrived_us: int = field(default_factory=lambda: time.monotonic_ns() // 1000)
    timeouts: Mapping[str, int] = field(default_factory=dict)
    door: Door = field(default_factory=OpenDoor)

    def terms(self, values: Mapping[str, Any]) -> Terms:
        """values: of the body's fields."""
        timeouts = {name: self._timeout(name, values[name]) for name in ("timeout_ms", "ttft_timeout_ms")}
        return terms_of(
            Sharing(self.namespace, values["cache_salt"] or ""),
            priority=values["priority"],
            arrived_us=self.arrived_us,
            whole=not values["stream"],
            **timeouts,
        )

    def _timeout(self, name: str, value: int | None) -> int | None:
        beside = self.timeouts.get(name, value)
        if value is not None and value != beside:
            raise ClientError(
                f"{name} is {value}, but the header of that meaning says {beside}; send one of them.", name, "conflict"
            )
        return beside
