"""The load test against a server whose every byte and pause is known."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer
import uvloop
from scripted_http import CUT, DONE, END, HEAD, answer, completion, event, json_answer, models, scripted, usage
from typer.testing import CliRunner

from potok.bench.command import bench_serve
from potok.bench.options import BenchOptions
from potok.bench.report import remarks
from potok.bench.serve import Progress, run_bench
from potok.errors import ClientError


def run(coroutine):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def words(body: dict) -> list[str]:
    return [" w"] * body["max_tokens"]


def plain(path: str, body: dict):
    return models() if path == "/v1/models" else answer(words(body), prompt_tokens=len(body["prompt"].split()))


def options(url: str, **changes) -> BenchOptions:
    return BenchOptions(**{"url": url, "clients": (2,), "output_tokens": 6, "prompt_tokens": 12} | changes)


def test_closed_loop_counts_every_request_and_token() -> None:
    async def go():
        async with scripted(plain) as server:
            seen: list[Progress] = []
            result = await run_bench(options(server.url, clients=(1, 5), api_key="secret"), seen.append)
            return server, seen, result

    server, seen, result = run(go())
    assert [load.figures.load.clients for load in result.loads] == [1, 5]
    for load, requests in zip(result.loads, (3, 15), strict=True):
        f = load.figures
        assert (f.requests, f.answered, f.errors, f.output_tokens, f.deltas) == (
            requests,
            requests,
            {},
            6 * requests,
            6 * requests,
        )
        assert f.prompt_tokens == 12 * requests
        assert len(load.requests) == requests
    assert result.model == "scripted"
    assert remarks(result) == []
    assert seen[-1] == Progress(result.loads[1].figures.load, 15, 15, 90)
    prompts = [body["prompt"] for path, body in server.requests if path == "/v1/completions"]
    assert len(set(prompts)) == len(prompts)
    sent = server.requests[-1][1]
    assert sent["ignore_eos"] is True
    assert sent["stream_options"] == {"include_usage": True}
    assert server.connections == 5  # kept open between requests and between loads
    assert all(b"Authorization: Bearer secret\r\n" in head for head in server.headers)
    assert b"secret" not in msgspec.json.encode(result)


def test_times_are_those_of_the_server() -> None:
    def handler(path: str, body: dict):
        if path == "/v1/models":
            return models()
        if body["max_tokens"] != 6:
            return answer(words(body), 12)
        role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        deltas = [event({"choices": [{"index": 0, "delta": {"content": "x"}}]}) for _ in range(6)]
        last = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        paced = [x for i, d in enumerate(deltas) for x in ((0.2 if i == 3 else 0.05), d)]
        return [HEAD, role, 0.1, *paced, last, usage(12, 6), DONE, END]

    async def go():
        async with scripted(handler) as server:
            return await run_bench(options(server.url, clients=(3,), requests_per_client=1, endpoint="chat"))

    f = run(go()).loads[0].figures
    assert f.errors == {}
    assert 145 <= f.ttft.p50 <= 250
    assert 45 <= f.gap.p50 <= 120
    assert 195 <= f.gap.max <= 300
    assert 545 <= f.e2e.p50 <= 800
    assert f.gap.p99 == f.gap.max


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (
            [json_answer(400, {"error": {"message": "prompt: too long", "param": "prompt"}})],
            "HTTP 400: prompt: too long",
        ),
        ([json_answer(500, {"detail": "oops"})], "HTTP 500: oops"),
        ([b"HTTP/1.1 502 Bad\r\ncontent-length: 4\r\n\r\n<h1>"], "HTTP 502: <h1>"),
        ([HEAD, completion("a"), CUT], "the server closed the connection in the middle of its answer"),
        ([CUT], "the server closed the connection before it answered"),
        ([HEAD, completion("a"), event({"error": {"message": "row failed"}}), END], "error event: row failed"),
        ([HEAD, completion("a"), END], "the stream ended without finish_reason"),
        ([json_answer(200, {"choices": [{"text": "whole"}]})], "the answer is no event stream"),
        ([b"nonsense\r\n\r\n"], "bad response: not an HTTP/1.1 status line: 'nonsense'"),
        ([HEAD, completion("a"), 30.0], "no end of the answer within 0.5 s"),
    ],
)
def test_every_failure_is_counted_by_kind_and_the_next_request_goes_on(response, kind) -> None:
    turn = 0

    def handler(path: str, body: dict):
        nonlocal turn
        if path == "/v1/models" or body["max_tokens"] != 6:
            return plain(path, body)
        turn += 1
        return response if turn == 2 else plain(path, body)

    async def go():
        async with scripted(handler) as server:
            return await run_bench(options(server.url, clients=(1,), requests_per_client=4, timeout=0.5))

    result = run(go())
    f = result.loads[0].figures
    assert f.errors == {kind: 1}
    assert (f.requests, f.answered) == (4, 3)
    assert [r.error for r in result.loads[0].requests] == [None, kind, None, None]
    assert any(kind in line for line in remarks(result))


@pytest.mark.parametrize(
    "message", ["Unrecognized request argument supplied: ignore_eos", "ignore_eos: extra fields not permitted"]
)
def test_a_field_that_the_server_refuses_by_name_is_left_out(message: str) -> None:
    def handler(path: str, body: dict):
        if "ignore_eos" in body:
            return [json_answer(400, {"error": {"message": message}})]
        return models() if path == "/v1/models" else answer(words(body)[:4], len(body["prompt"].split()))

    async def go():
        async with scripted(handler) as server:
            return server, await run_bench(options(server.url))

    server, result = run(go())
    assert "ignore_eos" not in server.requests[-1][1]
    assert result.loads[0].figures.ended_early == 6
    text = " ".join(remarks(result))
    assert "does not take ignore_eos" in text
    assert "6 answers ended before 6 tokens" in text


def test_the_prompt_is_fitted_to_the_servers_count() -> None:
    """A template of 7 tokens around the words: 12 asked means 5 words."""

    def handler(path: str, body: dict):
        return models() if path == "/v1/models" else answer(words(body), 7 + len(body["prompt"].split()))

    async def go(prompt_tokens: int):
        async with scripted(handler) as server:
            return server, await run_bench(options(server.url, prompt_tokens=prompt_tokens))

    server, result = run(go(12))
    assert len(server.requests[-1][1]["prompt"].split()) == 5
    assert result.loads[0].figures.prompt_tokens == 6 * 12
    assert result.notes == []
    _, result = run(go(4))
    assert result.notes == ["Prompts are 8 tokens by the server's count, where 4 were asked for."]


def test_different_counts_are_reported() -> None:
    """The server counts 6 tokens where the client sees 5 texts."""

    def handler(path: str, body: dict):
        if path == "/v1/models":
            return models()
        n = body["max_tokens"]
        return [HEAD, *[completion("a")] * (n - 1), completion("", "length"), usage(12, n), DONE, END]

    async def go():
        async with scripted(handler) as server:
            return await run_bench(options(server.url))

    result = run(go())
    f = result.loads[0].figures
    assert (f.output_tokens, f.deltas) == (36, 30)
    assert any("server counted 36 output tokens, the clients 30" in line for line in remarks(result))


def test_a_server_without_usage_is_counted_by_deltas() -> None:
    def handler(path: str, body: dict):
        if path == "/v1/models":
            return models()
        n = body["max_tokens"]
        return [HEAD, *[completion("a")] * (n - 1), completion("a", "length"), DONE, END]

    async def go():
        async with scripted(handler) as server:
            return await run_bench(options(server.url))

    result = run(go())
    assert result.loads[0].figures.output_tokens == 36
    assert "reports no usage" in result.notes[0]


def test_arrivals_do_not_wait_for_answers_and_waiting_counts() -> None:
    """Answers take 0.3 s; at 40 requests a second a dozen must overlap, and the times count from the arrival."""

    def handler(path: str, body: dict):
        if path == "/v1/models" or body["max_tokens"] != 6:
            return plain(path, body)
        return [0.3, *answer(words(body), 12)]

    async def go():
        async with scripted(handler) as server:
            return server, await run_bench(options(server.url, rate=(40.0,), duration=1.0, ttft_ms=450.0))

    server, result = run(go())
    f = result.loads[0].figures
    assert f.requests == f.answered
    assert 15 <= f.requests <= 70
    assert server.connections >= 6
    assert 295 <= f.ttft.p50 <= 450
    assert f.good == sum(r.ttft_ms <= 450 for r in result.loads[0].requests)
    assert f.goodput_per_s == f.good
    assert f.wall_s < 2.0


def test_an_early_400_for_another_reason_ends_the_run_with_its_sentence() -> None:
    def handler(path: str, body: dict):
        return models() if path == "/v1/models" else [json_answer(400, {"error": {"message": "model x is not served"}})]

    async def go():
        async with scripted(handler) as server:
            await run_bench(options(server.url, model="x"))

    with pytest.raises(ClientError, match="HTTP 400: model x is not served"):
        run(go())


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"clients": ()}, "clients"),
        ({"clients": (0,)}, "clients"),
        ({"rate": (0.0,)}, "rate"),
        ({"rate": (float("nan"),)}, "rate"),
        ({"requests_per_client": 0}, "requests_per_client"),
        ({"output_tokens": 0}, "output_tokens"),
        ({"endpoint": "responses"}, "endpoint"),
        ({"shared_prefix_tokens": 12}, "shared_prefix_tokens"),
        ({"url": "https://example.org"}, "url"),
        ({"url": "localhost:8000"}, "url"),
        ({"url": "http://localhost:notaport"}, "url"),
        ({"api_key": "a\nb"}, "api_key"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_bad_options_are_refused_by_name(changes: dict, param: str) -> None:
    with pytest.raises(ClientError) as caught:
        run(run_bench(options("http://127.0.0.1:1", **({} | changes)) if "url" not in changes else options(**changes)))
    assert caught.value.param == param


def cli() -> typer.Typer:
    app = typer.Typer()
    app.command("serve")(bench_serve)
    return app


def test_nobody_there_is_one_sentence_and_exit_code_2() -> None:
    result = CliRunner().invoke(cli(), ["--url", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert re.match(r"potok: No answer from http://127.0.0.1:1: cannot connect.*\n$", result.stderr)
    result = CliRunner().invoke(cli(), ["--clients", "1;8"])
    assert result.exit_code == 2
    assert "--clients must be whole numbers" in result.stderr


def test_the_command_prints_a_table_and_keeps_the_figures(tmp_path: Path) -> None:
    """Against a server in another process, so that the client's CPU time is its own: at most 100 us a token."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, cwd=Path(__file__).parent, env=dict(os.environ)
    )
    try:
        url = server.stdout.readline().decode().strip()
        file = tmp_path / "figures.json"
        arguments = ["--url", url, "--clients", "2,8", "--output-tokens", "400", "--json", str(file), "--seed", "5"]
        result = CliRunner().invoke(cli(), arguments)
        assert result.exit_code == 0, result.output
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r" *(2|8) ", line)]
    assert [(row[0], row[-1]) for row in rows] == [("2", "0/6"), ("8", "0/24")]
    assert max(len(line) for line in result.stdout.splitlines()[:8]) <= 80
    assert f"potok bench serve --url {url}" in result.stdout
    kept = json.loads(file.read_text())
    assert kept["command"] == f"potok bench serve --url {url} --clients 2,8 --output-tokens 400 --seed 5"
    assert kept["machine"]["cores"] >= 1
    assert kept["model"] == "scripted"
    assert [load["figures"]["output_tokens"] for load in kept["loads"]] == [2400, 9600]
    assert all(0 < load["figures"]["client_cpu_us_per_token"] <= 100 for load in kept["loads"])
    assert len(kept["loads"][1]["requests"]) == 24


