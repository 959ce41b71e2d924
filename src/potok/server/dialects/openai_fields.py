"""The fields of OpenAI's completions and chat completions, with vLLM's extensions: one table each. No HTTP."""

from __future__ import annotations

from typing import Any

from potok.errors import ClientError
from potok.params import BOUNDS, MAX_SALT_CHARS, TERM_BOUNDS, check_salt
from potok.server.dialects.fields import (
    Field,
    array,
    bias,
    flag,
    kind,
    label,
    number,
    openapi,
    shown,
    table,
    text,
    texts,
    unsupported,
    wrong_type,
)
from potok.server.limits import MAX_MESSAGES, MAX_PROMPTS, MAX_TEMPLATE_ARGUMENTS
from potok.text.chat import check_arguments
from potok.text.guard import is_small

Prompt = str | list[int]

ROLES = ("system", "developer", "user", "assistant")


def _prompts(name: str, value: Any) -> list[Prompt]:
    """One text, one list of ids, or a list of either."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise wrong_type(name, "a string, an array of token ids, or an array of these", value)
    if value and not isinstance(value[0], str | list):
        value = [value]
    if not value:
        raise ClientError(f"{name} is empty; give at least one token.", name, "empty")
    if len(value) > MAX_PROMPTS:
        raise ClientError(
            f"{name} may hold {MAX_PROMPTS} prompts, not {len(value)}; send several requests.", name, "out_of_range"
        )
    for i, prompt in enumerate(value):
        if type(prompt) is not type(value[0]):
            raise ClientError(f"{name} mixes {kind(value[0])} and {kind(prompt)}; use one form.", name, "invalid_type")
        if not prompt:
            raise ClientError(f"{name}[{i}] is empty; give at least one token.", name, "empty")
    return list(value)


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Messages as a template wants them: role, content as one text, perhaps a name."""
    if not isinstance(value, list):
        raise wrong_type(name, "an array of messages", value)
    if not 0 < len(value) <= MAX_MESSAGES:
        raise ClientError(f"{name} must hold 1 to {MAX_MESSAGES} messages, not {len(value)}.", name, "out_of_range")
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ClientError(f"{where} must be an object, not {shown(message)}.", where, "invalid_type")
    role = message.get("role")
    if role not in ROLES:
        raise ClientError(f"{where}.role must be one of {', '.join(ROLES)}, not {shown(role)}.", where, "not_supported")
    result = {
        "role": "system" if role == "developer" else role,
        "content": _content(where, role, message.get("content")),
    }
    if message.get("name") is not None:
        if not isinstance(message["name"], str):
            raise ClientError(f"{where}.name must be a string, not {shown(message['name'])}.", where, "invalid_type")
        result["name"] = message["name"]
    for key, value in message.items():
        # Clients send back the answers they were given, with all that was null in them.
        if key not in ("role", "content", "name") and value is not None and value != []:
            raise ClientError(f"{where}.{key[:40]} is not supported; remove it.", where, "not_supported")
    return result


