"""The library and the command on the default model, from text to text."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from potok import LLM, SamplingParams

JAPAN = [{"role": "user", "content": "What is the capital of Japan?"}]
TOKYO = "The capital of Japan is Tokyo."
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, max_num_seqs=16) as llm:
        yield llm


def test_a_chat(llm: LLM) -> None:
    [answer] = llm.chat(JAPAN, GREEDY)
    assert (answer.outputs[0].text, answer.outputs[0].finish_reason) == (TOKYO, "stop")


def test_answers_in_a_batch_equal_those_alone(llm: LLM) -> None:
    prompts = [f"Desk {i} has code {100003 + 70001 * i}. " * (1 + i) + "The code is" for i in range(6)]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=8, logprobs=3) for i in range(6)]
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [a.outputs for a in together] == [a.outputs for a in alone]


POTOK = [sys.executable, "-c", "from potok.cli import main; main()"]


def potok(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*POTOK, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_a_question_on_stdin() -> None:
    done = potok("chat", "--temperature", "0", "--max-model-len", "512", stdin="What is the capital of Japan?\n")
    assert (done.returncode, done.stdout) == (0, TOKYO + "\n")
    assert "tok/s" in done.stderr


def test_a_file_of_requests_in_two_runs(tmp_path: Path) -> None:
    """The first is interrupted when it has answered one line, or a little later."""
    body = {"messages": JAPAN, "max_tokens": 24, "temperature": 0}
    lines = [json.dumps({"custom_id": f"r{i}", "url": "/v1/chat/completions", "body": body}) for i in range(40)]
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("\n".join([*lines, "no json"]))
    command = ("run", str(requests), "-o", str(out), "--max-model-len", "512", "--max-num-seqs", "1")
    first = subprocess.Popen([*POTOK, *command], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (out.exists() and b'"status_code":200' in out.read_bytes()):
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert (first.returncode, "run the same command to go on" in said) == (130, True), said
    assert len(out.read_bytes().splitlines()) < 41
    second = potok(*command)
    assert second.returncode == 0, second.stderr
    records = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert sorted(record["id"] for record in records) == sorted(f"line-{i}" for i in range(1, 42))
    texts = [r["response"]["body"]["choices"][0]["message"]["content"] for r in records if r["response"]]
    assert texts == [TOKYO] * 40
    written = out.read_bytes()
    third = potok(*command)
    assert (third.returncode, "41 done before" in third.stderr, out.read_bytes()) == (0, True, written)
