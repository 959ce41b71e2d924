"""The library and the command on the default model, from text to text."""

from __future__ import annotations

import json
import subprocess
import sys
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


def potok(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from potok.cli import main; main()", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_a_question_on_stdin() -> None:
    done = potok("chat", "--temperature", "0", "--max-model-len", "512", stdin="What is the capital of Japan?\n")
    assert (done.returncode, done.stdout) == (0, TOKYO + "\n")
    assert "tok/s" in done.stderr


def test_a_file_of_requests(tmp_path: Path) -> None:
    body = {"messages": JAPAN, "max_tokens": 24, "temperature": 0}
    lines = [json.dumps({"custom_id": f"r{i}", "url": "/v1/chat/completions", "body": body}) for i in range(5)]
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("\n".join([*lines, "no json"]))
    command = ("run", str(requests), "-o", str(out), "--max-model-len", "512")
    done = potok(*command)
    assert done.returncode == 0, done.stderr
    assert "5 answered, 1 no requests" in done.stderr
    written = out.read_bytes()
    records = [json.loads(line) for line in written.splitlines()]
    texts = [r["response"]["body"]["choices"][0]["message"]["content"] for r in records if r["response"]]
    assert texts == [TOKYO] * 5
    out.write_bytes(written[:-40])
    done = potok(*command)
    assert (done.returncode, "5 done before" in done.stderr or "4 done before" in done.stderr) == (0, True)
    assert sorted(r["id"] for r in map(json.loads, out.read_bytes().splitlines())) == [f"line-{i}" for i in range(1, 7)]
