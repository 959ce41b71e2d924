"""The files of `potok run`: every line of the input has its record once, whatever happened to earlier runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potok.cli.batch_file import BadLine, OutputFile, Request, count_requests, read_requests
from potok.errors import LoadError


def request_line(name: str, **changes: Any) -> bytes:
    fields = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name}}
    return msgspec.json.encode(fields | changes) + b"\n"


def read(path: Path, content: bytes) -> list[Request | BadLine]:
    path.write_bytes(content)
    items = list(read_requests(path))
    assert count_requests(path) == len(items)
    return items


def records_of(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def test_requests_keep_their_line_numbers(tmp_path: Path) -> None:
    items = read(tmp_path / "in", request_line("a") + b"\n  \n" + request_line("ö").rstrip(b"\n"))
    assert items == [
        Request(1, "a", "/v1/completions", {"prompt": "a"}),
        Request(4, "ö", "/v1/completions", {"prompt": "ö"}),
    ]


@pytest.mark.parametrize(
    ("line", "code", "named", "says"),
    [
        (b"{", "invalid_json", None, "line 1 is not JSON"),
        (b"\xff\xfe", "invalid_json", None, "line 1 is not JSON"),
        (b'{"custom_id": "x", "body": {"temperature": NaN}}', "invalid_json", None, "line 1 is not JSON"),
        (b"[" * 100_000, "invalid_json", None, "line 1 is not JSON"),
        (b"7", "invalid_request", None, "JSON object"),
        (b"{}", "invalid_request", None, "custom_id must be text"),
        (request_line("x", custom_id=3), "invalid_request", None, "custom_id must be text"),
        (request_line("x", method="GET"), "invalid_request", "x", "method must be POST"),
        (request_line("x", url="/v1/embeddings"), "invalid_request", "x", "url must be /v1/completions or"),
        (request_line("x", url=["/v1/completions"]), "invalid_request", "x", "url must be"),
        (request_line("x", body=[]), "invalid_request", "x", "body must be a JSON object"),
        (request_line("x", body={"stream": True}), "invalid_request", "x", "body.stream"),
    ],
)
def test_a_line_that_is_no_request_is_named(
    tmp_path: Path, line: bytes, code: str, named: str | None, says: str
) -> None:
    [bad, good] = read(tmp_path / "in", line.rstrip(b"\n") + b"\n" + request_line("good"))
    assert isinstance(bad, BadLine)
    assert (bad.number, bad.code, bad.custom_id) == (1, code, named)
    assert says in bad.message
    assert isinstance(good, Request)


def test_a_custom_id_counts_once(tmp_path: Path) -> None:
    items = read(tmp_path / "in", request_line("a") + request_line("b") + request_line("a"))
    assert [type(item) for item in items] == [Request, Request, BadLine]
    last = items[2]
    assert isinstance(last, BadLine)
    assert last.code == "duplicate_custom_id"


def test_records_have_the_shape_of_openai_batches(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with OutputFile(out) as records:
        records.answer(Request(3, "a", "/v1/completions", {}), 200, {"text": "東京\n"})
        records.report(BadLine(4, None, "invalid_json", "line 4 is not JSON."))
    assert records_of(out) == [
        {
            "id": "line-3",
            "custom_id": "a",
            "response": {"status_code": 200, "request_id": "line-3", "body": {"text": "東京\n"}},
            "error": None,
        },
        {
            "id": "line-4",
            "custom_id": None,
            "response": None,
            "error": {"code": "invalid_json", "message": "line 4 is not JSON."},
        },
    ]


LINES = [request_line("a"), b"no json\n", request_line("b"), request_line("a"), request_line("ü"), b"{}\n"]


def answer_all(path: Path, out: Path) -> list[int]:
    """Line numbers that this run wrote."""
    written = []
    with OutputFile(out) as records:
        for item in read_requests(path):
            if records.holds(item):
                continue
            written.append(item.number)
            if isinstance(item, Request):
                records.answer(item, 200, {"text": f"about {item.custom_id}"})
            else:
                records.report(item)
    return written


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_run_that_was_cut_anywhere_is_completed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    (folder / "in").write_bytes(b"".join(LINES))
    assert answer_all(folder / "in", folder / "whole") == [1, 2, 3, 4, 5, 6]
    whole = (folder / "whole").read_bytes()
    cut = data.draw(st.integers(0, len(whole)), label="bytes that reached the disk")
    (folder / "out").write_bytes(whole[:cut])
    answer_all(folder / "in", folder / "out")
    assert (folder / "out").read_bytes() == whole
    assert answer_all(folder / "in", folder / "out") == []
    assert (folder / "out").read_bytes() == whole


@pytest.mark.parametrize("content", [b"my precious notes\n", b"without newline", b'{"id": "x"}\n', b"[1, 2]\nmore\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "out"
    out.write_bytes(content)
    with pytest.raises(LoadError, match="line 1 is not a record"):
        OutputFile(out)
    assert out.read_bytes() == content


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be written"):
        OutputFile(tmp_path / "no" / "such" / "folder")
