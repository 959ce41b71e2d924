"""Errors as OpenAI's clients read them. No HTTP but the status number."""

from __future__ import annotations

from typing import Any

from potok.errors import ClientError, Crowded, PotokError, Unavailable

#: What a status is called, where it is no fault of the request.
TYPE_OF_STATUS = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable", 504: "timeout"}

#: Client errors are 400 unless their code says more.
STATUS_OF_CODE = {
    "invalid_api_key": 401,
    "forbidden": 403,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "timeout": 408,
    "body_too_large": 413,
    "deadline_exceeded": 504,
    "content_type": 415,
}


def status_of(error: Exception) -> int:
    if isinstance(error, Crowded):
        return 429
    if isinstance(error, Unavailable):
        return 503
    if isinstance(error, ClientError):
        return STATUS_OF_CODE.get(error.code or "", 400)
    return 500


def body_of(error: Exception) -> dict[str, Any]:
    """What is not ours to explain is not shown: it may quote a prompt."""
    param, code = (error.param, error.code) if isinstance(error, ClientError) else (None, None)
    kind = TYPE_OF_STATUS.get(status_of(error), "invalid_request_error")
    message = str(error) if isinstance(error, PotokError) else "the server met a bug; its log says more."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
