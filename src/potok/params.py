"""SamplingParams: what a caller may ask of one generation, and the bounds of every field."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from potok.errors import ClientError


class Bound(NamedTuple):
    """Legal values of one numeric field, both ends included."""

    low: float
    high: float
    integer: bool = False


#: The one table of bounds; the HTTP dialects and `SamplingParams.check` both read it.
BOUNDS: dict[str, Bound] = {
    "n": Bound(1, 128, integer=True),
    "temperature": Bound(0.0, 2.0),
    "top_p": Bound(1e-6, 1.0),
    "top_k": Bound(-1, 2**31 - 1, integer=True),  # 0 and -1: off
    "min_p": Bound(0.0, 1.0),
    "seed": Bound(-(2**63), 2**63 - 1, integer=True),
    "presence_penalty": Bound(-2.0, 2.0),
    "frequency_penalty": Bound(-2.0, 2.0),
    "repetition_penalty": Bound(1e-2, 100.0),
    "max_tokens": Bound(0, 2**31 - 1, integer=True),
    "min_tokens": Bound(0, 2**31 - 1, integer=True),
    "logprobs": Bound(0, 20, integer=True),
    "prompt_logprobs": Bound(0, 20, integer=True),
    "logit_bias": Bound(-100.0, 100.0),  # of each value
}

#: The same for what a call may say beside its parameters: see `Terms`.
TERM_BOUNDS: dict[str, Bound] = {
    "priority": Bound(-(2**31), 2**31 - 1, integer=True),
    "timeout_ms": Bound(1, 86_400_000, integer=True),  # a day
    "ttft_timeout_ms": Bound(1, 86_400_000, integer=True),
}

#: Fields of BOUNDS for which None means something.
MAY_BE_NONE = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SALT_CHARS = 512


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one generation; field names and defaults follow vLLM where it has them.

    temperature: 0 is greedy; below 1e-5 is taken as 0.
    top_k: 0 or -1 is off. min_p: relative to the most probable token.
    presence_penalty, frequency_penalty: over the output; repetition_penalty: over prompt and output.
    logprobs: None, or how many alternatives to report beside the chosen token (0 to 20), from raw logits.
    prompt_logprobs: the same for each token of the prompt but the first; they are computed anew, cached or not.
    max_tokens: None is the rest of the context.
    seed: None draws one; with a seed, the answer is the same every time.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = msgspec.field(default_factory=list)  # a single string is taken as a list of one
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])

    def check(self, vocab_size: int) -> None:
        """Raises ClientError naming the first field that is out of its bounds."""
        for name in BOUNDS:
            value = getattr(self, name)
            if name != "logit_bias" and not (value is None and name in MAY_BE_NONE):
                check_number(name, value)
        check_stop(self.stop)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)
        check_logit_bias(self.logit_bias, vocab_size)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ClientError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; lower min_tokens.",
                "min_tokens",
                "out_of_range",
            )


class Sharing(NamedTuple):
    """With whom a call may share KV: with calls for which both are equal.

    namespace: of its API key, given by the server. salt: `cache_salt`, the caller's own; empty: none.
    """

    namespace: str = ""
    salt: str = ""


#: Of a call that said nothing, to a server without keys.
SHARED_BY_ALL = Sharing()


class Terms(NamedTuple):
    """On which a call is served; each of its requests has the same.

    priority: lower comes earlier, where the schedule policy is "priority".
    arrived_us, first_by_us, ends_by_us: of time.monotonic(), in microseconds: when the call came, when its first token
    comes at the latest, and its last; 0: not said.
    whole: nobody reads the answer before it is complete.
    """

    sharing: Sharing = SHARED_BY_ALL
    priority: int = 0
    arrived_us: int = 0
    first_by_us: int = 0
    ends_by_us: int = 0
    whole: bool = False


#: Of a call that said nothing.
USUAL_TERMS = Terms()


def terms_of(
    sharing: Sharing,
    *,
    priority: int = 0,
    arrived_us: int,
    timeout_ms: int | None = None,
    ttft_timeout_ms: int | None = None,
    whole: bool,
) -> Terms:
    """Terms with deadlines that count from the arrival. Raises ClientError naming what is out of its bounds."""
    check_number("priority", priority, TERM_BOUNDS)
    for name, value in (("timeout_ms", timeout_ms), ("ttft_timeout_ms", ttft_timeout_ms)):
        if value is not None:
            check_number(name, value, TERM_BOUNDS)
    first_by_us = 0 if ttft_timeout_ms is None else arrived_us + 1000 * ttft_timeout_ms
    ends_by_us = 0 if timeout_ms is None else arrived_us + 1000 * timeout_ms
    return Terms(sharing, priority, arrived_us, first_by_us, ends_by_us, whole)


def shown(value: Any) -> str:
    """A value in a message: short and quickly made, whatever it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to spell out thousands of digits
        return "a huge value"


