"""The shapes in which prompts and parameters may be given, brought to one shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from potok.errors import ClientError
from potok.params import SamplingParams, shown

Prompt = str | list[int]
Message = Mapping[str, Any]

#: Text, ids, {"prompt": text} or {"prompt_token_ids": ids}; or a list of those.
Prompts = str | Mapping[str, Any] | Sequence[int] | Sequence[str | Sequence[int] | Mapping[str, Any]]

T = TypeVar("T")


def prompts_of(given: Prompts) -> list[Prompt]:
    """A list of prompts. A flat list of ids is one prompt. Raises ClientError for anything else."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [_prompt(given, "prompts")]
    if given and all(isinstance(item, int) for item in given):
        return [_prompt(given, "prompts")]
    return [_prompt(item, f"prompts[{i}]") for i, item in enumerate(given)]


def _prompt(given: Any, field: str) -> Prompt:
    if isinstance(given, Mapping):
        given = given.get("prompt_token_ids", given.get("prompt"))
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        return list(given)
    raise ClientError(
        f"{field} must be text, a list of token ids, or a dict with prompt or prompt_token_ids, not {shown(given)}.",
        "prompts",
        "invalid_type",
    )


def dialogues_of(given: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict[str, Any]]]:
    """A list of dialogues. A flat list of messages is one dialogue."""
    if not given or isinstance(given[0], Mapping):
        return [[dict(message) for message in cast(Sequence[Message], given)]]
    return [[dict(message) for message in dialogue] for dialogue in cast(Sequence[Sequence[Message]], given)]


def one_for_each(
    items: Sequence[T], params: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams
) -> Iterator[tuple[T, SamplingParams]]:
    """Pairs every item with its parameters."""
    if params is None or isinstance(params, SamplingParams):
        params = [params or default] * len(items)
    if len(params) != len(items):
        raise ClientError(
            f"sampling_params has {len(params)} entries for {len(items)} prompts; give one, or one for each.",
            "sampling_params",
            "out_of_range",
        )
    return zip(items, params, strict=True)
