"""Batch files as OpenAI defines them: one request a line in, one record a line out, in the order of their ends.

    in    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out   {"id": "line-1", "custom_id": "a", "response": {"status_code": 200, "request_id": "line-1", "body": {...}},
           "error": null}
    out   {"id": "line-2", "custom_id": null, "response": null, "error": {"code": "invalid_json", "message": "..."}}

A record has a response when the line was a request, even one that was refused, and an error when it was none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from potok.errors import LoadError

#: How every record begins; what begins otherwise is not a record that was cut.
_BEGIN = b'{"id":"line-'

URLS = ("/v1/completions", "/v1/chat/completions")


class Request(NamedTuple):
    """number: of its line, from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


class BadLine(NamedTuple):
    """A line that is no request. custom_id: where it has one. code: what kind of fault, for programs."""

    number: int
    custom_id: str | None
    code: str
    message: str


def read_requests(path: Path) -> Iterator[Request | BadLine]:
    """Reads line by line, so that a file may be larger than memory. Empty lines are skipped."""
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                item = _parse(number, line)
                if isinstance(item, Request) and item.custom_id in seen:
                    message = f"line {number}: custom_id {item.custom_id!r:.80} stands in an earlier line too."
                    item = BadLine(number, item.custom_id, "duplicate_custom_id", message)
                elif isinstance(item, Request):
                    seen.add(item.custom_id)
                yield item


def count_requests(path: Path) -> int:
    """Lines that `read_requests` will yield."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _parse(number: int, line: bytes) -> Request | BadLine:
    try:
        item = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return BadLine(number, None, "invalid_json", f"line {number} is not JSON: {error}.")
    problem = _problem(item)
    if problem is None:
        return Request(number, item["custom_id"], item["url"], item["body"])
    custom_id = item.get("custom_id") if isinstance(item, dict) else None
    named = custom_id if isinstance(custom_id, str) else None
    return BadLine(number, named, "invalid_request", f"line {number}: {problem}")


def _problem(item: Any) -> str | None:
    """What keeps a JSON value from being a request."""
    if not isinstance(item, dict):
        return "must be a JSON object."
    if not isinstance(item.get("custom_id"), str):
        return "custom_id must be text."
    if item.get("method", "POST") != "POST":
        return "method must be POST."
    if item.get("url") not in URLS:
        return f"url must be {' or '.join(URLS)}."
    if not isinstance(item.get("body"), dict):
        return "body must be a JSON object."
    if item["body"].get("stream"):
        return "body.stream must be left out; a batch file has no streams."
    return None


class OutputFile:
    """Records, appended one whole line at a time, so that a run that was stopped can go on where it ended.

    Opening an existing file repairs a last line that was cut, and learns which lines of the input have their record.
    Raises LoadError when the file holds something else, rather than writing into it.
    """

    def __init__(self, path: Path) -> None:
        self._answered: set[str] = set()  # custom ids with a response
        self._reported: set[str] = set()  # record ids of lines that were no requests
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise LoadError(f"{path} cannot be written: {error.strerror}.") from error
        try:
            self._resume(path)
        except BaseException:
            self._file.close()
            raise

    def _resume(self, path: Path) -> None:
        whole = 0  # bytes up to the end of the last whole record
        open_end = False  # that record lacks its newline
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                record = _record(line)
                is_cut = record is None and not line.endswith(b"\n") and _BEGIN.startswith(line[: len(_BEGIN)])
                if record is None and not is_cut:
                    raise LoadError(f"{path} line {number} is not a record of `potok run`; give another output file.")
                if record is None:
                    break
                whole += len(line)
                open_end = not line.endswith(b"\n")
                if record.get("response") is not None:
                    self._answered.add(record["custom_id"])
                else:
                    self._reported.add(record["id"])
        os.truncate(self._file.fileno(), whole)
        if open_end:
            self._file.write(b"\n")

    def holds(self, item: Request | BadLine) -> bool:
        """Whether this line's record was there when the file was opened."""
        if isinstance(item, Request):
            return item.custom_id in self._answered
        return _id(item.number) in self._reported

    def answer(self, request: Request, status_code: int, body: dict[str, Any]) -> None:
        id = _id(request.number)
        response = {"status_code": status_code, "request_id": id, "body": body}
        self._append({"id": id, "custom_id": request.custom_id, "response": response, "error": None})

    def report(self, line: BadLine) -> None:
        error = {"code": line.code, "message": line.message}
        self._append({"id": _id(line.number), "custom_id": line.custom_id, "response": None, "error": error})

    def _append(self, record: dict[str, Any]) -> None:
        line = memoryview(msgspec.json.encode(record) + b"\n")
        while line:  # unbuffered: a write may take only a part
            line = line[self._file.write(line) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _id(number: int) -> str:
    return f"line-{number}"


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line of an output file; None when it is none."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    is_record = isinstance(record, dict) and {"id", "custom_id", "response", "error"} <= record.keys()
    return record if is_record else None
