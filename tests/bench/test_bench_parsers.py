"""The HTTP and event-stream parsers give the same result wherever the network cuts the bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potok.bench.http1 import BadResponse, ResponseParser
from potok.bench.sse import SseParser
from potok.bench.stream import Record, StreamReader

PAYLOADS = [b'{"a": 1}', '{"text": "\\u00e9 žluť 字"}'.encode(), b"[DONE]", b"", b"x" * 3000, b"data: no", b": no"]


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted({a % (len(data) + 1) for a in at}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(st.sampled_from(PAYLOADS)), st.booleans(), st.lists(st.integers(0, 100_000)))
def test_events_survive_every_cut(payloads: list[bytes], crlf: bool, at: list[int]) -> None:
    lines = []
    for i, payload in enumerate(payloads):
        comment = b": keep-alive\n\n" if i % 3 == 0 else b""
        lines.append(comment + b"event: x\nid: 7\ndata: " + payload + b"\n\n")
    data = b"".join(lines)
    parser = SseParser()
    seen = [e for piece in cut(data.replace(b"\n", b"\r\n") if crlf else data, at) for e in parser.feed(piece)]
    assert seen == payloads


def test_data_lines_of_one_event_are_joined_and_the_space_is_optional() -> None:
    assert SseParser().feed(b"data:one\ndata: two\n\ndata:  three\n\n") == [b"one\ntwo", b" three"]


def test_an_event_that_is_not_closed_by_a_blank_line_is_not_an_event() -> None:
    assert SseParser().feed(b"data: half\n") == []


@given(st.lists(st.binary(min_size=1, max_size=300)), st.booleans(), st.lists(st.integers(0, 100_000)))
def test_chunked_bodies_survive_every_cut(chunks: list[bytes], trailer: bool, at: list[int]) -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nA: b\r\n\r\n"
    data += b"".join(b"%X;ext=1\r\n%s\r\n" % (len(c), c) for c in chunks)
    data += b"0\r\nchecksum: 1\r\n\r\n" if trailer else b"0\r\n\r\n"
    parser = ResponseParser()
    pieces = cut(data, at)
    body = b""
    for i, piece in enumerate(pieces):
        assert not parser.done or not b"".join(pieces[i:])
        body += parser.feed(piece)
    assert (parser.status, parser.headers["a"], body, parser.done) == (200, "b", b"".join(chunks), True)
    assert parser.keep_alive


@given(st.binary(max_size=500), st.lists(st.integers(0, 100_000)))
def test_bodies_of_known_length_survive_every_cut(content: bytes, at: list[int]) -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    parser = ResponseParser()
    body = b"".join(parser.feed(piece) for piece in cut(data, at))
    assert (parser.status, body, parser.done) == (404, content, True)


def test_without_length_or_chunks_the_body_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 200 OK\r\n\r\nab") + parser.feed(b"c") == b"abc"
    assert not parser.done
    assert parser.end()
    assert not parser.keep_alive


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive", True),
    ],
)
def test_keep_alive(head: bytes, keeps: bool) -> None:
    parser = ResponseParser()
    parser.feed(head + b"\r\n\r\n")
    assert parser.done
    assert parser.keep_alive is keeps


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab",
        b"x" * 70_000,
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseParser().feed(data)


def read(*events: bytes) -> Record:
    record = Record(due=10.0)
    reader = StreamReader(record)
    for i, data in enumerate(events):
        reader.feed(b"data: " + data + b"\n\n", 11.0 + i)
    reader.end()
    return record


def test_the_first_token_is_the_first_delta_with_text() -> None:
    record = read(
        b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
        b'{"choices":[{"index":0,"delta":{},"finish_reason":null}]}',
        b'{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}',
        b'{"choices":[{"index":0,"delta":{"content":""},"finish_reason":null}]}',
        b'{"choices":[{"index":0,"delta":{"reasoning_content":"b"},"finish_reason":null}]}',
        b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}',
        b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}',
        b"[DONE]",
    )
    assert record.error is None
    assert record.ttft == 3.0
    assert record.gaps == [2.0]
    assert (record.prompt_tokens, record.tokens, record.finish) == (5, 3, "stop")


def test_without_usage_deltas_are_counted() -> None:
    record = read(b'{"choices":[{"text":"a"}]}', b'{"choices":[{"text":"b","finish_reason":"length"}]}', b"[DONE]")
    assert (record.error, record.output_tokens, record.tokens) == (None, None, 2)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([b'{"choices":[{"text":"a"}]}', b"[DONE]"], "finish_reason"),
        ([b'{"choices":[{"text":"a","finish_reason":"stop"}]}'], "[DONE]"),
        ([b'{"error":{"message":"engine died","type":"server_error"}}', b"[DONE]"], "error event: engine died"),
        ([b'{"choices":[{"text":'], "no OpenAI chunk"),
        ([b'{"choices":[{"text":5}]}'], "no OpenAI chunk"),
    ],
)
def test_a_broken_stream_is_an_error(events: list[bytes], error: str) -> None:
    found = read(*events).error
    assert found is not None
    assert error in found
