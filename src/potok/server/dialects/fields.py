"""How one field of a request is read: its type, its bounds, what it means to leave it out. No HTTP.

A dialect is a table of Fields. What is not in the table is refused, and so is what we cannot do, unless it asks for
nothing: a client must never believe that a field had an effect when it had none.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from potok.errors import ClientError
from potok.params import MAX_LOGIT_BIAS, Bound

#: A reader takes the field's name and its JSON value (never null) and returns what the dialect works with.
Reader = Callable[[str, Any], Any]

#: Longest value shown in a message.
SHOWN = 40

#: A label is stored nowhere and changes nothing.
MAX_LABEL_CHARS = 512


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `default` stands for a field that is absent or null; `schema` is its part of the OpenAPI page."""

    name: str
    read: Reader
    default: Any = None
    required: bool = False
    schema: Mapping[str, Any] | None = None


def table(*fields: Field) -> dict[str, Field]:
    return {field.name: field for field in fields}


def read(body: Any, fields: Mapping[str, Field]) -> dict[str, Any]:
    """All values of a request, defaults filled in. Raises ClientError naming the first field that is wrong."""
    if not isinstance(body, dict):
        raise ClientError(f"the body must be a JSON object, not {kind(body)}.", None, "invalid_type")
    for name in body:
        if name not in fields:
            raise unknown(name, fields)
    values = {}
    for name, field in fields.items():
        value = body.get(name)
        if value is not None:
            values[name] = field.read(name, value)
        elif field.required:
            given = "null" if name in body else "missing"
            raise ClientError(f"{name} is {given}, but it is required.", name, "missing")
        else:
            values[name] = field.default
    return values


def unknown(name: str, fields: Mapping[str, Field]) -> ClientError:
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.75) if len(name) <= SHOWN else []
    hint = f"did you mean {close[0]}?" if close else "remove it."
    return ClientError(f"unknown field {shown(name)}; {hint}", name[:MAX_LABEL_CHARS], "unknown_field")


_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def kind(value: Any) -> str:
    """What JSON calls it."""
    return _KINDS[type(value)]


def shown(value: Any) -> str:
    """A value in a message, spelt as in JSON and short, whatever it is."""
    if isinstance(value, dict | list):
        return kind(value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge integer"  # Python refuses to spell out thousands of digits
    text = repr(value[: SHOWN + 1]) if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def wrong_type(name: str, wanted: str, value: Any) -> ClientError:
    return ClientError(f"{name} must be {wanted}, not {shown(value)}.", name, "invalid_type")


def _number(bound: Bound) -> Reader:
    wanted = "an integer" if bound.integer else "a number"
    low, high = (int(bound.low), int(bound.high)) if bound.integer else (bound.low, bound.high)

    def read(name: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int if bound.integer else int | float):
            raise wrong_type(name, wanted, value)
        if not low <= value <= high:
            raise ClientError(f"{name} must be from {low} to {high}, not {shown(value)}.", name, "out_of_range")
        return value

    return read


def number(name: str, bound: Bound, default: Any = None) -> Field:
    low, high = (int(bound.low), int(bound.high)) if bound.integer else (bound.low, bound.high)
    schema = {"type": "integer" if bound.integer else "number", "minimum": low, "maximum": high, "default": default}
    return Field(name, _number(bound), default, schema=schema)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)
    return value


def flag(name: str, default: bool | None) -> Field:
    return Field(name, _flag, default, schema={"type": "boolean", "default": default})


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    return value


def text(name: str, *, required: bool = False) -> Field:
    return Field(name, _text, required=required, schema={"type": "string"})


def _label(name: str, value: Any) -> None:
    if len(_text(name, value)) > MAX_LABEL_CHARS:
        raise ClientError(
            f"{name} may have {MAX_LABEL_CHARS} characters, not {len(value)}; shorten it.", name, "out_of_range"
        )


def label(name: str) -> Field:
    """A word about the caller that has no effect on the answer."""
    return Field(name, _label, schema={"type": "string", "maxLength": MAX_LABEL_CHARS})


def _array(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_type(name, "an array", value)
    return value


def array(name: str, *, required: bool = False, items: str = "") -> Field:
    """What the items may be is checked where their bounds are known."""
    return Field(name, _array, (), required, {"type": "array", "items": {"type": items} if items else {}})


def _texts(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong_type(name, "a string or an array of strings", value)
    for i, item in enumerate(value):
        if not isinstance(item, str):
            raise ClientError(f"{name}[{i}] must be a string, not {shown(item)}.", name, "invalid_type")
    return value


def texts(name: str) -> Field:
    """One string or several."""
    one = {"type": "string"}
    return Field(name, _texts, (), schema={"anyOf": [one, {"type": "array", "items": one}]})


_ID = re.compile(r"-?[0-9]{1,10}")


def _bias(name: str, value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object of token ids and numbers", value)
    if len(value) > MAX_LOGIT_BIAS:
        raise ClientError(f"{name} takes at most {MAX_LOGIT_BIAS} entries, not {len(value)}.", name, "out_of_range")
    bias = {}
    for key, number in value.items():
        if not _ID.fullmatch(key):
            raise ClientError(f"{name} keys must be token ids, not {shown(key)}.", name, "invalid_type")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ClientError(f"{name}[{key}] must be a number, not {shown(number)}.", name, "invalid_type")
        bias[int(key)] = number
    return bias


def bias(name: str) -> Field:
    return Field(name, _bias, {}, schema={"type": "object", "additionalProperties": {"type": "number"}})


def unsupported(name: str, neutral: Sequence[Any] = (), why: str = "") -> Field:
    """A field that other servers know. Null, or a value that asks for nothing, is fine; anything else is refused."""

    def read(name: str, value: Any) -> None:
        # In Python True == 1, in JSON they are not the same.
        if not any(type(value) is type(fine) and value == fine for fine in neutral):
            only = f" other than {' or '.join(map(_spelt, neutral))}" if neutral else ""
            raise ClientError(f"{name}{only} is not supported{why and f': {why}'}; remove it.", name, "not_supported")

    return Field(name, read)


def _spelt(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def openapi(fields: Mapping[str, Field]) -> dict[str, Any]:
    """The request body for FastAPI's `openapi_extra`; fields that are not supported are left out."""
    properties = {name: dict(field.schema) for name, field in fields.items() if field.schema is not None}
    required = [name for name, field in fields.items() if field.required]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
