"""The command as a user meets it: what is wrong is one line on stderr and exit code 2."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from potok import __version__
from potok.cli import COMMANDS, execute, options
from potok.config import ServerConfig


@pytest.fixture(autouse=True)
def prompt_on_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))


@pytest.fixture
def bare_gguf(tmp_path: Path) -> str:
    path = tmp_path / "bare.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["serve", "--nonsense"], "--nonsense"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--port", "http"], "--port"),
        (["serve", "--block-size", "48"], "16, 32 or 64"),
        (["serve", "--activation-bits", "4"], "8 or 16"),
        (["serve", "--kv-cache-dtype", "f8"], "f16, f32 or int8"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["serve", "--capacity-policy", "hope"], "max_utilization or guaranteed_no_evict"),
        (["serve", "--schedule-policy", "random"], "fcfs, longest_prefix"),
        (["serve", "--batching", "inflight"], "off, static, dynamic, continuous"),
        (["serve", "--max-wait-ms", "-1"], "--max-wait-ms"),
        (["serve", "--max-tokens-per-batch", "0"], "--max-tokens-per-batch"),
        (["serve", "--scheduler-delay-factor", "-1"], "--scheduler-delay-factor"),
        *((["serve", "--target-itl-ms", value], "milliseconds from 1, or off") for value in ("0", "never", "nan")),
        (["serve", "--max-waiting", "-1"], "--max-waiting"),
        (["serve", "--max-waiting-tokens", "0"], "--max-waiting-tokens"),
        (["serve", "--key-requests", "0"], "--key-requests"),
        (["serve", "--key-tokens-per-minute", "0"], "--key-tokens-per-minute"),
        (["serve", "--kv-cache-tokens", "0"], "--kv-cache-tokens"),
        (["serve", "--api-key", "a=k-twice", "--api-key", "b=k-twice"], "the same key"),
        (["serve", "--api-key", "a b"], "number 1"),
        (["chat", "--kv-cache-memory", "1GiB", "--kv-cache-tokens", "100"], "two units"),
        (["serve", "--threads", "-1"], "--threads"),
        (["serve", "--kv-cache-memory", "2 gigs"], "KiB, MiB or GiB"),
        (["serve", "--kv-cache-memory", "0"], "more than 0"),
        (["serve", "--drain-seconds", "-1"], "--drain-seconds"),
        (["serve", "--drain-seconds", "inf"], "--drain-seconds"),
        (["serve", "nowhere.gguf"], "nowhere.gguf does not exist"),
        (["serve", "-m", "nowhere.gguf"], "nowhere.gguf does not exist"),
        (["serve", "a.gguf", "-m", "b.gguf"], "two models"),
        (["chat", "nowhere.gguf"], "nowhere.gguf does not exist"),
        (["chat", "--url", "ftp://x"], "http://"),
        (["chat", "--temperature", "3"], "--temperature"),
        (["run"], "IN.jsonl"),
        (["run", "in.jsonl"], "--output"),
        (["run", "nowhere.jsonl", "-o", "out.jsonl"], "nowhere.jsonl does not exist"),
        (["run", __file__, "-o", __file__], "another name"),
        (["run", __file__, "-o", "/no/such/folder/out"], "cannot be written"),
        (["inspect", "nowhere.gguf"], "nowhere.gguf does not exist"),
        (["inspect", __file__], "test_command_line.py"),
        (["bench"], "command"),
        (["bench", "nonsense"], "nonsense"),
        (["bench", "serve", "--clients", "1;8"], "--clients"),
        (["bench", "serve", "--prompt-tokens", "0"], "--prompt-tokens"),
        (["bench", "serve", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("potok: ")
    assert said.err.count("\n") == 1
    assert says in said.err


def test_keys_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTOK_API_KEYS", "a=k-twice b=k-twice")
    assert execute(["serve"]) == 2
    assert "a and b have the same key" in capsys.readouterr().err


def test_a_broken_model_is_one_line_too(bare_gguf: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect", bare_gguf], ["chat", bare_gguf]):
        assert execute(command) == 2
        assert "bare.gguf" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "says"), [(b" \n", "no prompt"), (b"caf\xe9", "not utf-8 text")])
def test_a_chat_without_a_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: bytes, says: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    assert execute(["chat"]) == 2
    assert says in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--version"]) == 0
    assert capsys.readouterr().out == f"potok {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", [["serve"], ["chat"], ["run"], ["inspect"], ["bench"], ["bench", "serve"]])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([*command, "--help"]) == 0
    assert f"Usage: potok {' '.join(command)} " in capsys.readouterr().out


def test_serve_imports_little_before_it_starts_the_engine() -> None:
    program = "import sys, potok.cli; potok.cli.execute(['serve', 'nowhere.gguf']); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    heavy = {"numpy", "tokenizers", "jinja2", "fastapi", "uvicorn", "rich", "potok.frontend", "potok.llm"}
    assert not heavy & set(run.stdout.split())


def test_inspect_prints_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["inspect"]) == 0
    out = capsys.readouterr().out
    assert "49152 tokens" in out
    assert "Q4_1 x 90" in out


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1073741824", 2**30),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        (" 3 kB ", 3000),
        ("1TiB", 2**40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert options.parse_size(text) == size


@given(st.text(max_size=12))
def test_other_sizes_are_refused_and_never_zero(text: str) -> None:
    with contextlib.suppress(typer.BadParameter):
        assert options.parse_size(text) > 0


def test_flags_of_the_server_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[ServerConfig] = []
    monkeypatch.setattr("potok.cli.serve.run", lambda engine_config, config: given.append(config))
    (model := tmp_path / "m.gguf").touch()
    assert execute(["serve", str(model)]) == 0
    flags = {"max-waiting": 0, "max-waiting-tokens": 5, "key-requests": 6, "key-tokens-per-minute": 7}
    assert execute(["serve", str(model), *(word for name in flags for word in (f"--{name}", str(flags[name])))]) == 0
    assert given == [
        ServerConfig(),
        ServerConfig(max_waiting=0, max_waiting_tokens=5, key_requests=6, key_tokens_per_minute=7),
    ]


def test_what_is_not_given_is_left_to_the_engine(tmp_path: Path) -> None:
    config = options.engine_config(tmp_path, max_num_seqs=None, threads=3, block_size=16)
    assert (config.max_num_seqs, config.threads, config.block_size) == (0, 3, 16)
