"""A client that leaves, in every phase: the engine stops working for it at once, and nothing of it is left."""

from __future__ import annotations

import gc
import os
import socket
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from server_kit import Server, raw_request, read_until, send_raw

from potok.frontend import Generation
from potok.obs.metrics import FINISHES

COMPLETIONS = "/v1/completions"
PROMPT = [7] * 20
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(autouse=True)
def steady(server: Server) -> Iterator[None]:
    """Steps that take a while, so that there is a while in which to leave."""
    server.script.step_s = 0.01
    yield


def aborts(server: Server) -> float:
    return server.metric("potok_requests_aborted_total")


def running(server: Server) -> float:
    return server.metric("potok_requests_running")


def leaves(server: Server, connection: socket.socket) -> None:
    """Closes, and checks that all of it goes and is counted once."""
    before = aborts(server)
    connection.close()
    server.eventually(server.settled)
    assert aborts(server) == before + 1


def test_while_queued(server: Server) -> None:
    neighbours = [send_raw(server, COMPLETIONS, {**LONG, "stream": True, "prompt": [9, i]}) for i in range(16)]
    server.eventually(lambda: running(server) == 16)
    queued = send_raw(server, COMPLETIONS, {**LONG, "stream": True})
    server.eventually(lambda: server.metric("potok_requests_waiting") == 1)
    before = aborts(server)
    queued.close()
    server.eventually(lambda: server.metric("potok_requests_waiting") == 0)
    server.eventually(lambda: aborts(server) == before + 1)
    assert running(server) == 16
    for neighbour in neighbours:
        neighbour.close()


def test_during_prefill(server: Server) -> None:
    server.script.gate.clear()
    connection = send_raw(server, COMPLETIONS, {**LONG, "prompt": [7] * 400})
    server.eventually(lambda: server.service.num_calls == 1)
    time.sleep(0.05)
    server.script.gate.set()
    leaves(server, connection)


@pytest.mark.parametrize("n", [1, 4])
def test_in_a_stream(server: Server, n: int) -> None:
    connection = send_raw(server, COMPLETIONS, {**LONG, "stream": True, "n": n})
    read_until(connection, 5 * n, b"data: ")
    assert running(server) == n
    leaves(server, connection)


def test_in_a_stream_of_several_prompts(server: Server) -> None:
    connection = send_raw(server, COMPLETIONS, {**LONG, "stream": True, "prompt": [[7], [8], [9]]})
    read_until(connection, 6, b"data: ")
    leaves(server, connection)


def test_before_a_whole_answer(server: Server) -> None:
    connection = send_raw(server, COMPLETIONS, LONG)
    server.eventually(lambda: running(server) == 1)
    time.sleep(0.05)
    leaves(server, connection)


def test_a_half_closed_connection_counts_as_left(server: Server) -> None:
    connection = send_raw(server, COMPLETIONS, {**LONG, "stream": True})
    read_until(connection, 2, b"data: ")
    connection.shutdown(socket.SHUT_WR)
    server.eventually(server.settled)
    connection.close()


def test_a_twin_goes_on(server: Server) -> None:
    body = {**LONG, "max_tokens": 60, "stream": True}
    twin = send_raw(server, COMPLETIONS, body)
    read_until(twin, 1, b"data: ")
    other = send_raw(server, COMPLETIONS, body)
    read_until(other, 5, b"data: ")
    other.close()
    rest = read_until(twin, 1, b"[DONE]")
    assert b'"finish_reason":"length"' in rest
    twin.close()


def test_a_client_that_stops_reading(server: Server) -> None:
    """The server buffers a bounded part of the answer and waits; when the client closes, all is freed."""
    server.script.step_s = 0.0
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(server.address)
    # 16 choices with 20 log-probabilities each: about 15 MB of events, more than any socket buffer takes.
    big = {"prompt": [7, 7], "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 16, "logprobs": 20}
    connection.sendall(raw_request(COMPLETIONS, big))
    server.eventually(lambda: running(server) == 16)
    # The engine does not wait for this client: it finishes, and what is left sits between it and the socket.
    server.eventually(lambda: running(server) == 0)
    assert server.service.num_calls == 1
    assert server.http.get("/health").status_code == 200
    connection.close()
    server.eventually(server.settled)


def test_many_rounds_leave_nothing_behind(server: Server) -> None:
    """No file, no generation, no task stays, whatever the phase in which the clients leave."""
    generations: weakref.WeakSet[Generation] = weakref.WeakSet()
    files = len(os.listdir("/proc/self/fd"))
    server.script.step_s = 0.002
    for i in range(40):
        bodies = [{**LONG, "stream": stream, "n": n} for stream in (True, False) for n in (1, 3)]
        connections = [send_raw(server, COMPLETIONS, body) for body in bodies]
        time.sleep(0.002 * (i % 7))
        for connection in connections:
            connection.close()
    server.eventually(server.settled)

    def left() -> int:
        gc.collect()
        generations.update(o for o in gc.get_objects() if isinstance(o, Generation))
        return len(generations)

    assert left() == 0
    assert server.service.engine._sinks == {}  # type: ignore[attr-defined]
    server.eventually(lambda: len(os.listdir("/proc/self/fd")) <= files + 2)


def test_conservation(server: Server) -> None:
    """After a mixture of everything: each accepted call has ended in one way, and the gauges are back at zero."""
    script = server.script
    script.failing[(6, 6)] = 3
    for stream in (True, False):
        server.http.post(COMPLETIONS, json={"prompt": [1], "max_tokens": 2, "stream": stream})
        server.http.post(COMPLETIONS, json={"prompt": [6, 6], "max_tokens": 9, "stream": stream})
        server.http.post(COMPLETIONS, json={"prompt": [], "stream": stream})
        server.http.post(COMPLETIONS, json={**LONG, "stream": stream, "timeout_ms": 60})
        connection = send_raw(server, COMPLETIONS, {**LONG, "stream": stream})
        server.eventually(lambda: running(server) == 1)
        script.gate.clear()  # its step takes longer than the next call can wait
        server.eventually(lambda: script.stuck)
        late = send_raw(server, COMPLETIONS, {**LONG, "stream": stream, "timeout_ms": 40})
        server.eventually(lambda: server.service.num_calls == 2)
        time.sleep(0.05)
        script.gate.set()
        assert read_until(late, 1, b"deadline_exceeded").startswith(b"HTTP/1.1 504")
        late.close()
        leaves(server, connection)
    count = server.metric
    ends = sum(count("potok_requests_finished_total", reason=reason) for reason in FINISHES)
    ends += sum(count(f"potok_requests_{end}_total") for end in ("aborted", "failed", "timed_out"))
    assert count("potok_requests_accepted_total") == ends
    assert count("potok_requests_failed_total") >= 2 and count("potok_requests_timed_out_total") >= 2
    assert count("potok_requests_finished_total", reason="timeout") >= 2
