"""Every error potok raises on purpose.

PotokError
  ClientError(param, code)   the caller's fault: nothing was computed, nobody else is touched
    Unavailable              the caller may try again later (draining, queue full)
  ServerError                ours: this request alone failed
    EngineDead               the engine process ended; every live request ends with this
  LoadError                  a model file or a setting cannot be used; the start ends with exit code 2
"""

from __future__ import annotations


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
    """Nothing is wrong with the request, but it cannot be taken now."""


class ServerError(PotokError):
    """This request failed through no fault of its caller."""


class EngineDead(ServerError):
    """The engine process has ended."""


class LoadError(PotokError):
    """A model file, or a setting, that cannot be used. One sentence naming the key or tensor and the offset."""
