"""Goodput: the criterion on hand-made records, the search on modelled servers, and rounds over HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_http import answer, json_answer, models, scripted

from potok.bench.asker import Asker, Wording
from potok.bench.client import Client, Server
from potok.bench.figures import Targets
from potok.bench.goodput import Round, Search, Window, hopeless, judged
from potok.bench.goodput_http import GoodputOptions, GoodputResult, run_goodput, search_goodput
from potok.bench.goodput_report import answer as the_answer
from potok.bench.goodput_report import footer, table
from potok.bench.machine import Machine
from potok.bench.stream import Record
from potok.cli import execute as command_line
from potok.config import EngineConfig
from potok.errors import ClientError
from potok.weights.default_model import find_default_model

TARGETS = Targets(ttft_ms=2000, gap_ms=150)
WINDOW = Window(10.0, 20.0)


def record(due: float, *times: float, ended: bool = True, error: str | None = None) -> Record:
    return Record(due, (times[-1] if times else due) if ended else 0.0, list(times), error=error)


def judge(*records: Record, now: float = 22.0, cut: bool = False) -> Round:
    return judged(1.0, records, WINDOW, TARGETS, now, cut=cut)


# -- the criterion -------------------------------------------------------------------------------------------------


def test_only_the_window_counts() -> None:
    early = record(9.9, 19.0, 19.1, 19.9, 20.5)  # a late first token that was asked for before; two gaps of it count
    inside = record(15.0, 16.0, 16.1)
    late = record(20.0, 29.0)
    f = judge(early, inside, late)
    assert (f.requests, f.failed, f.errors, f.cut) == (1, "gap", {}, False)
    assert f.ttft is not None and f.ttft.max == pytest.approx(1000)
    # 100 and 800 ms of `early`, then what the end of the window cut at 100 ms: that one is within the limit.
    assert f.gap is not None and f.gap.max == pytest.approx(800) and f.gap.mean == pytest.approx(1000 / 3)
    assert f.tokens_per_s == pytest.approx(5 / 10)


@pytest.mark.parametrize(
    ("records", "failed"),
    [
        ([record(11, 12, 12.1)], ""),
        ([record(11, 13.1)], "TTFT"),
        ([record(11, ended=False)], "TTFT"),  # nothing by the end
        ([record(19.5, ended=False)], "TTFT"),
        ([record(11, 12, ended=False)], "gap"),  # nothing more in eight seconds
        ([record(11, 12, 19.9, ended=False)], "gap"),
        ([record(11, 12, 12.1), record(12, error="HTTP 429: busy")], "HTTP 429: busy"),
        ([record(3, error="HTTP 429: busy"), record(11, 12)], "HTTP 429: busy"),  # in the warm-up, too
        ([record(21, 21.1)], "no request arrived"),
    ],
)
def test_why_a_round_fails(records: list[Record], failed: str) -> None:
    assert judge(*records).failed == failed


def test_a_stream_that_stalls_at_the_end_of_the_window_is_a_gap() -> None:
    steady = record(11, *(12 + 0.1 * i for i in range(76)), ended=False)  # the last token comes at 19.5
    f = judge(steady)
    assert f.gap is not None and f.gap.max == pytest.approx(500) and f.failed == ""
    moving = record(11, *(12 + 0.1 * i for i in range(80)), ended=False)  # at 19.9: nothing can be said
    f = judge(moving)
    assert f.gap is not None and f.gap.max == pytest.approx(100)


@given(st.integers(1, 400), st.data())
@example(20, None)
def test_a_round_is_cut_as_soon_as_it_cannot_pass_and_never_before(requests: int, data: st.DataObject | None) -> None:
    late = requests // 20 + 1 if data is None else data.draw(st.integers(0, requests))
    records = [record(11, 13.5) for _ in range(late)] + [record(11, 12) for _ in range(requests - late)]
    hope = not hopeless(records[:late], WINDOW, requests, TARGETS, 14.0)
    assert hope == (judge(*records).failed == "")


def test_a_round_with_an_error_or_with_people_who_wait_too_long_is_hopeless() -> None:
    assert hopeless([record(5, error="no")], WINDOW, 100, TARGETS, 11.0)
    waiting = [record(12, ended=False)]
    assert [hopeless(waiting, WINDOW, 19, TARGETS, now) for now in (13.9, 14.1)] == [False, True]
    assert not hopeless(waiting, WINDOW, 20, TARGETS, 14.1)
    assert not hopeless([record(5, ended=False)], WINDOW, 19, TARGETS, 15.0)


# -- the search ----------------------------------------------------------------------------------------------------


def search(passes: Callable[[float], bool], *, start: float = 1.0, rounds: int = 1) -> tuple[Search, list[float]]:
    found, tried = Search(start, lowest=0.1, resolution=0.1, rounds=rounds), []
    while (rate := found.rate) is not None:
        tried.append(rate)
        found.note(passes(rate))
    return found, tried


def test_a_server_that_can_do_two_and_a_half() -> None:
    found, tried = search(lambda rate: rate <= 2.6)
    assert tried == [1, 2, 4, 2.83, 2.38, 2.6]
    assert (found.passed, found.failed) == (2.6, 2.83)


def test_a_server_that_is_slower_than_the_start() -> None:
    found, tried = search(lambda rate: rate < 0.3, start=3.0)
    assert tried == [3, 1.5, 0.75, 0.375, 0.188, 0.266, 0.316, 0.29]
    assert (found.passed, found.failed) == (0.29, 0.316)


def test_servers_that_can_do_nothing_and_everything() -> None:
    found, tried = search(lambda rate: False)
    assert (found.passed, found.failed, tried) == (None, 0.125, [1, 0.5, 0.25, 0.125])
    found, tried = search(lambda rate: True)
    assert (found.passed, found.failed, len(tried)) == (8160.0, None, 14)


@given(st.floats(0.12, 5000), st.floats(0.1, 100))
def test_the_answer_encloses_what_the_server_can_do(can: float, start: float) -> None:
    found, tried = search(lambda rate: rate <= can, start=start)
    if found.passed is not None:  # else it lies between the lowest rate and twice that
        assert found.failed is not None and found.passed <= can < found.failed <= 1.1 * found.passed + 1e-9
    else:
        assert can < found.failed < 0.2 + 1e-9
    assert len(tried) < 30


def test_most_rounds_of_a_rate_decide_and_no_more_are_run_than_needed() -> None:
    plan = {10.0: "+-+", 20.0: "++", 40.0: "-+-", 28.3: "--", 23.8: "++", 26.0: "--"}
    outcomes = iter("".join(plan.values()))
    found, tried = search(lambda rate: next(outcomes) == "+", start=10.0, rounds=3)
    assert tried == [rate for rate, each in plan.items() for _ in each]
    assert (found.passed, found.failed) == (23.8, 26.0)


def test_noise_moves_the_answer_by_little() -> None:
    """A server that passes at 5 requests a second every second time, and ever more seldom beyond."""
    rng = random.Random(1)

    def noisy(rate: float) -> bool:
        return rng.random() < 1 / (1 + math.exp(12 * (rate / 5 - 1)))

    answers = sorted(search(noisy, rounds=3)[0].passed or 0.0 for _ in range(200))
    assert 4.4 < answers[100] < 5.3 and answers[10] > 3.5 and answers[190] < 5.9


# -- over HTTP -----------------------------------------------------------------------------------------------------


def options(url: str = "", **changes: object) -> GoodputOptions:
    settings = {"prompt_tokens": 8, "output_tokens": 4, "duration": 1.0, "warm_up": 0.2, "resolution": 1.0, "url": url}
    return GoodputOptions(**settings | changes)  # type: ignore[arg-type]


def find(handler, **changes: object) -> tuple[list[str], Search, list[Round]]:  # type: ignore[no-untyped-def]
    """The prompts that the server saw, and what was found out about it."""

    async def go() -> tuple[list[str], Search, list[Round]]:
        async with scripted(handler) as server:
            client = Client(Server.parse(server.url), 10)
            asked = options(server.url, **changes)
            found, rounds = await search_goodput(Asker(client, "completions", None, Wording(7)), asked)
            client.close()
            return [body["prompt"] for path, body in server.requests if path == "/v1/completions"], found, rounds

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(go())


def test_a_server_with_one_worker() -> None:
    """It serves 25 requests a second, one after another."""
    free = 0.0

    def handler(path: str, body: dict) -> list:  # type: ignore[type-arg]
        nonlocal free
        if path == "/v1/models":
            return models()
        now = asyncio.get_running_loop().time()
        free = max(free, now) + 0.04
        return [free - now, *answer([" w"] * body["max_tokens"], len(body["prompt"].split()))]

    prompts, found, rounds = find(handler, start_rate=10.0, ttft_ms=600.0)
    assert found.passed is not None and found.failed is not None
    assert 10 <= found.passed < found.failed <= 80
    assert [r.failed for r in rounds if r.rate == found.failed] == ["TTFT"]
    passed = rounds[0]
    assert passed.rate == 10 and passed.failed == "" and not passed.cut
    assert passed.ttft is not None and passed.ttft.p50 >= 40 and 1 <= passed.requests <= 30
    assert len(set(prompts)) == len(prompts)


def test_a_server_that_refuses_fails_the_rate_at_once() -> None:
    asked = 0

    def handler(path: str, body: dict) -> list:  # type: ignore[type-arg]
        nonlocal asked
        if path == "/v1/models":
            return models()
        asked += 1
        if asked > 3:
            return [json_answer(429, {"error": {"message": "queue full"}})]
        return answer([" w"] * body["max_tokens"], len(body["prompt"].split()))

    _, found, rounds = find(handler, start_rate=12.0)
    assert (found.passed, found.failed) == (None, 6.0)
    assert [r.rate for r in rounds] == [12.0, 6.0] and all(r.cut for r in rounds)
    assert {r.failed for r in rounds} == {"HTTP 429: queue full"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"duration": 0.0}, "--duration must be above 0"),
        ({"rounds": 0}, "--rounds must be at least 1"),
        ({"warm_up": -1.0}, "--warm-up must be at least 0"),
        ({"resolution": 0.0}, "--resolution must be above 0"),
        ({"endpoint": "responses"}, "--endpoint must be completions or chat"),
        ({"start_rate": 1.0, "duration": 4.0}, "--start-rate must be at least 1.25, so that --duration 4 s brings 5"),
        ({"url": "https://example.org"}, "--url must look like"),
        ({"url": "http://127.0.0.1:1"}, "No answer from http://127.0.0.1:1"),
    ],
)
def test_options_that_make_no_sense(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ClientError, match=sentence):
        run_goodput(options(**{"url": "http://127.0.0.1:1", "start_rate": 5.0} | changes), None, "")


def test_mixed_lengths_are_those_of_the_other_measurements() -> None:
    lengths = GoodputOptions().lengths(500, 3)
    assert all(20 <= n.prompt <= 200 and 16 <= n.output <= 1024 for n in lengths)
    assert len({n.output for n in lengths}) > 200
    assert {n.output for n in options().lengths(500, 3)} == {4}


def result(rounds: list[Round], found: Search) -> GoodputResult:
    machine = Machine.read()
    return GoodputResult("the command", "now", machine, "m", options(), ["a note"], rounds, found.passed, found.failed)


def test_what_is_shown() -> None:
    rounds, found = [], Search(1.0, 0.1, 0.1, 1)
    while (rate := found.rate) is not None:
        records = [record(11, 11 + rate / 2, 11.1 + rate / 2)] * 10 + [record(12, error="HTTP 500: no")] * (rate > 5)
        rounds.append(judged(rate, records, WINDOW, TARGETS, 22.0, cut=False))
        found.note(not rounds[-1].failed)
    shown = result(rounds, found)
    text = "\n".join(footer(shown))
    assert "Goodput: 4 requests a second (2 output tokens); at 4.36 it failed: TTFT." in text
    assert "HTTP 500: no" in text and "a note" in text and "the command" in text
    columns = [list(column.cells) for column in table(shown).columns]
    assert columns[0][:4] == ["1", "2", "4", "8"] and columns[-1][:4] == ["passed"] * 3 + ["failed: errors"]
    assert columns[3][0] == "500" and columns[5][0] == "100.0"
    assert the_answer(None, 0.5, []) == "No goodput: even 0.5 requests a second failed."
    assert the_answer(1.0, None, rounds).endswith("and no higher rate was tried.")


def test_arrivals_at_an_engine_in_another_process() -> None:
    """They are over when too many first tokens are late, or when nobody can be in time any more."""
    spec = importlib.util.spec_from_file_location("lines", Path(__file__).parents[2] / "benchmarks/peers/lines.py")
    assert spec is not None and spec.loader is not None
    lines = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lines)

    def arrivals(allowed: int, ttft: float, end: float = 1e9) -> Any:
        both = [(0.0, [1, 2], 3), (0.0, [4], 5), (1e9, [6], 7)]
        made = lines.Arrivals({"arrivals": both, "window": [0.0, end], "ttft": ttft, "allowed": allowed})
        assert made.due() == [(0, [1, 2], 3), (1, [4], 5)] and made.due() == []
        return made

    assert [arrivals(allowed, ttft=0.0).over for allowed in (0, 1, 2)] == [True, True, False]
    served = arrivals(0, ttft=100.0, end=0.0001)
    served.wait()
    assert served.now() > 0.0001 and not served.over
    served.tokens(0, 2)
    served.ended(0)
    served.tokens(1, 1)
    assert served.over
    seen = served.seen()
    assert [len(times) for times in seen["times"]] == [2, 1] and seen["ends"][0] > 0 == seen["ends"][1]


# -- the command ---------------------------------------------------------------------------------------------------

SERVER = """
import asyncio
from scripted_http import answer, models, scripted

