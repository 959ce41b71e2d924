"""Log-probabilities of a prompt: the same numbers on a cold cache and a warm one, and little memory for them."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from case_kit import Served

_salts = count()


def plain(start: int) -> dict[str, Any]:
    return {"prompt": [start + 37 * i for i in range(100)], "max_tokens": 1, "temperature": 0}


def rated(server: Served, start: int, salt: str) -> Any:
    positions = server.ask({**plain(start), "prompt_logprobs": 1, "cache_salt": salt})["prompt_logprobs"]
    assert len(positions) == 100 and positions[0] is None
    for i, position in enumerate(positions[1:], start=1):
        assert str(start + 37 * i) in position and 1 <= len(position) <= 2
        assert all(entry["logprob"] < 0 for entry in position.values())
    return positions


@pytest.mark.parametrize("first", ["plain", "rated"])
def test_cold_and_warm(small_server: Served, first: str) -> None:
    start, salt = 1000 + len(first), f"t13 {next(_salts)}"
    cold = rated(small_server, start, f"t13 {next(_salts)}")
    if first == "plain":
        small_server.ask({**plain(start), "cache_salt": salt})
    assert rated(small_server, start, salt) == cold
    assert rated(small_server, start, salt) == cold
    # Blocks that a rated request has filled are as good as any: 96 of 100 tokens are in whole ones.
    answer = small_server.answer({**plain(start), "cache_salt": salt})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_a_long_prompt_takes_little_memory(small_server: Served) -> None:
    """T34: all logits of 2048 tokens at once would be 384 MiB. A plain request first, so that the cache is in use."""
    body = {"prompt": [5 + i % 1000 for i in range(2048)], "max_tokens": 1, "temperature": 0}
    small_server.ask(body)
    before = peak_bytes(small_server.process.pid)
    assert len(small_server.ask({**body, "prompt_logprobs": 1})["prompt_logprobs"]) == 2048
    assert peak_bytes(small_server.process.pid) - before < 100e6


def peak_bytes(pid: int) -> int:
    """Largest resident memory so far of the API process and the engine process together."""
    [engine] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    peaks = [re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{p}/status").read_text()) for p in (pid, engine)]
    return sum(int(peak[1]) * 1024 for peak in peaks if peak)
