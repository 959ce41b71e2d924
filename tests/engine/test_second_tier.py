"""The second tier in whole engines: over the scripted backend on a thread, and the native one in a process."""

from __future__ import annotations

import asyncio
import queue
import random
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from engine_kit import VOCAB, ask, expected, remember_all, running, until
from make_model import make_model

from potok.backends.modelled.scripted import ScriptedBackend
from potok.config import EngineConfig
from potok.core.scheduler import Limits, Scheduler
from potok.core.tier import Done, Kind, Tier, Transfer
from potok.engine.assemble import assemble
from potok.engine.build import build_engine
from potok.engine.client import EngineClient
from potok.engine.fingerprint import Fingerprint
from potok.engine.host import EngineProcess
from potok.engine.local import LocalEngine
from potok.engine.loop import HEARTBEAT_SECONDS, EngineLoop
from potok.engine.probe import Speed
from potok.engine.serve import Engine
from potok.errors import LoadError
from potok.protocol import Chunk, FromEngine, Sampling, Shutdown, Step, Submit, ToEngine

PROMPT = [random.Random(1).randrange(VOCAB) for _ in range(200)]
B = 16


def build(folder: Path | str, fingerprint: str = "f") -> Engine:
    backend = ScriptedBackend(remember_all, vocab_size=VOCAB, block_size=B)
    config = EngineConfig(model="", kv_cache_memory=64 * B * 4, block_size=B, prefix_cache_dir=str(folder))
    return assemble(
        config, backend, memory=2**30, notes=[], probe=lambda _: Speed(1e-3), fingerprint=lambda: fingerprint
    )


def answer(engine: Engine, prompt: Sequence[int] = PROMPT) -> Chunk:
    """Runs the engine for one request and until all is written; returns the request's last chunk."""
    local = LocalEngine(engine)
    chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    local.submit(list(prompt), 3, Sampling(), chunks.put)
    tokens: list[int] = []
    while True:
        last = chunks.get(timeout=20)
        tokens += last.tokens
        if last.finish is not None:
            break
    local.close()
    assert tokens == expected(prompt, 3)
    return last


def note(engine: Engine) -> str:
    return next(line for line in engine.info.notes if line.startswith("prefix_cache_dir"))


def test_a_new_engine_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    first = build(tmp_path)
    assert f"{tmp_path}, 4.0 GiB: 0 of 1048576 blocks are there" in note(first)
    local = LocalEngine(first)
    done: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    local.submit(list(PROMPT), 1, Sampling(), done.put)
    assert done.get(timeout=20).cached_tokens == 0
    while local.stats.tier_blocks < 12:
        pass
    assert (local.stats.tier_written_blocks, local.stats.tier_written_bytes) == (12, 12 * B * 4)
    local.close()
    second = build(tmp_path)
    assert "12 of 1048576 blocks are there, 192 tokens" in note(second)
    assert answer(second).cached_tokens == 192
    other = build(tmp_path, "another model")
    assert answer(other).cached_tokens == 0


def test_a_second_engine_in_the_same_folder_does_without(tmp_path: Path) -> None:
    first, second = build(tmp_path), build(tmp_path)
    assert "another process uses it" in note(second)
    for engine in (first, second):
        answer(engine)
    assert answer(build(tmp_path)).finish is not None, "both have closed their files"


def test_a_folder_that_cannot_be_used_ends_the_start() -> None:
    with pytest.raises(LoadError, match=r"/proc/here.*--prefix-cache-dir"):
        build("/proc/here")


