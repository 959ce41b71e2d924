"""Whole engines that write a journal: nobody who asks them notices, whether ids are replaced in it or not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engine_kit import VOCAB, ask, expected, remember_all, running
from journal_kit import replayed
from make_model import make_model

from potok import __version__
from potok.backends.api import StepInputs
from potok.backends.modelled.scripted import ScriptedBackend
from potok.config import EngineConfig
from potok.core.scheduler import Limits
from potok.engine.assemble import DISK_BYTES_PER_US, assemble
from potok.engine.build import build_engine
from potok.engine.client import EngineClient
from potok.engine.journal import JournalReader
from potok.engine.probe import Speed
from potok.engine.scheduling import SchedulerSettings, TierSettings
from potok.engine.serve import EXIT_BUG, Engine, serve_engine
from potok.errors import LoadError
from potok.finish import Finish
from potok.protocol import (
    CacheContents,
    Cancel,
    Chunk,
    DescribeCache,
    FromEngine,
    Sampling,
    Shutdown,
    Step,
    Submit,
    ToEngine,
)

B = 16
JOURNALS: dict[str, dict[str, Any]] = {
    "none": {},
    "plain": {"journal": "j"},
    "redacted": {"journal": "j", "journal_redact": True},
}


class Tape:
    """Each turn receives the next list; the turn after the last receives a Shutdown."""

    def __init__(self, turns: Sequence[Sequence[ToEngine]]) -> None:
        self._turns = deque(turns)
        self.sent: list[FromEngine] = []

    def receive(self, timeout: float) -> Sequence[ToEngine]:
        return self._turns.popleft() if self._turns else [Shutdown()]

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def chunks(self, id: int) -> list[Chunk]:
        return [c for message in self.sent if isinstance(message, Step) for c in message.chunks if c.id == id]


def scripted(**options: Any) -> Engine:
    on_step = options.pop("on_step", lambda inputs: None)
    backend = ScriptedBackend(
        remember_all, vocab_size=VOCAB, block_size=B, on_step=on_step, fails=lambda h: h[0] == 13 and len(h) == 30
    )
    config = EngineConfig(
        model="", block_size=B, kv_cache_memory=16 * B * 4, max_num_batched_tokens=64, max_num_seqs=8, **options
    )
    return assemble(config, backend, memory=2**30, notes=[], probe=lambda _: Speed(1e-3))


def conversation() -> list[list[ToEngine]]:
    """Prompts with common beginnings, of two keys and with salt; some are cancelled, one fails, one is impossible."""
    rng = Random(3)
    preamble = [rng.randrange(VOCAB) for _ in range(3 * B + 5)]
    turns: list[list[ToEngine]] = []
    for id in range(1, 60):
        prompt = preamble[: rng.randrange(len(preamble))] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        sampling = Sampling(
            logprobs=rng.choice((-1, 2)),
            prompt_logprobs=rng.choice((-1, -1, -1, 1)),
            stop_ids=(expected(prompt, 6)[-1],) if id % 5 == 0 else (),
        )
        namespace, salt = rng.choice(("", "alice", "bob")), rng.choice(("", "", "salt"))
        turns += [[Submit(id, prompt, rng.randrange(1, 60), sampling, namespace, salt)]]
        if id % 7 == 0:
            turns.append([Cancel(id - 1)])
    turns.append([Submit(100, [13] * 5, 40, Sampling()), Submit(101, [7] * 5000, 1, Sampling())])
    described: list[list[ToEngine]] = [[DescribeCache(i, 30, name)] for i, name in enumerate((None, "", "alice", "?"))]
    return [*turns, *described, *[[]] * 500, *described]


def hold(engine: Engine, turns: Sequence[Sequence[ToEngine]]) -> tuple[int, Tape]:
    tape = Tape(turns)
    return serve_engine(tape, lambda: engine), tape


@pytest.mark.parametrize("policy", ["fcfs", "longest_prefix", "fair"])
@pytest.mark.parametrize("kind", ["plain", "redacted"])
def test_answers_are_those_of_an_engine_without_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, policy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    turns = conversation()
    _, alone = hold(scripted(schedule_policy=policy), turns)
    code, recorded = hold(scripted(schedule_policy=policy, **JOURNALS[kind]), turns)
    assert code == 0
    asked = {m.id: m for turn in turns for m in turn if isinstance(m, Submit)}
    cancelled = {m.id for turn in turns for m in turn if isinstance(m, Cancel)}
    for id, submit in asked.items():
        chunks = recorded.chunks(id)
        tokens = [token for c in chunks for token in c.tokens]
        assert tokens == expected(submit.prompt, len(tokens))
        if id not in cancelled:
            assert answer(chunks) == answer(alone.chunks(id))
            assert chunks[-1].finish is not None
    assert recorded.chunks(100)[-1].finish is Finish.ERROR and len(recorded.chunks(101)) == 1
    assert {c.finish for id in asked for c in recorded.chunks(id)} == {None, Finish.STOP, Finish.LENGTH, Finish.ERROR}
    again = replayed(Path("j").read_bytes())
    assert not again.difference and not again.torn
    assert (again.requests, again.refused, again.cancels) == (len(asked), 1, len(cancelled))
    steps = [m for m in recorded.sent if isinstance(m, Step)]
    assert again.steps == steps[-1].stats.steps and again.preemptions == steps[-1].stats.preemptions > 0
    for told in (m for m in recorded.sent if isinstance(m, CacheContents)):
        assert {p.namespace for p in told.prefixes} <= {"", "alice", "bob"}
        for prefix in told.prefixes:
            assert (not prefix.tokens) == prefix.salted
            assert prefix.salted or any(
                submit.namespace == prefix.namespace
                and [*submit.prompt, *expected(submit.prompt, 64)][: len(prefix.tokens)] == prefix.tokens
                for submit in asked.values()
            )
    assert sum(len(m.prefixes) for m in recorded.sent if isinstance(m, CacheContents)) > 10


def answer(chunks: list[Chunk]) -> tuple[object, ...]:
    """All of it but for how it was cut into steps, and how much was found in the cache."""
    return (
        [token for c in chunks for token in c.tokens],
        [entry for c in chunks for entry in c.logprobs or ()],
        [entry for c in chunks for entry in c.prompt_logprobs or ()],
        chunks[-1].finish,
        chunks[-1].error,
    )


def test_a_model_sees_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the loop makes of ids, over a backend that reads all of it: biases, penalties, rated prompts."""
    monkeypatch.chdir(tmp_path)
    model = str(make_model(tmp_path / "tiny.gguf", "tiny-llama"))
    rng = Random(5)
    preamble = [rng.randrange(500) for _ in range(40)]
    turns: list[list[ToEngine]] = [
        [
            Submit(
                id,
                preamble[: 10 * id] + [rng.randrange(500) for _ in range(20)],
                8,
                Sampling(
                    temperature=0.7 if id % 2 else 0.0,
                    seed=id,
                    repetition_penalty=1.3,
                    frequency_penalty=0.5,
                    logit_bias=((id, 3.0), (id + 1, -3.0)),
                    stop_ids=tuple(range(0, 500, 31)),
                    logprobs=3,
                    prompt_logprobs=2 if id < 3 else -1,
                    logit_hash=True,
                ),
            )
        ]
        for id in range(1, 6)
    ]
    turns += [[]] * 60
    answers = {}
    for kind, journal in JOURNALS.items():
        config = EngineConfig(model=model, threads=1, kv_cache_memory=2**22, block_size=16, max_num_batched_tokens=48)
        options = {name: getattr(config, name) for name in config.__slots__} | journal
        code, tape = hold(build_engine(EngineConfig(**options)), turns)
        assert code == 0
        answers[kind] = [[*answer(tape.chunks(id)), [c.logit_hashes for c in tape.chunks(id)]] for id in range(1, 6)]
        assert all(each[3] is not None for each in answers[kind])
    assert answers["plain"] == answers["none"]
    assert answers["redacted"] == answers["none"]
    assert not replayed(Path("j").read_bytes()).difference
    assert not replayed(Path("j.1").read_bytes()).difference


