"""What HTTP costs, measured on a real server with a few short requests: both sides did what was asked of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from potok.bench.http import HttpBenchOptions, HttpTurn, InProcessTurn, run_http_bench
from potok.bench.http_report import footer, table
from potok.bench.own_server import OwnServer, cpu_seconds, flags_of
from potok.cli import execute as command_line
from potok.config import EngineConfig
from potok.errors import ClientError, ServerError
from potok.weights.default_model import find_default_model


def config(**settings: int) -> EngineConfig:
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory": 1 << 24, "threads": 1}
    return EngineConfig(model=str(find_default_model()), **defaults | settings)


def test_two_rounds_in_turns() -> None:
    said: list[str] = []
    options = HttpBenchOptions(requests=3, prompt_tokens=8, output_tokens=6, rounds=2)
    result = run_http_bench(config(), options, "the command", said.append)
    assert said[2:] == [
        "round 1: in this process",
        "round 1: over HTTP",
        "round 2: over HTTP",
        "round 2: in this process",
    ]
    assert len(result.in_process) == len(result.http) == 2
    for turn in (*result.in_process, *result.http):
        assert turn.tokens_per_s > 0 and turn.engine_us > 0
    for http in result.http:
        assert http.client_us > 0 and http.api_us >= 0
    assert (result.threads, result.max_num_batched_tokens) == (1, 64)
    columns = [list(column.cells) for column in table(result).columns]
    assert columns[0] == ["1", "2", "best"]
    best = max(t.tokens_per_s for t in result.http) / max(t.tokens_per_s for t in result.in_process)
    assert columns[-1][-1] == f"{100 * best:.0f} %"
    assert "the command" in footer(result) and any(result.machine.cpu in line for line in footer(result))


def test_command_keeps_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.jsonl"
    flags = "--requests 2 --prompt-tokens 5 --output-tokens 3 --rounds 1 --threads 1 --kv-cache-memory 16MiB"
    assert command_line(["bench", "http", *flags.split(), "--json", str(figures)]) == 0
    assert "2 requests at once, 5 tokens in, 3 out" in capsys.readouterr().out
    kept = json.loads(figures.read_text())
    assert InProcessTurn(**kept["in_process"][0]).tokens_per_s > 0
    assert HttpTurn(**kept["http"][0]).tokens_per_s > 0


@pytest.mark.parametrize(
    ("changes", "settings", "field"),
    [
        ({"rounds": 0}, {}, "--rounds"),
        ({"requests": 9}, {}, "--requests"),
        ({"requests": 8, "output_tokens": 200}, {}, "KV blocks"),
    ],
)
def test_requests_that_would_not_run_all_at_once_are_refused(changes: dict, settings: dict, field: str) -> None:
    with pytest.raises(ClientError, match=field):
        run_http_bench(config(**settings), HttpBenchOptions(**{"requests": 2} | changes), "")


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"no model")
    path = str(tmp_path / "broken.gguf")
    unusual = EngineConfig(model=path, enable_prefix_caching=False, capacity_policy="guaranteed_no_evict")
    for config in (EngineConfig(model=path), unusual):  # whose flags are understood
        with pytest.raises(ServerError, match=r"broken\.gguf"), OwnServer(config):
            pass


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_itl_ms": 0.0, "batching": "dynamic", "padding_rows": False, "max_wait_ms": 0.0},
        {"batching": "dynamic", "max_tokens_per_batch": 100, "journal": "a file", "journal_redact": True},
        {"scheduler_delay_factor": 0.5, "schedule_policy": "fair", "target_itl_ms": 62.5, "threads": 2},
        {"enable_prefix_caching": False, "max_num_seqs": 3, "swap_space": 1.5, "kv_cache_tokens": 9000},
    ],
)
def test_a_server_gets_the_settings_that_were_meant(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[EngineConfig] = []
    monkeypatch.setattr("potok.cli.serve.run", lambda config, server_config: given.append(config))
    (model := tmp_path / "m.gguf").touch()
    meant = EngineConfig(model=str(model), **settings)
    assert command_line(["serve", str(model), *flags_of(meant)]) == 0
    assert given == [meant]


def test_cpu_time_of_a_process() -> None:
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)
