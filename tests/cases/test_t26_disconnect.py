"""A client that leaves the real engine in the middle of a long prompt; other phases: tests/server/test_disconnects."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest
from case_kit import Served

ABORTED = "potok_requests_aborted_total"


@pytest.mark.parametrize("stream", [False, True])
def test_in_a_prompt_of_six_thousand_tokens(real_server: Served, stream: bool) -> None:
    before = real_server.metric(ABORTED)
    body = json.dumps({"prompt": [504, 2365, 6354] * 2000, "max_tokens": 2000, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    url = httpx.URL(real_server.url)
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        real_server.eventually(lambda: real_server.metric("potok_requests_running") == 1, 5.0)
        time.sleep(0.1)
        assert real_server.metric("potok_kv_cache_usage_ratio") > 0
    # One step of the engine, and what the machine takes to tell.
    real_server.eventually(real_server.empty, 2.0)
    real_server.eventually(lambda: real_server.metric(ABORTED) == before + 1, 1.0)