def test_what_the_scheduler_is_built_from_is_what_was_asked_for(tmp_path: Path) -> None:
    engine = scripted(
        journal=str(tmp_path / "j"),
        prefix_cache_dir=str(tmp_path / "kv"),
        max_model_len=100,
        capacity_policy="guaranteed_no_evict",
        schedule_policy="lpm",
        batching="dynamic",
        padding_rows=False,
        max_wait_ms=1.5,
        max_tokens_per_batch=17,
        scheduler_delay_factor=0.25,
        target_itl_ms=33.3,
        swap_space=1.0,
    )
    engine.close()
    with (tmp_path / "j").open("rb") as file:
        header = JournalReader(file, "j").header
    assert not header.redacted and header.version == __version__
    assert header.settings == SchedulerSettings(
        limits=Limits(8, 64, 100, B, no_evict=True),
        num_blocks=16,
        prefix_caching=True,
        policy="longest_prefix",
        batching="dynamic",
        padding_rows=False,
        max_wait_us=1500,
        max_tokens_per_batch=17,
        delay_factor=0.25,
        target_us=33300,
        token_us=1000.0,
        tier=TierSettings(num_slots=2**18, found=[], read_us=B * 4 / DISK_BYTES_PER_US, token_us=1000.0),
    )


def test_the_start_says_where_the_journal_is(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for note in (f"journal {path}: all calls to the scheduler", f"; the older one is {path}.1"):
        engine = scripted(journal=str(path))
        engine.close()
        assert sum(note in line for line in engine.info.notes) == 1


def test_an_engine_that_meets_a_bug_leaves_a_whole_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = 0

    def break_at_three(inputs: StepInputs) -> None:
        nonlocal steps
        steps += 1
        assert steps < 3, "a bug"

    code, _ = hold(
        scripted(journal=str(tmp_path / "j"), on_step=break_at_three), [[Submit(1, [1, 2], 9, Sampling())], *[[]] * 9]
    )
    assert code == EXIT_BUG and "a bug" in capsys.readouterr().err
    again = replayed((tmp_path / "j").read_bytes())
    assert not again.difference and not again.torn and again.steps == 2


def test_an_engine_in_a_process_of_its_own(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "tiny.gguf", "tiny-llama"))
    path = tmp_path / "j"
    config = EngineConfig(model=model, threads=1, kv_cache_memory=2**22, journal=str(path))

    async def main() -> None:
        async with running(EngineClient.for_model(config)) as client:
            await asyncio.gather(*(ask(client, [i, i + 1, i + 2], 5 + i).wait() for i in range(6)))

    asyncio.run(main())
    again = replayed(path.read_bytes())
    assert not again.difference and not again.torn
    assert again.requests == 6 and again.steps >= 10


def test_a_place_that_cannot_be_used_is_told_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "tiny.gguf", "tiny-llama")
    monkeypatch.setattr("potok.engine.build.NativeBackend", None)
    with pytest.raises(LoadError, match=r"/proc/here/j.*--journal"):
        build_engine(EngineConfig(model=str(model), journal="/proc/here/j"))