def _content(where: str, role: str, content: Any) -> str:
    """Plain text; several parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise ClientError(
            f"{where}.content must be a string or an array of text parts, not {shown(content)}.", where, "invalid_type"
        )
    parts = []
    for i, part in enumerate(content):
        kind_of_part = part.get("type") if isinstance(part, dict) else None
        if kind_of_part != "text":
            raise ClientError(
                f'{where}.content[{i}] must be a part of type "text", not {shown(kind_of_part or part)}; '
                "images and sound are not supported.",
                where,
                "not_supported",
            )
        if not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
            raise ClientError(f'{where}.content[{i}] must be {{"type": "text", "text": "..."}}.', where, "invalid_type")
        parts.append(part["text"])
    return "\n".join(parts)


def _template_arguments(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    if not is_small(value, MAX_TEMPLATE_ARGUMENTS):
        raise ClientError(f"{name} may have {MAX_TEMPLATE_ARGUMENTS} characters; send less.", name, "out_of_range")
    check_arguments(value)  # here, because they become arguments of a call beside ours
    return value


def _stream_options(name: str, value: Any) -> bool:
    """Whether usage is wanted."""
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    for key, wanted in value.items():
        if key not in ("include_usage", "include_obfuscation"):
            raise ClientError(f"unknown field {name}.{key[:40]}; remove it.", name, "unknown_field")
        if wanted is not None and not isinstance(wanted, bool):
            raise ClientError(f"{name}.{key} must be true or false, not {shown(wanted)}.", name, "invalid_type")
    if value.get("include_obfuscation"):
        raise ClientError(f"{name}.include_obfuscation is not supported; remove it.", name, "not_supported")
    return bool(value.get("include_usage"))


def _salt(name: str, value: Any) -> str:
    return check_salt(value, name)


def _response_format(name: str, value: Any) -> None:
    if value != {"type": "text"}:
        raise ClientError(f'{name} other than {{"type": "text"}} is not supported; remove it.', name, "not_supported")


SAMPLING = (
    number("n", BOUNDS["n"], 1),
    number("temperature", BOUNDS["temperature"], 1.0),
    number("top_p", BOUNDS["top_p"], 1.0),
    number("top_k", BOUNDS["top_k"], 0),
    number("min_p", BOUNDS["min_p"], 0.0),
    number("seed", BOUNDS["seed"]),
    number("presence_penalty", BOUNDS["presence_penalty"], 0.0),
    number("frequency_penalty", BOUNDS["frequency_penalty"], 0.0),
    number("repetition_penalty", BOUNDS["repetition_penalty"], 1.0),
    number("min_tokens", BOUNDS["min_tokens"], 0),
    bias("logit_bias"),
    texts("stop"),
    array("stop_token_ids", items="integer"),
    flag("include_stop_str_in_output", False),
    flag("ignore_eos", False),
    flag("skip_special_tokens", True),
)

COMMON = (
    text("model"),
    *SAMPLING,
    flag("stream", False),
    Field("stream_options", _stream_options, schema={"type": "object"}),
    flag("return_token_ids", False),
    number("prompt_logprobs", BOUNDS["prompt_logprobs"]),
    Field("cache_salt", _salt, schema={"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS}),
    number("priority", TERM_BOUNDS["priority"], 0),
    number("timeout_ms", TERM_BOUNDS["timeout_ms"]),
    number("ttft_timeout_ms", TERM_BOUNDS["ttft_timeout_ms"]),
    label("user"),
    Field("response_format", _response_format, schema={"type": "object"}),
    # vLLM's other extensions: fine where they ask for what is done anyway.
    unsupported("use_beam_search", [False]),
    unsupported("length_penalty", [1.0, 1]),
    unsupported("spaces_between_special_tokens", [True]),
    unsupported("truncate_prompt_tokens"),
    unsupported("allowed_token_ids"),
    unsupported("bad_words", [[]]),
    unsupported("structured_outputs"),
    unsupported("guided_json"),
    unsupported("guided_regex"),
    unsupported("guided_choice"),
    unsupported("guided_grammar"),
    unsupported("request_id", why="send the header X-Request-Id"),
    unsupported("return_tokens_as_token_ids", [False]),
    unsupported("kv_transfer_params"),
    unsupported("stream_interval", [1]),
)

COMPLETION = table(
    Field("prompt", _prompts, required=True, schema={"description": "text, token ids, or a list of either"}),
    number("max_tokens", BOUNDS["max_tokens"], 16),
    number("logprobs", BOUNDS["logprobs"]),
    flag("echo", False),
    *COMMON,
    unsupported("add_special_tokens", [True]),
    unsupported("suffix"),
    unsupported("best_of", [1]),
)

CHAT = table(
    Field("messages", _messages, required=True, schema={"type": "array", "items": {"type": "object"}}),
    number("max_completion_tokens", BOUNDS["max_tokens"]),
    number("max_tokens", BOUNDS["max_tokens"]),
    flag("logprobs", False),
    number("top_logprobs", BOUNDS["logprobs"]),
    *COMMON,
    unsupported("echo", [False]),
    flag("add_generation_prompt", True),
    Field("chat_template_kwargs", _template_arguments, {}, schema={"type": "object"}),
    label("safety_identifier"),
    label("prompt_cache_key"),
    unsupported("add_special_tokens", [False]),
    unsupported("tools", [[]]),
    unsupported("tool_choice", ["none"]),
    unsupported("parallel_tool_calls"),
    unsupported("functions", [[]]),
    unsupported("function_call", ["none"]),
    unsupported("audio"),
    unsupported("modalities", [["text"]]),
    unsupported("prediction"),
    unsupported("reasoning_effort", ["none"]),
    unsupported("verbosity"),
    unsupported("web_search_options"),
    unsupported("store", [False]),
    unsupported("metadata", [{}]),
    unsupported("service_tier", ["auto", "default"]),
    unsupported("moderation"),
    unsupported("prompt_cache_options"),
    unsupported("prompt_cache_retention"),
    unsupported("continue_final_message", [False]),
    unsupported("chat_template", why="the model's own is used"),
    unsupported("documents"),
    unsupported("include_reasoning", [True]),
)

TOKENIZE = table(
    text("model"),
    text("prompt"),
    Field("messages", _messages, schema={"type": "array", "items": {"type": "object"}}),
    flag("add_special_tokens", None),
    flag("return_token_strs", False),
    flag("add_generation_prompt", True),
    Field("chat_template_kwargs", _template_arguments, {}, schema={"type": "object"}),
    unsupported("continue_final_message", [False]),
    unsupported("chat_template", why="the model's own is used"),
    unsupported("tools", [[]]),
)

DETOKENIZE = table(text("model"), array("tokens", required=True, items="integer"))

#: For the page /docs.
PAGES = {
    "completion": openapi(COMPLETION),
    "chat": openapi(CHAT),
    "tokenize": openapi(TOKENIZE),
    "detokenize": openapi(DETOKENIZE),
}
