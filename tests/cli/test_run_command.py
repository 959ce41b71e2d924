"""`potok run` over a scripted engine: all lines are answered, side by side, whatever some of them are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potok.backends.modelled.scripted import ScriptedBackend
from potok.cli.batch_file import OutputFile
from potok.cli.run import Tally, answer_file
from potok.engine.thread import threaded_client
from potok.errors import EngineDead
from potok.frontend import FrontEnd, TextModel, open_text_model
from potok.weights.default_model import find_default_model

A = 49  # "A"; the ids up to 74 spell the alphabet


@pytest.fixture(scope="module")
def text() -> TextModel:
    return open_text_model(find_default_model())


def alphabet(history: Sequence[int]) -> int:
    """The letter after as many as the prompt has tokens, and so on."""
    return A + len(history) % 26


def letters(prompt_len: int, count: int) -> str:
    return "".join(chr(ord("A") + (prompt_len + i) % 26) for i in range(count))


def line(custom_id: str, body: dict[str, Any], url: str = "/v1/completions") -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + b"\n"


def answer(requests: Path, out: Path, text: TextModel, backend: ScriptedBackend) -> Tally:
    tally = Tally()
    shown = []

    async def main() -> None:
        engine = threaded_client(backend, max_num_seqs=4)
        await engine.start()
        try:
            with OutputFile(out) as records:
                frontend = FrontEnd(engine, *text)
                await asyncio.wait_for(
                    answer_file(frontend, requests, records, tally, lambda tally: shown.append(tally.done)), 30
                )
        finally:
            await engine.stop()

    asyncio.run(main())
    assert shown == list(range(1, tally.done + 1))
    return tally


def records_of(out: Path) -> dict[str, dict[str, Any]]:
    records = [msgspec.json.decode(line) for line in out.read_bytes().splitlines()]
    assert len({record["id"] for record in records}) == len(records)
    return {record["id"]: record for record in records}


def test_every_line_gets_its_record(tmp_path: Path, text: TextModel) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    (tmp_path / "in").write_bytes(
        line("a", {"prompt": [7] * 3, "max_tokens": 4, "temperature": 0})
        + line("b", {"prompt": [7] * 3, "max_tokens": 4, "n": 2, "stop": "E"})
        + b"this is no request\n"
        + line("c", chat, "/v1/chat/completions")
        + line("d", {"prompt": "x", "temprature": 0})
        + line("e", {"prompt": [66], "max_tokens": 3})
    )
    backend = ScriptedBackend(alphabet, fails=lambda history: history[0] == 66)
    tally = answer(tmp_path / "in", tmp_path / "out", text, backend)
    assert tally == Tally(answered=3, refused=1, failed=1, no_requests=1, tokens=4 + 2 * 2 + 2)
    records = records_of(tmp_path / "out")
    a, b, broken, c, d, e = (records[f"line-{number}"] for number in range(1, 7))
    assert (a["custom_id"], a["response"]["status_code"], a["error"]) == ("a", 200, None)
    assert a["response"]["body"]["choices"][0]["text"] == letters(3, 4)
    assert [choice["text"] for choice in b["response"]["body"]["choices"]] == ["D", "D"]
    assert broken["error"]["code"] == "invalid_json"
    prompt = text.chat.encode(chat["messages"])
    assert c["response"]["body"]["choices"][0]["message"]["content"] == letters(len(prompt), 2)
    assert c["response"]["body"]["usage"]["prompt_tokens"] == len(prompt)
    assert d["response"]["status_code"] == 400
    assert "temprature" in d["response"]["body"]["error"]["message"]
    assert e["response"]["status_code"] == 500
    assert "not finite" in e["response"]["body"]["error"]["message"]


def many(folder: Path, count: int) -> Path:
    path = folder / "in"
    path.write_bytes(
        b"".join(line(f"r{i}", {"prompt": [7] * (1 + i % 9), "max_tokens": 6, "temperature": 0}) for i in range(count))
    )
    return path


def assert_all_right(out: Path, count: int) -> None:
    records = records_of(out)
    assert len(records) == count
    for i in range(count):
        record = records[f"line-{i + 1}"]
        assert record["custom_id"] == f"r{i}"
        assert record["response"]["body"]["choices"][0]["text"] == letters(1 + i % 9, 6)


def test_lines_run_side_by_side(tmp_path: Path, text: TextModel) -> None:
    sizes: list[int] = []
    backend = ScriptedBackend(
        alphabet, on_step=lambda inputs: sizes.append(len(inputs.q_indptr) - 1), seconds_per_step=0.003
    )
    assert answer(many(tmp_path, 40), tmp_path / "out", text, backend).answered == 40
    assert_all_right(tmp_path / "out", 40)
    assert max(sizes) == 4
    assert len(sizes) < 40 * 6 * 0.75


def test_a_run_whose_engine_died_is_completed_by_the_next(
    tmp_path: Path, text: TextModel, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = []

    def die(inputs: Any) -> None:
        steps.append(inputs)
        if len(steps) == 30:
            raise RuntimeError("dead on purpose")

    requests = many(tmp_path, 40)
    with pytest.raises(EngineDead, match=r"dead on purpose.*run the same command"):
        answer(requests, tmp_path / "out", text, ScriptedBackend(alphabet, on_step=die))
    capfd.readouterr()
    kept = len(records_of(tmp_path / "out"))
    assert 0 < kept < 40
    assert answer(requests, tmp_path / "out", text, ScriptedBackend(alphabet)) == Tally(
        kept=kept, answered=40 - kept, tokens=6 * (40 - kept)
    )
    assert_all_right(tmp_path / "out", 40)


def test_the_summary_says_what_happened() -> None:
    tally = Tally(kept=1, answered=2, refused=3, failed=4, no_requests=5, tokens=100)
    assert tally.done == 15
    assert tally.summary(2.0) == (
        "2 answered, 3 refused (status 4xx), 4 failed (status 5xx), 5 no requests (error records), 1 done before; "
        "100 tokens in 2.0 s, 50.0 tok/s"
    )
    assert Tally().summary(0.0).startswith("nothing to do")