def test_with_a_rate_the_table_shows_goodput(tmp_path: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, cwd=Path(__file__).parent)
    try:
        url = server.stdout.readline().decode().strip()
        result = CliRunner().invoke(cli(), ["--url", url, "--rate", "20,40", "--duration", "0.5", "--seed", "1"])
        assert result.exit_code == 0, result.output
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r" *(20|40) ", line)]
    assert [row[8:10] for row in rows] == [["100", "%"], ["100", "%"]]
    assert f"--url {url} --rate 20,40 --duration 0.5 --seed 1\n" in result.stdout


def test_failed_requests_end_the_command_with_1(tmp_path: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER, "7"], stdout=subprocess.PIPE, cwd=Path(__file__).parent)
    try:
        url = server.stdout.readline().decode().strip()
        file = tmp_path / "figures.json"
        arguments = ["--url", url, "--clients", "2", "--output-tokens", "9", "--json", str(file)]
        result = CliRunner().invoke(cli(), arguments)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert result.exit_code == 1
    assert "2 clients: 1 x HTTP 500: broken" in result.stdout
    assert json.loads(file.read_text())["loads"][0]["figures"]["errors"] == {"HTTP 500: broken": 1}


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli(), ["--url", "http://127.0.0.1:1", "--json", str(tmp_path / "none" / "f.json")])
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


SERVER = """
import asyncio, itertools, sys
from scripted_http import answer, json_answer, models, scripted

BROKEN = int(sys.argv[1]) if sys.argv[1:] else 0  # number of the request that fails
numbers = itertools.count()

def handler(path, body):
    if next(numbers) == BROKEN > 0:
        return [json_answer(500, {"error": {"message": "broken"}})]
    return models() if path == "/v1/models" else answer([" w"] * body["max_tokens"], len(body["prompt"].split()))

async def main():
    async with scripted(handler) as server:
        print(server.url, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""
