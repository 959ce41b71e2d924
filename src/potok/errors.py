"""Every error potok raises on purpose.

PotokError
  ClientError(param, code)   the caller's fault: nothing was computed, nobody else is touched
    Unavailable              the caller may try again later (the server loads, or drains)
      Crowded                ... because others are served, or this caller has had its share
    DeadlineExceeded         the caller's own deadline cannot be met: trying again would not help
  ServerError                ours: this request alone failed
    EngineDead               the engine process ended; every live request ends with this
  LoadError                  a model file or a setting cannot be used; the start ends with exit code 2
"""

from __future__ import annotations

#: What a client that could not be served is told to wait when nobody knows better, in seconds.
RETRY_AFTER_S = 2.0


class PotokError(Exception):
    """Base of all errors raised on purpose. `str(e)` is one sentence for the person who can act on it."""


class ClientError(PotokError):
    """A request that cannot be served as asked.

    param: name of the offending field as the caller spelt it, or None.
    code: short machine-readable reason, e.g. "out_of_range", or None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Unavailable(ClientError):
    """Nothing is wrong with the request, but it cannot be taken now.

    retry_after_s: when to try again, in seconds.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, retry_after_s: float = RETRY_AFTER_S
    ) -> None:
        super().__init__(message, param, code)
        self.retry_after_s = retry_after_s


class Crowded(Unavailable):
    """A bound is reached: of requests that wait, or of what one API key may ask."""


class DeadlineExceeded(ClientError):
    """It could not be answered by the deadline that came with it; `param` is the field of that deadline."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message, param, "deadline_exceeded")


class ServerError(PotokError):
    """This request failed through no fault of its caller."""


class EngineDead(ServerError):
    """The engine process has ended."""


class LoadError(PotokError):
    """A model file, or a setting, that cannot be used. One sentence naming the key or tensor and the offset."""