def check_number(name: str, value: Any, bounds: Mapping[str, Bound] = BOUNDS) -> None:
    """Checks `value` against bounds[name]; booleans, text, None and non-finite numbers are refused."""
    bound = bounds[name]
    kind = "an integer" if bound.integer else "a number"
    ok = isinstance(value, int) if bound.integer else isinstance(value, int | float)
    if not ok or isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise ClientError(f"{name} must be {kind}, not {shown(value)}.", name, "invalid_type")
    if not bound.low <= value <= bound.high:
        low, high = (int(bound.low), int(bound.high)) if bound.integer else (bound.low, bound.high)
        raise ClientError(f"{name} must be from {low} to {high}, not {shown(value)}.", name, "out_of_range")


def check_stop(stop: Sequence[str]) -> None:
    _check_list("stop", stop, "strings", MAX_STOP_STRINGS)
    for text in stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
            raise ClientError(
                f"each stop string must be text of 1 to {MAX_STOP_CHARS} characters, not {shown(text)}.",
                "stop",
                "out_of_range",
            )


def check_salt(salt: Any, name: str = "cache_salt") -> str:
    """The salt. An empty one is refused: it would share with everybody, which is what a salt is there to prevent."""
    if not isinstance(salt, str):
        raise ClientError(f"{name} must be a string, not {shown(salt)}.", name, "invalid_type")
    if not 0 < len(salt) <= MAX_SALT_CHARS:
        raise ClientError(f"{name} must have 1 to {MAX_SALT_CHARS} characters, not {len(salt)}.", name, "out_of_range")
    if not salt.isascii() and any("\ud800" <= char <= "\udfff" for char in salt):
        raise ClientError(f"{name} has half of a surrogate pair; send whole characters.", name, "invalid_text")
    return salt


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int, limit: int) -> None:
    _check_list(name, ids, "token ids", limit)
    for i, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ClientError(
                f"{name}[{i}] must be a token id from 0 to {vocab_size - 1}, not {shown(token)}.", name, "out_of_range"
            )


def check_logit_bias(bias: Mapping[int, float], vocab_size: int) -> None:
    if not isinstance(bias, Mapping):
        raise ClientError(
            f"logit_bias must be a dict from token ids to numbers, not {shown(bias)}.", "logit_bias", "invalid_type"
        )
    if len(bias) > MAX_LOGIT_BIAS:
        raise ClientError(
            f"logit_bias takes at most {MAX_LOGIT_BIAS} entries, not {len(bias)}.", "logit_bias", "out_of_range"
        )
    for token, value in bias.items():
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ClientError(
                f"logit_bias keys must be token ids from 0 to {vocab_size - 1}, not {shown(token)}.",
                "logit_bias",
                "out_of_range",
            )
        check_number("logit_bias", value)


def _check_list(name: str, value: Any, of: str, limit: int) -> None:
    if not isinstance(value, list | tuple):  # a text is a sequence too, of what nobody means
        raise ClientError(f"{name} must be a list of {of}, not {shown(value)}.", name, "invalid_type")
    if len(value) > limit:
        raise ClientError(f"{name} takes at most {limit} {of}, not {len(value)}.", name, "out_of_range")
