"""The messages of a chat as templates expect them, from what clients send."""

from __future__ import annotations

import json
from typing import Any

from potok.errors import ClientError

ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise(messages: Any, *, knows_developer: bool, knows_null: bool) -> list[dict[str, Any]]:
    """A new list; every content is text, or None where there are only tool calls and the template knows_null.

    knows_developer: the template has a role "developer" of its own; else it is "system".
    Raises ClientError naming the first message that is wrong and what may stand there.
    """
    if not isinstance(messages, list) or not messages:
        raise ClientError("messages must be a list of at least one message.", "messages", "invalid_type")
    return [_message(message, f"messages[{i}]", knows_developer, knows_null) for i, message in enumerate(messages)]


def _message(message: Any, at: str, knows_developer: bool, knows_null: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ClientError(f"{at} must be an object with role and content.", at, "invalid_type")
    role = message.get("role")
    if role not in ROLES:
        what = "is missing" if "role" not in message else f"is {role!r:.40}"
        raise ClientError(f"{at}.role {what}; it must be one of {', '.join(ROLES)}.", f"{at}.role", "invalid_role")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ClientError(f"{at}.tool_calls must be a list of objects.", f"{at}.tool_calls", "invalid_type")
    content: str | None
    if message.get("content") is not None:
        content = _text(message["content"], f"{at}.content")
    elif role == "assistant" and calls:
        content = None if knows_null else ""
    else:
        raise ClientError(
            f"{at}.content is null or missing; only an assistant message with tool_calls may have none.",
            f"{at}.content",
            "invalid_type",
        )
    plain = {**message, "role": "system" if role == "developer" and not knows_developer else role, "content": content}
    if calls:
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _text(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ClientError(
            f"{at} must be text, or a list of text parts, not {type(content).__name__}.", at, "invalid_type"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ClientError(
                f"{at}[{i}] has type {kind!r:.40}; this model takes text only: send parts of type 'text'.",
                f"{at}[{i}].type",
                "text_only",
            )
        if not isinstance(part.get("text"), str):
            raise ClientError(f"{at}[{i}].text must be text.", f"{at}[{i}].text", "invalid_type")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Clients send a call's arguments as JSON text; templates print them as the object that it is."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
