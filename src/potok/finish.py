"""Why a request ended: the one word that the scheduler, the wire and the dialects share. Standard library only."""

from __future__ import annotations

from enum import IntEnum


class Finish(IntEnum):
    STOP = 0  # an end id or a stop id was produced
    LENGTH = 1  # max_tokens, or the context is full
    CANCELLED = 2  # the client left, or a stop string matched on the API side
    ERROR = 3  # this request failed; a message goes with it
    TIMEOUT = 4  # it could not meet the deadline that its caller set
