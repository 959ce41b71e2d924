"""What `potok bench prefix` measures, on a tiny model whose counts are known, and on the modelled clock."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from make_model import make_model

from potok.backends.modelled.scripted import ScriptedBackend
from potok.bench.closed_loop import Listed, check_same, checked, run_closed_loop
from potok.bench.modelled import ModelledRun, StepCost, run_modelled
from potok.bench.prefix import PrefixBenchOptions, run_prefix_bench
from potok.bench.prefix_loads import MIX, Dialogues, Lengths, behind_one_prompt, mixed_lengths
from potok.bench.prefix_report import footer, tables
from potok.cli import execute as command_line
from potok.config import EngineConfig
from potok.core.scheduler import Limits, Scheduler
from potok.errors import ClientError, ServerError

FEW = PrefixBenchOptions(
    requests=30,
    requests_off=5,
    users=6,
    turns=3,
    turns_open=4,
    turns_running=2,
    memory_requests=120,
    memory_pool=3,
    pressure_clients=3,
    pressure_requests=6,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", "tiny-llama")


def config(tiny: Path, **changes: int) -> EngineConfig:
    settings = {"threads": 1, "max_num_batched_tokens": 64, "kv_cache_memory": 1 << 22}
    return EngineConfig(model=str(tiny), **settings | changes)


def test_all_parts(tiny: Path) -> None:
    said: list[str] = []
    result = run_prefix_bench(config(tiny), FEW, "the command", said.append)
    on, off = result.shared
    assert (on.requests, off.requests) == (30, 5)
    assert off.computed_tokens == off.prompt_tokens == 5 * 268 and off.saved == 0
    # The first request computes the system prompt; nobody else does. Questions may begin alike by chance.
    assert on.prompt_tokens == 30 * 268 and 256 + 30 * 12 - 30 < on.computed_tokens <= 256 + 30 * 12
    assert 29 / 30 <= on.saved < 29.2 / 30

    assert [f.policy for f in result.dialogues] == ["fcfs", "longest_prefix", "off"]
    fcfs, longest, without = result.dialogues
    # A turn has its user's 20 tokens, and 32 for each turn before it.
    assert {f.prompt_tokens for f in result.dialogues} == {6 * (20 + 52 + 84)}
    assert fcfs.at_best == pytest.approx(1 - 60 / 156) and without.hit_rate == 0
    assert 0 < longest.hit_rate < longest.at_best and fcfs.hit_rate < fcfs.at_best
    assert fcfs.evicted_blocks > 0 and result.dialogue_blocks == 2 * 3

    memory = result.memory
    assert memory is not None and (memory.reserving, memory.num_blocks) == (3, 3 * 64)
    assert memory.admitted >= 3 * memory.reserving and memory.joined >= memory.admitted
    assert 14 < memory.empty_slots <= 1.01 * 16

    assert [f.clients for f in result.pressure] == [1, 3, 4, 12]
    assert [f.requests for f in result.pressure] == [6, 6, 48, 48]
    assert all(f.failures == 0 and f.preemptions < 3 * f.requests for f in result.pressure)

    text = "\n".join(footer(result))
    assert "the command" in text and "5 of the 30 requests" in text and "30 ms and 0.5 ms a token" in text
    titles = [str(table.title) for table in tables(result)]
    assert len(titles) == 4 and "18 blocks (52 modelled)" in titles[-1]
    assert said[0] == "loading the model" and said[-1] == "pressure, modelled"


def test_only_the_parts_that_are_asked_for(tiny: Path) -> None:
    result = run_prefix_bench(config(tiny), replace(FEW, parts=("memory",)), "")
    assert (result.shared, result.dialogues, result.pressure) == ([], [], []) and result.memory is not None
    assert len(tables(result)) == 1


@pytest.mark.parametrize(
    ("changes", "settings", "field"),
    [
        ({"parts": ("memory", "speed")}, {}, "--parts"),
        ({"users": 0}, {}, "--users"),
        ({"pressure_clients": 2}, {}, "--pressure-clients"),
        ({"requests_off": 31}, {}, "--requests-off"),
        ({}, {"max_model_len": 1000}, "max_model_len is 1000"),
        ({"users": 3000}, {}, "KV blocks"),
    ],
)
def test_loads_that_cannot_run_as_meant_are_refused(
    tiny: Path, changes: dict[str, object], settings: dict[str, int], field: str
) -> None:
    with pytest.raises(ClientError, match=field):
        run_prefix_bench(config(tiny, **settings), replace(FEW, **changes), "")  # type: ignore[arg-type]


def test_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    flags = "--parts shared,memory --requests 9 --requests-off 2 --system-tokens 70 --threads 1 --kv-cache-memory 4MiB"
    assert command_line(["bench", "prefix", str(tiny), *flags.split(), "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert "70 tokens in common" in shown and "running before the first preemption" in shown
    kept = json.loads(figures.read_text())
    assert kept["shared"][0]["saved"] > 0.8 and kept["memory"]["reserving"] == 8 and kept["pressure"] == []


def test_a_turn_comes_when_its_user_has_been_answered() -> None:
    source = Dialogues(1000, users=3, turns=4, turn_tokens=5, answer_tokens=2, seed=1)
    open_turns: list[tuple[int, list[int]]] = []
    histories: dict[int, list[int]] = {}
    turns: Counter[int] = Counter()
    while True:
        while (request := source.next()) is not None:
            user = request.id // 4
            assert request.id % 4 == turns[user] and user not in [u for u, _ in open_turns]
            assert request.prompt[:-5] == histories.get(user, []), "the whole history is sent again"
            turns[user] += 1
            open_turns.append((user, request.prompt))
        if not open_turns:
            break
        user, prompt = open_turns.pop(0)
        histories[user] = [*prompt, 7, 8]
        source.take(4 * user + turns[user] - 1, [7, 8])
    assert turns == {0: 4, 1: 4, 2: 4}


def test_the_mix_of_lengths() -> None:
    lengths = mixed_lengths(4000, 3)
    assert lengths == mixed_lengths(4000, 3) != mixed_lengths(4000, 4)
    assert all(20 <= n.prompt <= 200 for n in lengths)
    assert sum(n.output < 64 for n in lengths) / 4000 == pytest.approx(MIX[0][2] / 100, abs=0.03)
    assert sum(n.output > 256 for n in lengths) / 4000 == pytest.approx(MIX[2][2] / 100, abs=0.03)


def test_clients_ask_again_when_they_are_answered() -> None:
    backend = ScriptedBackend(lambda history: len(history) % 50, vocab_size=1000, block_size=16)
    backend.allocate(64, 1000)
    requests = behind_one_prompt(1000, 10, 20, 5, 3, seed=0)
    scheduler = Scheduler(Limits(8, 64, 1000, 16), 64)
    loop = run_closed_loop(scheduler, backend, Listed(requests), 4)
    assert loop.answers == {id: [25, 26, 27] for id in range(10)}
    asked = checked(loop)
    assert all(a.sent < a.first < a.ended for a in asked)
    assert [a.sent for a in asked] == sorted(a.sent for a in asked)
    assert sum(a.sent <= asked[0].first for a in asked) == 4, "no more than four are open"
    assert all(a.cached >= 20 for a in asked[1:])


def test_a_request_that_fails_and_answers_that_differ_are_said() -> None:
    backend = ScriptedBackend(lambda history: 1, vocab_size=1000, block_size=16, fails=lambda history: 777 in history)
    backend.allocate(64, 1000)
    requests = behind_one_prompt(700, 3, 20, 5, 3, seed=0)
    requests[1].prompt[-1] = 777
    loop = run_closed_loop(Scheduler(Limits(8, 64, 1000, 16), 64), backend, Listed(requests), 2)
    assert [a.failed for a in loop.asked.values()] == [False, True, False]
    with pytest.raises(ServerError, match="1 of 3 requests"):
        checked(loop)
    with pytest.raises(ServerError, match="1 answers depend on what was cached, that of request 5 first"):
        check_same({4: [1], 5: [2]}, {4: [1], 5: [3], 6: [4]}, "what was cached")


def test_a_modelled_run_that_can_be_followed_by_hand() -> None:
    scheduler = Scheduler(Limits(8, 100, 100, 4), 50, checked=True)
    # Both prompts in one step, then one token of each, then one of the longer.
    run = run_modelled(scheduler, [Lengths(5, 2), Lengths(8, 3)], clients=2, cost=StepCost(1.0, 0.1))
    steps = [1 + 1.3, 1 + 0.2, 1 + 0.1]
    assert run.seconds == pytest.approx(sum(steps))
    assert (run.output_tokens, run.failures, run.preemptions, run.most_preemptions) == (5, 0, 0, 0)
    assert (run.running_before_preemption, run.joined_before_preemption) == (2, 2)
    # Slots: 8 for 5 and 8 for 8, then 8 for 6 and 12 for 9, then 12 for 10.
    empty = steps[0] * 3 + steps[1] * 5 + steps[2] * 2
    assert run.empty_slots == pytest.approx(empty / (2 * steps[0] + 2 * steps[1] + steps[2]))


def test_modelled_requests_that_cannot_fit_are_failures() -> None:
    scheduler = Scheduler(Limits(8, 100, 100, 4), 5)
    run = run_modelled(scheduler, [Lengths(50, 2), Lengths(8, 3), Lengths(8, 30)], clients=2)
    assert (run.failures, run.output_tokens) == (2, 3)


@pytest.mark.parametrize("cost", [StepCost(0.004, 0.0012), StepCost(0.03, 0.0005)])
def test_a_pool_for_a_third_of_the_load_costs_little(cost: StepCost) -> None:
    """Whether a step is dear for its tokens, or dear in itself: then it is the fuller batch that pays."""
    lengths = mixed_lengths(160, 5)
    num_blocks = sum(-(-(n.prompt + n.output) // 32) for n in lengths) * 40 // len(lengths) // 3

    def run(clients: int) -> ModelledRun:
        return run_modelled(Scheduler(Limits(128, 96, 2048, 32), num_blocks), lengths, clients, cost)

    fits, third = run(13), run(40)
    assert fits.failures == third.failures == 0 and fits.output_tokens == third.output_tokens
    assert third.preemptions > 0 and third.most_preemptions <= 5
    assert third.preemptions < 3 * len(lengths)
    assert fits.seconds >= 0.8 * third.seconds
