"""The shapes in which prompts and parameters may be given, brought to one shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from potok.errors import ClientError
from potok.params import SamplingParams, check_salt, shown

Message = Mapping[str, Any]

#: Text, ids, or a dict {"prompt": text} or {"prompt_token_ids": ids}, perhaps with a "cache_salt" beside it.
OnePrompt = str | Sequence[int] | Mapping[str, Any]

#: One prompt, or a list of prompts.
Prompts = OnePrompt | Sequence[OnePrompt]


class Prompt(NamedTuple):
    """content: text or ids. salt: empty where none was given."""

    content: str | list[int]
    salt: str = ""


T = TypeVar("T")


def prompts_of(given: Prompts) -> list[Prompt]:
    """A list of prompts. A flat list of ids is one prompt. Raises ClientError for anything else."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [prompt_of(given, "prompts")]
    if given and all(isinstance(item, int) for item in given):
        return [prompt_of(given, "prompts")]
    return [prompt_of(item, f"prompts[{i}]") for i, item in enumerate(given)]


def prompt_of(given: Any, field: str) -> Prompt:
    """One prompt. Raises ClientError when it has none of its shapes."""
    salt = ""
    if isinstance(given, Mapping):
        if given.get("cache_salt") is not None:
            salt = check_salt(given["cache_salt"])
        given = given.get("prompt_token_ids", given.get("prompt"))
    if isinstance(given, str):
        return Prompt(given, salt)
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        return Prompt(list(given), salt)
    raise ClientError(
        f"{field} must be text, a list of token ids, or a dict with prompt or prompt_token_ids, not {shown(given)}.",
        field.partition("[")[0],
        "invalid_type",
    )


def dialogues_of(given: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict[str, Any]]]:
    """A list of dialogues. A flat list of messages is one dialogue."""
    if not given or isinstance(given[0], Mapping):
        return [[dict(message) for message in cast(Sequence[Message], given)]]
    return [[dict(message) for message in dialogue] for dialogue in cast(Sequence[Sequence[Message]], given)]


def priorities_of(given: int | Sequence[int], num_prompts: int) -> list[int]:
    """One for each prompt. Their bounds are checked later."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [given] * num_prompts  # type: ignore[list-item]
    if len(given) != num_prompts:
        raise ClientError(
            f"priority has {len(given)} entries for {num_prompts} prompts; give one, or one for each.",
            "priority",
            "out_of_range",
        )
    return list(given)


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
