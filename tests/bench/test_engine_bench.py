"""The bound against figures worked out by hand, and a measurement of a tiny engine whose counts are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from make_model import make_model

from potok._native import ceiling
from potok.backends.api import StepInputs
from potok.bench.bound import FACTORS, Ceilings, Linears, ModelWork, StepWork, factors_of, step_seconds
from potok.bench.engine import (
    EngineBenchOptions,
    last_eighth,
    load_figures,
    prompt_rate,
    run_engine_bench,
)
from potok.bench.engine_report import footer, table
from potok.bench.steps import StepFigures
from potok.bench.work import measure_ceilings, model_work, step_work
from potok.cli import execute as command_line
from potok.config import EngineConfig
from potok.errors import ClientError
from potok.weights.default_model import find_default_model
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config

#: Two cores of Zen 3 at 3 GHz.
ZEN3 = Ceilings(
    threads=2,
    macs_per_s=96e9,
    bytes_per_s=22e9,
    small_pages_bytes_per_s=15e9,
    stream_bytes=1,
    wide_macs_per_s=96e9,
    clock_hz=3e9,
)
AVX2 = FACTORS["avx2"]


def default_model_work() -> ModelWork:
    file = GGUFFile.open(find_default_model())
    return model_work(file, read_config(file), kv_bytes=2 * 30 * 3 * 64 * 2)


def test_bound_of_the_default_model_on_two_cores_of_zen_3() -> None:
    """Tokens a second at context 256, worked out by hand from bytes, MACs and the rates of single kernels."""
    work = default_model_work()
    assert work.layers.macs_4bit == 106_168_320 and work.head.macs_8bit == 49152 * 576
    for rows, expected in ((1, 210), (8, 797), (32, 797), (100, 797)):
        seconds = step_seconds(work, ZEN3, AVX2, StepWork(rows=rows, sampled=rows, decode_context=256 * rows))
        assert rows / seconds == pytest.approx(expected, rel=0.01)


def test_bound_of_prompts() -> None:
    work = default_model_work()
    one = step_seconds(work, ZEN3, AVX2, StepWork(rows=1000, sampled=1, decode_context=0))
    assert 1000 / one == pytest.approx(106.2e6**-1 * 1.77 * 96e9, rel=0.005)  # the layers, and one row of the head
    context = sum(range(1, 1001))
    attention = step_seconds(work, ZEN3, AVX2, StepWork(1000, 1, 0, context)) - one
    assert attention == pytest.approx(context * 2 * 30 * 9 * 64 / (0.75 * 96e9))


def test_each_table_is_held_against_the_vectors_that_it_uses() -> None:
    machine = Ceilings(1, 100.0, 1e9, 1e9, 1, 250.0, 1e9)
    assert machine.p(FACTORS["avx2"]) == 100 and machine.p(FACTORS["avx512vnni"]) == 250
    assert factors_of("scalar") == FACTORS["avx2"]
    for macs, part in (("macs_4bit", "bits4"), ("macs_8bit", "bits8"), ("macs_float", "floats")):
        for isa, p in (("avx2", 100), ("avx512vnni", 250), ("amx", 250)):
            work = ModelWork(Linears(**{macs: 1000}), Linears(), kv_bytes=0, attention_macs=0)
            seconds = step_seconds(work, machine, factors_of(isa), StepWork(rows=3, sampled=0, decode_context=0))
            assert seconds == pytest.approx(3 * 1000 / (getattr(FACTORS[isa], part) * p))


def test_bound_of_a_step_that_samples_nothing_leaves_the_head_out() -> None:
    work = ModelWork(layers=Linears(nbytes=100), head=Linears(nbytes=1000), kv_bytes=0, attention_macs=0)
    machine = Ceilings(1, 1e9, 10.0, 10.0, 1, 1e9, 1e9)
    assert step_seconds(work, machine, AVX2, StepWork(rows=1, sampled=0, decode_context=0)) == 10
    assert step_seconds(work, machine, AVX2, StepWork(rows=1, sampled=1, decode_context=0)) == 110


def test_formats_count_by_their_bits(tmp_path: Path) -> None:
    def macs(format: str) -> Linears:
        file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama-256", format))
        return model_work(file, read_config(file), 0).layers

    total = 2 * (256 * 384 + 256 * 256 + 3 * 256 * 256)
    for format in ("Q4_0", "Q5_1", "Q4_K", "Q5_K", "IQ4_XS", "Q2_K"):
        assert (macs(format).macs_4bit, macs(format).macs_8bit, macs(format).macs_float) == (total, 0, 0)
    for format in ("Q8_0", "Q6_K"):
        assert (macs(format).macs_4bit, macs(format).macs_8bit, macs(format).macs_float) == (0, total, 0)
    for format in ("F32", "F16", "BF16"):
        assert (macs(format).macs_4bit, macs(format).macs_8bit, macs(format).macs_float) == (0, 0, total)
    assert macs("F16").nbytes == 2 * total


def test_a_step_of_prompts_and_decoding_rows() -> None:
    """Three segments: one row at position 40, a chunk at 10..12, one row at 0."""
    ints = [np.array(a, np.int32) for a in ([7] * 5, [40, 10, 11, 12, 0], [0, 1, 4, 5], [0, 2, 3, 4], [0] * 4, [0, 4])]
    assert step_work(StepInputs(*ints, copies=np.empty((0, 2), np.int32))) == StepWork(
        rows=5, sampled=2, decode_context=42, prompt_context=36
    )


def test_the_steady_part_of_a_load() -> None:
    step = StepFigures(rows=4, sampled=2, prompt=True, seconds=0.5, native=0.4, bound=0.2)
    full = StepFigures(rows=2, sampled=2, prompt=False, seconds=0.1, native=0.08, bound=0.05)
    last = StepFigures(rows=1, sampled=1, prompt=False, seconds=0.1, native=0.1, bound=0.05)
    load = load_figures(2, [step, full, full, last], ZEN3)
    assert (load.rows, load.decode.steps, load.overall.steps, load.ceilings) == (2, 2, 4, ZEN3)
    assert load.decode.tokens_per_s == pytest.approx(20)
    assert load.decode.of_bound == pytest.approx(0.5)
    assert load.decode.python == pytest.approx(0.2)
    assert load.overall.tokens_per_s == pytest.approx(7 / 0.8)
    assert prompt_rate([step]).tokens_per_s == pytest.approx(8)


def test_the_end_of_a_prompt_is_the_last_steps_that_hold_an_eighth_of_it() -> None:
    def steps(*rows: int) -> list[StepFigures]:
        return [StepFigures(n, 0, prompt=True, seconds=1.0, native=1.0, bound=1.0) for n in rows]

    for rows, last in (((64,), 1), ((32, 32), 1), ((16, 16, 16, 16, 4), 2), ((8,) * 8, 1), ((8,) * 7 + (7,), 2)):
        assert last_eighth(steps(*rows)) == steps(*rows)[-last:]


def test_ceilings_are_those_of_a_machine() -> None:
    one = measure_ceilings(1, 1 << 24)
    assert 0.3e9 < one.clock_hz < 10e9
    # A core retires at most two multiply-adds of 16 floats a cycle; a busy machine gives us half of one at worst.
    assert one.clock_hz / 2 < one.macs_per_s < 2.5 * 16 * one.clock_hz
    assert one.wide_macs_per_s > 0.5 * one.macs_per_s
    assert 0.1e9 < one.bytes_per_s < 1000e9 and 0.1e9 < one.small_pages_bytes_per_s < 1000e9


def test_ceilings_refuse_what_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="threads"):
        ceiling.fma_macs_per_second(0, "baseline")
    with pytest.raises(ValueError, match="avx4096"):
        ceiling.fma_macs_per_second(1, "avx4096")
    with pytest.raises(ValueError, match="bytes"):
        ceiling.stream_bytes_per_second(2, 100)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", "tiny-llama")


def options(**changes: object) -> EngineBenchOptions:
    return EngineBenchOptions(**{"requests": (1, 5), "prompt_tokens": 7, "output_tokens": 9} | changes)


def test_every_request_runs_to_its_last_token(tiny: Path) -> None:
    config = EngineConfig(
        model=str(tiny), threads=1, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory=1 << 20
    )
    said: list[str] = []
    result = run_engine_bench(config, options(long_prompt_tokens=100), "the command", said.append)
    one, five = result.loads
    # The first token comes with the prompt; all five start in one step.
    assert (one.requests, one.rows, one.decode.steps, one.overall.steps) == (1, 1, 8, 9)
    assert (five.requests, five.rows, five.decode.steps, five.overall.steps) == (5, 5, 8, 9)
    assert result.prompt.steps == 2  # of 64 and 36 tokens
    assert (result.prompt_end.steps, result.prompt_end_tokens) == (1, 36)
    for rate in (one.decode, one.overall, five.decode, five.overall, result.prompt, result.prompt_end):
        assert rate.of_bound == pytest.approx(rate.tokens_per_s / rate.bound)
        assert 0 < rate.python < 1
    shown = "\n".join([str(table(result).title), *footer(result)])
    assert [*table(result).columns[0].cells] == ["1", "5", "prompt of 100", "its last 36"]
    assert f"of {result.isa}" in shown and result.factors == factors_of(result.isa)
    assert "7 tokens in, 9 out" in shown and "the command" in shown and result.machine.cpu in shown
    assert said == ["the machine", "1 request", "5 requests", "prompts"]
    # W was read over the weights and what the requests of a load have stored when half of their output is there.
    read = [load.ceilings.stream_bytes - result.prompt_ceilings.stream_bytes for load in (one, five)]
    assert result.prompt_ceilings.stream_bytes == result.work.nbytes
    assert read == [(7 + 9 // 2) * result.work.kv_bytes, 5 * (7 + 9 // 2) * result.work.kv_bytes]


def test_the_median_round_counts_against_the_machine_around_it(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """A machine that gets slower from measurement to measurement, while the steps do not."""
    measured: list[float] = []

    def slower(threads: int, stream_bytes: int) -> Ceilings:
        measured.append(1e9 / (len(measured) + 1))
        return replace(ZEN3, macs_per_s=measured[-1], bytes_per_s=1e15, stream_bytes=stream_bytes)

    monkeypatch.setattr("potok.bench.steps.measure_ceilings", slower)
    config = EngineConfig(model=str(tiny), threads=1, max_num_seqs=8, kv_cache_memory=1 << 20)
    result = run_engine_bench(config, options(requests=(5,), output_tokens=40, rounds=3), "")
    (load,), (rounds,) = result.loads, result.of_rounds
    assert len(rounds) == 3 and load.decode.of_bound == sorted(rounds)[1]
    # The first measurement is the engine's; the rounds lie between the second and the fifth.
    between = [(measured[i] + measured[i + 1]) / 2 for i in (1, 2, 3)]
    assert load.ceilings.macs_per_s == between[rounds.index(load.decode.of_bound)]


@pytest.mark.parametrize(
    ("changes", "settings", "field"),
    [
        ({"requests": (0,)}, {}, "--requests"),
        ({"output_tokens": 2}, {}, "--output-tokens"),
        ({"requests": (9,)}, {}, "--requests"),
        ({"requests": (5,), "output_tokens": 500}, {"kv_cache_memory": 1 << 20}, "KV blocks"),
        ({"prompt_tokens": 2000, "output_tokens": 100}, {}, "max_model_len"),
    ],
)
def test_loads_that_cannot_run_as_meant_are_refused(tiny: Path, changes: dict, settings: dict, field: str) -> None:
    config = EngineConfig(model=str(tiny), threads=1, max_num_seqs=8, **{"kv_cache_memory": 1 << 24} | settings)
    with pytest.raises(ClientError, match=field):
        run_engine_bench(config, options(**changes), "")


def test_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    arguments = (
        f"bench engine {tiny} --requests 2 --prompt-tokens 5 --output-tokens 4 --long-prompt-tokens 20 --threads 1"
    )
    assert command_line([*arguments.split(), "--kv-cache-memory", "1MiB", "--json", str(figures)]) == 0
    assert "prompt of 20" in capsys.readouterr().out
    kept = json.loads(figures.read_text())
    assert kept["threads"] == 1 and kept["loads"][0]["requests"] == 2 and kept["machine"]["cores"] >= 1

    assert command_line(["bench", "engine", "--requests", "1,x"]) == 2
    assert "--requests must be whole numbers" in capsys.readouterr().err
