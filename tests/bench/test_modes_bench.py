"""What `potok bench modes` measures: figures from hand-made records, and every part on a backend with a script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from make_model import make_model
from rich.console import Console

from potok.backends.modelled.scripted import ScriptedBackend
from potok.bench.bound import FACTORS, Ceilings, Linears, ModelWork, StepWork
from potok.bench.cells import MODES, Cell, CellRun, Offer, cell, find, requests, run_cell
from potok.bench.closed_loop import Asked
from potok.bench.crowd import FairCase, FairFigures, LongPromptFigures, fair_figures, long_prompt_figures, meet_tenant
from potok.bench.figures import Spread
from potok.bench.machine import Machine
from potok.bench.modes import PARTS, ModesBench, ModesBenchOptions, ModesBenchResult, run_modes_bench
from potok.bench.modes_report import footer, tables
from potok.bench.newcomer import Newcomer
from potok.bench.prefix_loads import Lengths
from potok.bench.schedulers import new_scheduler
from potok.bench.steps import Bound
from potok.cli import execute as command_line
from potok.config import EngineConfig
from potok.core.scheduler import Limits, Scheduler
from potok.engine.scheduling import SchedulerSettings, build_scheduler
from potok.engine.serve import Engine
from potok.errors import ClientError, ServerError
from potok.finish import Finish
from potok.protocol import Chunk, EngineInfo, Sampling, Shutdown, Stats, Step, Submit

VOCAB = 1000
SETTINGS = SchedulerSettings(
    limits=Limits(max_num_seqs=64, max_num_batched_tokens=96, max_model_len=8192, block_size=32),
    num_blocks=1200,
    prefix_caching=True,
    policy="fcfs",
    batching="continuous",
    padding_rows=True,
    max_wait_us=20_000,
    max_tokens_per_batch=0,
    delay_factor=0.0,
    target_us=100_000,
    token_us=100.0,
    tier=None,
)
#: A machine of one MAC a second and one byte a second.
ONE = Ceilings(1, 1.0, 1.0, 1.0, 1, 1.0, 1.0)


def remember(history: Sequence[int]) -> int:
    state = 17
    for token in history:
        state = (state * 31 + token) % 1_000_003
    return state % VOCAB


def engine(limits: Limits = SETTINGS.limits, **script: object) -> Engine:
    settings = msgspec.structs.replace(SETTINGS, limits=limits)
    backend = ScriptedBackend(**{"script": remember, "vocab_size": VOCAB} | script)  # type: ignore[arg-type]
    backend.allocate(settings.num_blocks, limits.max_model_len)
    info = EngineInfo(
        vocab_size=VOCAB,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_blocks=settings.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        threads=1,
        isa="scripted",
        kv_cache_bytes=0,
        notes=[],
    )
    return Engine(build_scheduler(settings, Scheduler), backend, info, settings)


def bench(options: ModesBenchOptions, **script: object) -> ModesBench:
    served = engine(**script)
    made = ModesBench(served, new_scheduler(served), options, lambda line: None)
    made.check_room()
    return made


FEW = ModesBenchOptions(
    clients=(1, 6),
    requests_per_client=3,
    prompt_tokens=5,
    output_tokens=4,
    mixed_clients=8,
    mixed_requests=12,
    requests_off=5,
    batch_size=4,
    max_wait_ms=1.0,
    streams=3,
    long_prompt_tokens=300,
    fair_rounds=1,
)


# -- cells ---------------------------------------------------------------------------------------------------------


def test_every_mode_on_the_same_requests() -> None:
    made = bench(FEW)
    made.warm_up()
    runs = {(run.part, run.clients, run.mode): run for run in made.cells()}
    assert list(runs) == [
        (part, n, mode) for part, n in (("clients", 1), ("clients", 6), ("mixed", 8)) for mode in MODES
    ]
    for (part, n, mode), run in runs.items():
        asked = {("clients", 1): 8, ("clients", 6): 18, ("mixed", 8): 12}[part, n]
        assert len(run.asked) == (5 if mode == "off" else asked)
        assert run.answers.items() <= runs[part, n, "continuous"].answers.items()
        most = {"off": 1, "continuous": n}.get(mode, min(n, FEW.batch_size))
        assert max(step.sampled for step in run.steps) == most
    assert made.same_answers == 8 + 18 + 12
    dead = {mode: runs["mixed", 8, mode].padding_rows for mode in MODES}
    assert dead["static"] > 500 and dead["dynamic"] > 500
    assert dead["off"] == dead["unpadded"] == dead["continuous"] == 0
    rows = {mode: sum(step.rows for step in runs["mixed", 8, mode].steps) for mode in MODES}
    assert rows["static"] - dead["static"] == rows["continuous"] == rows["unpadded"]


def test_members_of_a_batch_are_answered_when_it_ends() -> None:
    served = engine()
    offer = Offer("", 2, requests(VOCAB, [Lengths(5, 3), Lengths(5, 7)], 0, "two"))
    run = run_cell(new_scheduler(served)(batching="static"), served.backend, "static", offer, 2)
    assert run.padding_rows == 4
    assert run.asked[0].ended == run.asked[1].ended
    assert [len(run.answers[i]) for i in (0, 1)] == [3, 7]
    run = run_cell(new_scheduler(served)(), served.backend, "continuous", offer, 2)
    assert run.asked[0].ended < run.asked[1].ended


def test_answers_that_depend_on_the_mode_end_the_measurement() -> None:
    said = iter(range(10**6))
    with pytest.raises(ServerError, match="answers depend on the mode of batching"):
        bench(FEW, script=lambda history: next(said) % VOCAB).cells()


def test_requests_depend_on_their_name_alone() -> None:
    lengths = [Lengths(5, 3), Lengths(9, 4)]
    some = requests(VOCAB, lengths, 7, "a")
    assert some == requests(VOCAB, lengths, 7, "a") != requests(VOCAB, lengths, 7, "b")
    assert [(r.id, len(r.prompt), r.max_tokens, r.whole) for r in some] == [(7, 5, 3, True), (8, 9, 4, True)]


def a_cell(mode: str, tokens_per_s: float, mean_ms: float, padding_rows: int = 0, clients: int = 100) -> Cell:
    latency = Spread(mean_ms, mean_ms, mean_ms, mean_ms, mean_ms)
    return Cell("mixed", mode, clients, 10, 100, 1000, 10.0, tokens_per_s, 800.0, 0.5, latency, 50, 1000, padding_rows)


def test_figures_of_a_cell() -> None:
    work = ModelWork(Linears(nbytes=2), Linears(nbytes=1), kv_bytes=0, attention_macs=0)
    bound = Bound(ONE, FACTORS["avx2"], work)  # a step takes two seconds, and three when something is sampled
    asked = [Asked(5, sent=10.0, first=11.0, ended=16.0), Asked(7, sent=12.0, first=14.0, ended=20.0)]
    steps = [StepWork(12, 0, 0), StepWork(2, 2, 0), StepWork(2, 2, 0)]
    f = cell(CellRun("mixed", "static", 3, asked, {0: [1, 2, 3], 1: [4]}, steps, padding_rows=4), bound)
    assert (f.part, f.mode, f.clients, f.requests, f.steps) == ("mixed", "static", 3, 2, 3)
    assert (f.prompt_tokens, f.output_tokens, f.rows) == (12, 4, 16)
    assert (f.seconds, f.tokens_per_s, f.bound, f.of_bound) == (10.0, 0.4, 4 / 8, 0.8)
    assert (f.latency.mean, f.latency.p99, f.dead) == (7000, 8000, 0.25)


def test_the_same_offer_under_another_mode() -> None:
    cells = [a_cell("off", 200, 9000), a_cell("static", 250, 8000), a_cell("static", 300, 7000, clients=50)]
    assert find(cells, cells[0], "static") is cells[1] and find(cells, cells[2], "off") is None


# -- somebody who comes --------------------------------------------------------------------------------------------


def test_gaps_before_somebody_comes_and_meanwhile() -> None:
    met = Newcomer([], 0, Submit(9, [1], 1, Sampling()))
    met.times = {0: [1.0, 2.0, 3.0, 4.0, 8.0, 9.0, 9.5], 1: [2.5, 3.5, 4.5, 9.0, 10.0]}
    met.sent, met.first = 4.2, 9.0
    assert met.gaps_before() == [1, 1]  # 1.0 to 3.0 was before the other had begun
    assert met.gaps_meanwhile() == [4, 1, 1, 4.5]
    f = long_prompt_figures(met, 600, 5000.0, whole=False)
    assert (f.prompt_tokens, f.target_ms, f.decode_ms, f.gap.max) == (600, 5000, 1000, 4500)
    assert f.prompt_ms == pytest.approx(4800)


def test_what_a_target_leaves_a_prompt() -> None:
    gap = Spread(1, 1, 1, 1, 1)
    without = LongPromptFigures(600, 0.0, False, 20.0, gap, 6000.0)
    # 40 of 60 ms are the prompt's: it should take 9 s.
    assert LongPromptFigures(600, 60.0, False, 20.0, gap, 9900.0).of_its_part(without) == pytest.approx(1.1)
    assert LongPromptFigures(600, 60.0, False, 61.0, gap, 9900.0).of_its_part(without) is None


def submit(id: int) -> Submit:
    return Submit(id, [1, 2], 9, Sampling())


def test_who_comes_and_when_by_hand() -> None:
    met = Newcomer([submit(i) for i in range(4)], 2, submit(9), lambda met: met.ended >= 2)

    def arrived() -> list[int]:
        messages = met.receive(0.0)
        assert all(isinstance(m, Submit) and m.arrived_us > 0 for m in messages)
        return [m.id for m in messages if isinstance(m, Submit)]

    def step(*chunks: Chunk) -> None:
        met.send(Step(list(chunks), Stats()))

    assert arrived() == [0, 1] and arrived() == []
    step(Chunk(0, [5]), Chunk(1, [5]))
    step(Chunk(0, [6], Finish.LENGTH), Chunk(1, [6]))
    assert arrived() == [2]
    step(Chunk(1, [], Finish.LENGTH), Chunk(2, [6]))
    assert arrived() == [3, 9] and met.first == 0
    step(Chunk(9, [7]))
    assert met.first == pytest.approx(met.sent, abs=5) and met.end == 0 and arrived() == []
    step(Chunk(9, [7], Finish.LENGTH))
    assert met.end >= met.first and met.receive(0.0) == [Shutdown()]
    assert {id: len(times) for id, times in met.times.items()} == {0: 2, 1: 2, 2: 1, 3: 0}


def test_who_never_comes_and_who_fails() -> None:
    met = Newcomer([submit(0)], 1, submit(9), lambda met: False)
    met.receive(0.0)
    met.send(Step([Chunk(0, [5], Finish.LENGTH)], Stats()))
    with pytest.raises(ServerError, match="ended before anybody came"):
        met.receive(0.0)
    with pytest.raises(ServerError, match="failed: why"):
        met.send(Step([Chunk(0, [], Finish.ERROR, error="why")], Stats()))


def test_a_long_prompt_beside_streams() -> None:
    figures = bench(replace(FEW, parts=("long_prompt",))).long_prompt()
    assert [(f.prompt_tokens, f.whole, f.target_ms) for f in figures] == [
        (length, whole, target)
        for length in (300, 150)
        for whole, target in ((True, 0.0), (False, 0.0), (False, 100.0), (False, 60.0))
    ]
    for f in figures:
        assert f.decode_ms > 0 and 0 < f.gap.p50 <= f.gap.max and f.prompt_ms > 0


def test_a_prompt_in_one_step() -> None:
    """With room for all of it, and in chunks: the steps that computed several rows of one request tell."""
    chunks: list[int] = []
    made = bench(
        replace(FEW, parts=("long_prompt",), targets_ms=()), on_step=lambda inputs: chunks.append(len(inputs.tokens))
    )
    made.long_prompt()
    assert chunks.count(300 + 3) == chunks.count(150 + 3) == 1
    streams_begin = 3 * 48
    assert max(n for n in chunks if n not in {303, 153, streams_begin}) == 96


def test_a_stream_that_ends_too_early() -> None:
    """It has 23 steps left when the prompt comes, of which each computes a token of the prompt at most."""
    small = replace(SETTINGS.limits, max_model_len=120, max_num_batched_tokens=4)
    served = engine(small)
    options = replace(FEW, parts=("long_prompt",), long_prompt_tokens=110)
    with pytest.raises(ServerError, match="lower --long-prompt-tokens"):
        ModesBench(served, new_scheduler(served), options, lambda line: None).long_prompt()


def test_two_tenants() -> None:
    first_come, fair, at_best = bench(replace(FEW, parts=("fair",))).fair()
    assert [(f.policy, f.running, f.waiting) for f in (first_come, fair, at_best)] == [
        ("fcfs", 16, 68),
        ("fair", 16, 68),
        ("fcfs", 15, 0),
    ]
    assert all(
        len(f.latency_ms) == len(f.ttft_ms) == 1 and f.typical_ms >= f.typical_ttft_ms for f in (first_come, fair)
    )


def test_how_many_of_the_other_tenant_come_first() -> None:
    """Of its 100, when the one request of B has been answered: with 16 seats, or with one free from the start."""
    served = engine()
    new = new_scheduler(served)

    def before(policy: str, others: int) -> int:
        return meet_tenant(new(max_num_seqs=16, policy=policy), served.backend, others, "a meeting").ended

    assert before("fcfs", 100) >= 100 - 16
    assert before("fair", 100) <= before("fcfs", 15) + 3 < 16 + 40


def test_the_median_of_the_rounds() -> None:
    meetings = []
    for end in (9.0, 3.0, 4.0):
        met = Newcomer([], 0, submit(1))
        met.sent, met.first, met.end = 1.0, 1.5, end
        meetings.append(met)
    f = fair_figures(FairCase("fair", 100), meetings)
    assert (f.typical_ms, f.typical_ttft_ms, f.latency_ms) == (3000, 500, [8000, 2000, 3000])


# -- options and the command ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parts": ("speed",)}, "--parts must be some of clients,mixed,"),
        ({"modes": ("off", "off")}, "--modes must be some of off,static,"),
        ({"modes": ()}, "--modes must be some of"),
        ({"clients": ()}, "--clients must be numbers from 1 up"),
        ({"clients": (0, 4)}, "--clients must be numbers from 1 up"),
        ({"batch_size": 0}, "--batch-size must be at least 1, not 0"),
        ({"max_wait_ms": 0.0}, "--max-wait-ms must be above 0"),
        ({"targets_ms": (60.0, 0.0)}, "--targets-ms must be numbers above 0"),
        ({"long_prompt_tokens": 1}, "--long-prompt-tokens must be at least 2"),
        ({"fair_rounds": 0}, "--fair-rounds must be at least 1"),
    ],
)
def test_options_that_make_no_sense(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ClientError, match=sentence):
        run_modes_bench(EngineConfig(model="none"), replace(FEW, **changes), "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"output_tokens": 8190}, "the part clients has requests of 8195 tokens, but max_model_len is 8192"),
        ({"parts": ("long_prompt",), "long_prompt_tokens": 8192}, "the part long_prompt has requests of 8193 tokens"),
        ({"clients": (64,), "output_tokens": 700}, r"the part clients needs 1472 KV blocks, but there are \d+"),
    ],
)
def test_loads_that_cannot_run_as_meant(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ClientError, match=sentence):
        bench(replace(FEW, **changes))  # type: ignore[arg-type]


def test_command_with_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, figures = make_model(tmp_path / "tiny.gguf", "tiny-llama"), tmp_path / "figures.json"
    flags = (
        f"--parts {','.join(PARTS)} --clients 2,3 --requests-per-client 2 --output-tokens 4 --mixed-clients 3 "
        "--mixed-requests 4 --requests-off 2 --batch-size 3 --long-prompt-tokens 400 --fair-rounds 1 --threads 1 "
        "--kv-cache-memory 16MiB"
    )
    assert command_line(["bench", "modes", str(model), *flags.split(), "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert "Answers are the same in every mode: 24 requests were compared." in shown
    assert "mixed, 3 clients: continuous batching gives" in shown
    kept = json.loads(figures.read_text())
    assert len(kept["cells"]) == 3 * 5 + 2 and kept["machine"]["cores"] >= 1
    assert len(kept["long_prompt"]) == 8 and len(kept["fair"]) == 3
    assert kept["cells"][0]["bound"] > 0


def test_what_is_shown() -> None:
    spread = Spread(10.0, 20.0, 30.0, 70.0, 110.0)
    result = ModesBenchResult(
        command="the command",
        date="now",
        machine=Machine.read(),
        model="m",
        options=ModesBenchOptions(),
        isa="avx2",
        threads=2,
        max_num_seqs=64,
        max_num_batched_tokens=96,
        ceilings=ONE,
        factors=FACTORS["avx2"],
        work=ModelWork(Linears(), Linears(), 0, 0),
        notes=["a note"],
        cells=[a_cell("off", 200, 9000), a_cell("static", 250, 123450, 700), a_cell("continuous", 750, 2000)],
        same_answers=10,
        long_prompt=[
            LongPromptFigures(6000, 0.0, True, 20.0, spread, 5500.0),
            LongPromptFigures(6000, 0.0, False, 20.0, spread, 6000.0),
            LongPromptFigures(6000, 60.0, False, 20.0, spread, 9000.0),
        ],
        fair=[
            FairFigures("fcfs", 16, 68, [9000.0], [12000.0]),
            FairFigures("fair", 16, 68, [200.0], [2600.0]),
            FairFigures("fcfs", 15, 0, [100.0], [2000.0]),
        ],
    )
    text = "\n".join(footer(result))
    assert (
        "continuous batching gives 3.00 times the tokens of static batches with padding, and answers 61.73 times"
        in text
    )
    assert text.count("continuous batching gives") == 1 and "10 requests were compared" in text and "a note" in text
    screen = Console(width=80, file=StringIO())
    screen.print(*tables(result))
    assert "…" not in screen.file.getvalue(), "every table fits into 80 columns"  # type: ignore[attr-defined]
    cells, long_prompt, fair = ([list(column.cells) for column in table.columns] for table in tables(result))
    assert [row[1:] for row in zip(*cells, strict=True)] == [
        ("off", "10", "200", "800", "50 %", "9.00", "9.00", "", "", "0.80x"),
        ("static", "10", "250", "800", "50 %", "123.45", "123.45", "70 %", "1.25x", ""),
        ("continuous", "10", "750", "800", "50 %", "2.00", "2.00", "", "3.75x", "3.00x"),
    ]
    assert [row[1:] for row in zip(*long_prompt, strict=True)] == [
        ("one step", "20.0", "20.0", "70.0", "110", "5.50", "0.92x", ""),
        ("none", "20.0", "20.0", "70.0", "110", "6.00", "1.00x", ""),
        ("60", "20.0", "20.0", "70.0", "110", "9.00", "1.50x", "1.00x"),
    ]
    assert list(zip(*fair, strict=True)) == [
        ("fcfs", "16", "68", "9000", "12000", "6.00x", ""),
        ("fair", "16", "68", "200", "2600", "1.30x", "<= 1.5x"),
        ("at best", "15", "0", "100", "2000", "1.00x", ""),
    ]