class LateStore:
    """Ends each read when it has been asked `patience` times, without a word about the block's content."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.begun: list[Transfer] = []

    def begin(self, transfers: Iterable[Transfer]) -> None:
        self.begun += transfers

    def end(self) -> list[Done]:
        if self.begun and self.patience > 0:
            self.patience -= 1
            return []
        done, self.begun = [Done(t.id, False, 1) for t in self.begun], []
        return done

    def close(self) -> None:
        """Nothing to close."""


class Tape:
    def __init__(self, *turns: Sequence[ToEngine]) -> None:
        self.turns = deque(turns)
        self.waits: list[float] = []
        self.steps: list[Step] = []

    def receive(self, timeout: float) -> Sequence[ToEngine]:
        self.waits.append(timeout)
        return self.turns.popleft() if self.turns else [Shutdown()]

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, Step)
        self.steps.append(message)


def test_a_loop_that_waits_for_reads_neither_spins_nor_sleeps() -> None:
    stored = Scheduler(Limits(4, 512, 1024, B), 64, tier=Tier(64, B))
    submit = Submit(1, PROMPT, 2, Sampling())
    backend = ScriptedBackend(remember_all, vocab_size=VOCAB, block_size=B)
    backend.allocate(64, 1024)
    store = LateStore(0)
    EngineLoop(stored, backend, Tape([submit], [], []), store).run()
    digests = [t.digest for t in store.begun if t.kind is Kind.WRITE]
    assert len(digests) == 8, "an eighth of the pool at a time"

    tier = Tier(64, B, [(digest, i) for i, digest in enumerate(digests)], token_us=1e6)
    tape = Tape([submit], *[[]] * 12)
    EngineLoop(Scheduler(Limits(4, 512, 1024, B), 64, tier=tier), backend, tape, LateStore(5)).run()
    assert tape.waits[0] == 0.0
    assert all(0 < wait <= 0.001 for wait in tape.waits[1:7])
    assert [t for s in tape.steps for c in s.chunks for t in c.tokens] == expected(PROMPT, 2)
    assert tape.waits[7] == 0.0 and tape.waits[-1] == HEARTBEAT_SECONDS, "computed, and all written or given up"
    assert tape.steps[-1].stats.tier_failures >= 8


def test_the_fingerprint_is_of_all_that_the_bits_depend_on(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1000))
    config = EngineConfig(model=str(path))
    names = [Fingerprint(config).wait(), Fingerprint(EngineConfig(model=str(path), threads=3, swap_space=1)).wait()]
    assert names[0] == names[1] and len(names[0]) == 32
    for other in ({"kv_cache_dtype": "int8"}, {"block_size": 64}, {"activation_bits": 16}):
        names.append(Fingerprint(EngineConfig(model=str(path), **other)).wait())  # type: ignore[arg-type]
    path.write_bytes(bytes(999) + b"\1")
    names.append(Fingerprint(config).wait())
    assert len(set(names)) == 5
    path.unlink()
    with pytest.raises(LoadError, match=r"model\.gguf"):
        Fingerprint(config).wait()


def test_a_killed_process_leaves_its_prefixes_to_the_next(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "tiny.gguf", "tiny-llama"))
    config = EngineConfig(model=model, threads=1, kv_cache_memory=4 * 2**20, prefix_cache_dir=str(tmp_path / "kv"))
    prompt = [i * i % 200 for i in range(160)]
    sampling = Sampling(logit_hash=True)

    async def main() -> None:
        process = EngineProcess.for_model(config)
        async with running(EngineClient(process)) as client:
            before = await ask(client, prompt, 4, sampling).wait()
            assert before.chunks[-1].cached_tokens == 0
            await until(lambda: client.stats.tier_blocks == 5)
            process.kill()
            await client.wait_dead()
        async with running(EngineClient.for_model(config)) as client:
            after = await ask(client, prompt, 4, sampling).wait()
            assert after.chunks[-1].cached_tokens == 159
            assert [c.logit_hashes for c in after.chunks] == [c.logit_hashes for c in before.chunks]

    asyncio.run(main())


@pytest.mark.parametrize("space", [0.0, -1.0, float("inf"), float("nan")])
def test_swap_space_must_be_a_size(tmp_path: Path, space: float) -> None:
    model = str(make_model(tmp_path / "tiny.gguf", "tiny-llama"))
    with pytest.raises(LoadError, match="swap_space"):
        build_engine(EngineConfig(model=model, swap_space=space))


def test_a_folder_without_prefix_caching_is_a_contradiction(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "tiny.gguf", "tiny-llama"))
    with pytest.raises(LoadError, match="prefix_cache_dir"):
        build_engine(EngineConfig(model=model, prefix_cache_dir=str(tmp_path), enable_prefix_caching=False))