def handler(path, body):
    return models() if path == "/v1/models" else answer([" w"] * body["max_tokens"], len(body["prompt"].split()))

async def main():
    async with scripted(handler) as server:
        print(server.url, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.fixture
def url() -> Iterator[str]:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, cwd=Path(__file__).parent)
    assert server.stdout is not None
    yield server.stdout.readline().decode().strip()
    server.kill()
    server.wait()
    server.stdout.close()


TINY = "--duration 1 --warm-up 0.1 --start-rate 6 --prompt-tokens 9 --output-tokens 5 --ttft-ms 0.0000001"


def test_command(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["bench", "goodput", "--url", url, *TINY.split(), "--api-key", "a-secret", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["potok", *arguments])
    monkeypatch.setattr(random, "SystemRandom", lambda: random.Random(7))  # some seeds let nobody arrive in a second
    assert command_line(arguments) == 0
    shown = capsys.readouterr().out
    assert "scripted: 9 tokens in, 5 out" in shown and "No goodput: even 6 requests a second failed." in shown
    kept = json.loads(figures.read_text())
    assert [r["failed"] for r in kept["rounds"]] == ["TTFT"] and kept["failed"] == 6 and kept["goodput"] is None
    assert "a-secret" not in shown + figures.read_text()
    assert kept["command"].endswith(f" --seed {kept['options']['seed']}")


def test_settings_of_a_server_that_is_not_ours_are_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", "goodput", "--url", url, "--max-num-seqs", "8"]) == 2
    assert "--max-num-seqs is for a server of our own" in capsys.readouterr().err


def test_a_server_of_our_own() -> None:
    own = EngineConfig(model=str(find_default_model()), max_num_seqs=8, kv_cache_memory=1 << 24, threads=1)
    said: list[str] = []
    asked = options(start_rate=6.0, gap_ms=1e-7, ttft_ms=60_000.0)
    shown = run_goodput(asked, own, "", said.append)
    assert said[0] == "starting the server" and said[1].startswith("round 1: 6 requests a second")
    [only] = shown.rounds
    assert (only.failed, only.errors) == ("gap", {}) and only.gap is not None and only.requests > 0
    assert shown.notes == [note for note in shown.notes if "Other programs" in note], "the server counts as we do"
