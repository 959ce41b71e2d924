"""The load test against potok's own server over a scripted backend, in another process: counts of both sides agree."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from potok.bench.options import BenchOptions
from potok.bench.report import remarks
from potok.bench.serve import BenchResult, run_bench

SERVER = """
import sys
from server_kit import Script, serving
from potok.frontend import open_text_model
from potok.weights.default_model import find_default_model

with serving(open_text_model(find_default_model()), Script(), num_blocks=512, max_num_seqs=128) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    folder = Path(__file__).parents[1] / "server"
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        yield server.stdout.readline().strip()
        server.stdin.close()
    assert server.returncode == 0


def run(options: BenchOptions) -> BenchResult:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_bench(options))


@pytest.mark.parametrize(("endpoint", "prompt_tokens"), [("completions", 48), ("chat", 60)])
def test_a_hundred_clients_three_requests_each(url: str, endpoint: str, prompt_tokens: int) -> None:
    options = BenchOptions(
        url=url, clients=(100,), output_tokens=12, endpoint=endpoint, prompt_tokens=prompt_tokens, seed=3
    )
    result = run(options)
    figures = result.loads[0].figures
    assert (figures.requests, figures.answered, figures.errors) == (300, 300, {})
    assert figures.output_tokens == figures.deltas == 300 * 12
    assert figures.prompt_tokens == 300 * prompt_tokens
    assert figures.client_cpu_us_per_token <= 100
    assert remarks(result) == []


def test_arrivals_at_a_rate(url: str) -> None:
    result = run(BenchOptions(url=url, rate=(20.0,), duration=1.0, output_tokens=8, seed=3))
    figures = result.loads[0].figures
    assert figures.errors == {}
    assert figures.answered == figures.requests > 5
    assert figures.good == figures.requests
