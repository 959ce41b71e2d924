"""Many choices of one prompt, over what runs at once: four run, seven are asked for, five million are refused."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
from case_kit import Served

SEVEN = {"prompt": "Once", "n": 7, "temperature": 1, "seed": 11, "max_tokens": 8}


def texts(answer: Any) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_five_million_are_refused_and_nothing_is_computed_for_them(real_server: Served) -> None:
    steps, pid = real_server.metric("potok_engine_steps_total"), real_server.process.pid
    before = resident_mib(pid)
    for path, rest in (
        ("/v1/completions", {"prompt": "Once"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        for n in (5_000_000, 129, 0, -1):
            answer = real_server.http.post(path, json={**rest, "n": n})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"
    assert resident_mib(pid) < before + 20
    assert real_server.metric("potok_engine_steps_total") == steps


def resident_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def test_seven_where_four_run(real_server: Served) -> None:
    answer = real_server.answer(SEVEN)
    found = texts(answer)
    assert len(found) == 7 and len(set(found)) >= 5
    assert texts(real_server.answer(SEVEN)) == found
    assert answer["usage"]["prompt_tokens"] == 1 and answer["usage"]["completion_tokens"] == 7 * 8
    assert texts(real_server.answer(SEVEN | {"n": 1})) == found[:1]


def test_four_streamed_come_interleaved_and_add_up(real_server: Served) -> None:
    four = SEVEN | {"n": 4}
    joined, ends, order = [""] * 4, [0] * 4, []
    with real_server.http.stream("POST", "/v1/completions", json=four | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    joined[choice["index"]] += choice["text"]
                    ends[choice["index"]] += choice["finish_reason"] is not None
                    order.append(choice["index"])
    assert joined == texts(real_server.answer(four)) == texts(real_server.answer(SEVEN))[:4]
    assert ends == [1] * 4
    assert max(order.index(index) for index in range(4)) < min(8, len(order))  # all begin before any is complete


def test_closing_the_socket_frees_all_four(real_server: Served) -> None:
    body = json.dumps({"prompt": "Once", "n": 4, "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    url = httpx.URL(real_server.url)
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        real_server.eventually(lambda: real_server.metric("potok_requests_running") == 4, 5.0)
    real_server.eventually(real_server.empty, 2.0)
