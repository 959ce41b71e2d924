"""LocalEngine: an engine on a thread of this process, called from many."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_kit import VOCAB, Gate, expected, remember_all

from potok.backends.api import StepInputs
from potok.backends.modelled.scripted import ScriptedBackend
from potok.config import EngineConfig
from potok.engine.assemble import assemble
from potok.engine.local import LocalEngine
from potok.engine.probe import Speed
from potok.errors import EngineDead
from potok.finish import Finish
from potok.protocol import Chunk, Sampling


class Reply:
    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.done = threading.Event()

    def __call__(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        if chunk.finish is not None:
            self.done.set()

    def wait(self) -> list[int]:
        assert self.done.wait(20)
        return [token for chunk in self.chunks for token in chunk.tokens]


def local(**options: object) -> LocalEngine:
    backend = ScriptedBackend(remember_all, vocab_size=VOCAB, block_size=16, **options)  # type: ignore[arg-type]
    config = EngineConfig(model="", block_size=16, kv_cache_memory=64 * 16 * 4, max_num_batched_tokens=64)
    return LocalEngine(assemble(config, backend, memory=2**30, notes=[], probe=lambda _: Speed(1e-3)))


def ask(engine: LocalEngine, prompt: list[int], max_tokens: int) -> Reply:
    reply = Reply()
    engine.submit(prompt, max_tokens, Sampling(), reply)
    return reply


def test_many_threads_get_their_own_answers() -> None:
    engine = local()

    def one(i: int) -> bool:
        return ask(engine, [i, 2 * i], 10 + i % 7).wait() == expected([i, 2 * i], 10 + i % 7)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(100)))
    assert engine.info.vocab_size == VOCAB
    engine.close()
    assert engine.stats.generation_tokens == sum(10 + i % 7 for i in range(100))


def test_cancel_from_another_thread_and_from_the_sink() -> None:
    engine = local(seconds_per_step=0.001)
    seen: list[Chunk] = []
    ids: list[int] = []

    def cancel_itself(chunk: Chunk) -> None:
        seen.append(chunk)
        engine.cancel(ids[0])

    slow = Reply()
    slow_id = engine.submit([1], 900, Sampling(), slow)
    ids.append(engine.submit([5] * 20, 900, Sampling(), cancel_itself))
    assert ask(engine, [3], 10).wait() == expected([3], 10)
    engine.cancel(slow_id)
    engine.cancel(12345)
    assert ask(engine, [4], 10).wait() == expected([4], 10)
    assert len(seen) == 1
    assert not slow.done.is_set()
    engine.close()
    assert (engine.stats.running, engine.stats.kv_blocks_used) == (0, 0)


def test_close_ends_what_runs_and_may_be_called_again() -> None:
    gate = Gate()
    engine = local(on_step=gate)
    reply = ask(engine, [1], 5)
    gate.open(2)
    threading.Timer(0.1, gate.open).start()  # the step that is on its way when close is called
    engine.close()
    engine.close()
    assert engine.dead
    assert reply.chunks[-1].finish is Finish.ERROR
    with pytest.raises(EngineDead, match="closed"):
        engine.submit([1], 1, Sampling(), Reply())


def test_a_broken_engine_ends_every_request(capfd: pytest.CaptureFixture[str]) -> None:
    def explode(inputs: StepInputs) -> None:
        raise ValueError("boom")

    engine = local(on_step=explode)
    reply = ask(engine, [1], 5)
    reply.wait()
    assert reply.chunks[-1].error == "the engine stopped: ValueError: boom"
    with pytest.raises(EngineDead, match="boom"):
        engine.submit([1], 1, Sampling(), Reply())
    engine.close()
    assert "explode" in capfd.readouterr().err


def test_a_sink_that_raises_loses_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    engine = local()

    def broken(chunk: Chunk) -> None:
        raise RuntimeError("sink broke")

    engine.submit([3], 100, Sampling(), broken)
    assert ask(engine, [3], 20).wait() == expected([3], 20)
    engine.close()
    assert len(caplog.records) == 1
    assert "sink broke" in caplog.text


def test_a_forgotten_engine_is_ended() -> None:
    before = set(threading.enumerate())
    engine = local()
    ask(engine, [1], 3).wait()
    gone = weakref.ref(engine)
    [thread] = [t for t in threading.enumerate() if t.name == "potok-engine" and t not in before]
    del engine
    gc.collect()
    assert gone() is None
    thread.join(20)
    assert not thread.is_alive()


def test_a_program_may_simply_end() -> None:
    program = """
from test_local import local, ask
engine = local(seconds_per_step=0.005)
reply = ask(engine, [1], 900)
print("bye")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "bye\n", "")
