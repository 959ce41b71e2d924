"""EngineClient through real sockets, over an engine on a thread."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import re
import signal
import stat
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from engine_kit import VOCAB, Answer, Gate, ask, expected, remember_all, running, until

from potok.backends.api import StepInputs
from potok.backends.modelled.scripted import ScriptedBackend
from potok.engine.client import EngineClient
from potok.engine.host import EngineHost
from potok.engine.ipc import EngineEnd
from potok.engine.thread import EngineThread, threaded_client
from potok.errors import EngineDead, LoadError
from potok.finish import Finish
from potok.params import Sharing, Terms
from potok.protocol import Chunk, EngineInfo, Ready, Sampling, Stats, Step, Submit


def scripted(**options: object) -> ScriptedBackend:
    return ScriptedBackend(remember_all, vocab_size=VOCAB, block_size=16, **options)  # type: ignore[arg-type]


def test_a_hundred_requests_at_once_are_each_answered_as_if_alone() -> None:
    """Mixed lengths, a small budget, and a pool that forces preemption."""
    random_ = random.Random(1)
    asked = [
        ([random_.randrange(VOCAB) for _ in range(random_.randrange(1, 120))], random_.randrange(1, 80))
        for _ in range(100)
    ]

    async def main() -> None:
        async with running(threaded_client(scripted(), num_blocks=24, max_num_batched_tokens=48)) as client:
            answers = [ask(client, prompt, count) for prompt, count in asked]
            for (prompt, count), answer in zip(asked, answers, strict=True):
                await answer.wait()
                assert answer.tokens == expected(prompt, count)
                assert answer.finish is Finish.LENGTH
            await until(lambda: client.stats.running == 0)
            stats = client.stats
            assert (stats.waiting, stats.kv_blocks_used, stats.kv_blocks_total) == (0, 0, 24)
            assert stats.generation_tokens == sum(count for _, count in asked)
            assert stats.preemptions > 0

    asyncio.run(main())


def test_info_tells_what_was_resolved() -> None:
    async def main() -> None:
        async with running(threaded_client(scripted(), num_blocks=10, max_num_seqs=3)) as client:
            info = client.info
            assert (info.vocab_size, info.num_blocks, info.block_size, info.max_model_len) == (VOCAB, 10, 16, 160)
            assert (info.max_num_seqs, info.max_num_batched_tokens, info.kv_cache_bytes) == (3, 256, 640)
            assert any(note.startswith("max_num_seqs 3: ") for note in info.notes)

    asyncio.run(main())


@pytest.mark.parametrize("phase", ["waiting", "mid-prompt", "generating"])
def test_cancel_empties_the_engine_within_one_step(phase: str) -> None:
    async def main() -> None:
        gate = Gate()
        client = threaded_client(scripted(on_step=gate), max_num_seqs=1, max_num_batched_tokens=16)
        async with running(client):
            blocker = ask(client, [1], 3 if phase == "waiting" else 1)
            victim = Answer()
            await until(lambda: gate.entered == 1)
            id = client.submit(list(range(40)), 50, Sampling(), victim)
            if phase != "waiting":
                gate.open()
                await blocker.wait()
                steps = {"mid-prompt": 1, "generating": 4}[phase]
                gate.open(steps)
                await until(lambda: gate.entered == 2 + steps)
            seen = {"generating": 2}.get(phase, 0)
            await until(lambda: len(victim.chunks) == seen)
            client.cancel(id)
            await asyncio.sleep(0.05)  # the Cancel lies in the engine's socket while the step is held back
            before = gate.entered - 1  # steps
            gate.open()
            await until(lambda: client.stats.steps > before)
            await until(lambda: client.stats.waiting == 0)
            if phase == "waiting":
                assert client.stats.steps == before + 1
                gate.open(2)
                assert (await blocker.wait()).tokens == expected([1], 3)
            await until(lambda: client.stats.running == 0 and client.stats.kv_blocks_used == 0)
            assert client.stats.steps == before + (3 if phase == "waiting" else 1)
            assert len(victim.chunks) == seen
            client.cancel(id)
            client.cancel(999)

    asyncio.run(main())


def test_the_prefix_cache_is_described_until_the_engine_ends() -> None:
    async def main() -> None:
        gate = Gate()
        async with running(threaded_client(scripted(on_step=gate))) as client:
            gate.open(8)
            prompt = list(range(40))
            for namespace, salt in (("a", ""), ("a", ""), ("b", ""), ("a", "s")):
                answer = Answer()
                client.submit(prompt, 2, Sampling(), answer, Terms(Sharing(namespace, salt)))
                await answer.wait()
            both = await asyncio.gather(client.describe_cache(10), client.describe_cache(10, "b"))
            seen = [[(p.tokens, p.num_tokens, p.hits, p.namespace, p.salted) for p in found] for found in both]
            first, *others = seen[0]
            assert first == (prompt[:32], 32, 1, "a", False)
            assert sorted(others) == [([], 32, 0, "a", True), (prompt[:32], 32, 0, "b", False)]
            assert seen[1] == [(prompt[:32], 32, 0, "b", False)]
            busy = ask(client, prompt, 2)  # its step hangs, and with it whoever asks
            await until(lambda: gate.entered == 9)
            question = asyncio.create_task(client.describe_cache(10))
            await asyncio.sleep(0)
            client._host.kill()
            with pytest.raises(EngineDead):
                await asyncio.wait_for(question, 20)
            assert busy.finish is Finish.ERROR
            with pytest.raises(EngineDead):
                await client.describe_cache(10)
            gate.open(10)

    asyncio.run(main())


def test_a_storm_of_requests_and_cancels_leaves_nothing_behind() -> None:
    random_ = random.Random(2)

    async def main() -> None:
        async with running(threaded_client(scripted(), num_blocks=24, max_num_batched_tokens=48)) as client:
            kept: list[tuple[list[int], Answer]] = []
            for _ in range(1000):
                prompt = [random_.randrange(VOCAB) for _ in range(random_.randrange(1, 40))]
                answer = Answer()
                id = client.submit(prompt, 8, Sampling(), answer)
                if random_.random() < 0.5:
                    asyncio.get_running_loop().call_later(random_.random() * 0.02, client.cancel, id)
                else:
                    kept.append((prompt, answer))
                if random_.random() < 0.1:
                    await asyncio.sleep(0.005)
            for prompt, answer in kept:
                assert (await answer.wait()).tokens == expected(prompt, 8)
            await until(lambda: client.stats.running + client.stats.waiting + client.stats.kv_blocks_used == 0)
            assert client._sinks == {}
            # An idle engine that still knew a request would notice that nothing wakes it, and end.
            await asyncio.sleep(0.8)
            assert not client.dead

    asyncio.run(main())


def test_cancel_spares_a_twin() -> None:
    async def main() -> None:
        async with running(threaded_client(scripted())) as client:
            answers = [Answer(), Answer()]
            ids = [client.submit([4, 4], 40, Sampling(), answer) for answer in answers]
            client.cancel(ids[0])
            await answers[1].wait()
            assert answers[1].tokens == expected([4, 4], 40)
            assert answers[0].finish is None

    asyncio.run(main())


def test_a_sink_may_cancel_from_inside() -> None:
    async def main() -> None:
        async with running(threaded_client(scripted())) as client:
            seen: list[Chunk] = []

            def stop_after_two(chunk: Chunk) -> None:
                seen.append(chunk)
                if len(seen) == 2:
                    client.cancel(id)

            id = client.submit([3], 100, Sampling(), stop_after_two)
            await (ask(client, [3], 30)).wait()
            assert len(seen) == 2
            await until(lambda: client.stats.running == 0)

    asyncio.run(main())


def test_a_sink_that_raises_loses_its_own_request_only() -> None:
    async def main() -> None:
        reports: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(str(context["exception"])))
        async with running(threaded_client(scripted())) as client:

            def broken(chunk: Chunk) -> None:
                raise RuntimeError("sink broke")

            client.submit([3], 100, Sampling(), broken)
            assert (await ask(client, [3], 20).wait()).tokens == expected([3], 20)
            await until(lambda: client.stats.running == 0)
        assert reports == ["sink broke"]

    asyncio.run(main())


def test_an_exception_in_the_engine_ends_every_request_with_its_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    def break_at_ten(inputs: StepInputs) -> None:
        if int(inputs.positions.max()) >= 10:
            raise ValueError("the tenth position is cursed")

    async def main() -> None:
        async with running(threaded_client(scripted(on_step=break_at_ten))) as client:
            answers = [ask(client, [i], 50) for i in range(5)]
            for answer in answers:
                await answer.wait()
                assert answer.finish is Finish.ERROR
                assert answer.error == "the engine stopped: ValueError: the tenth position is cursed"
            assert await asyncio.wait_for(client.wait_dead(), 20) == "ValueError: the tenth position is cursed"
            assert (client.dead, client.exit_code) == (True, 70)
            with pytest.raises(EngineDead, match="cursed"):
                client.submit([1], 1, Sampling(), Answer())

    asyncio.run(main())
    assert "break_at_ten" in capfd.readouterr().err  # the traceback, for the report


class Stranger:
    """An engine of another version: it starts as ours does, and then says what nobody can read."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def start(self, endpoint: str) -> None:
        threading.Thread(target=self._speak, args=(endpoint,)).start()

    def _speak(self, endpoint: str) -> None:
        connection = EngineEnd(endpoint)
        connection.send(Ready(EngineInfo(VOCAB, 64, 16, 4, 1, 16, 1, "scripted", 0, [])))
        while not any(isinstance(message, Submit) for message in connection.receive(0.5)):
            pass
        connection.send(Step([Chunk(1, ["not an id"])], Stats()))  # type: ignore[list-item]
        connection.close()

    def wait(self) -> int:
        return self._ended.get()

    def kill(self) -> None:
        self._ended.put(-signal.SIGKILL)


def test_an_engine_that_cannot_be_understood_is_ended_and_keeps_nobody_waiting() -> None:
    async def main() -> None:
        client = EngineClient(Stranger())
        await client.start()
        answer = await ask(client, [1], 5).wait()
        assert answer.finish is Finish.ERROR
        assert "cannot be read" in answer.error and "Expected `int`" in answer.error
        assert "cannot be read" in await asyncio.wait_for(client.wait_dead(), 20)
        await client.stop()

    asyncio.run(main())


def test_an_idle_engine_is_heard_of_and_a_hung_one_is_not() -> None:
    async def main() -> None:
        gate = Gate()
        async with running(threaded_client(scripted(on_step=gate))) as client:
            oldest = 0.0
            for _ in range(26):
                await asyncio.sleep(0.05)
                oldest = max(oldest, client.heartbeat_age())
            assert 0.3 < oldest < 1.5
            answer = ask(client, [1], 1)
            await asyncio.sleep(1.2)
            assert client.heartbeat_age() > 1.0
            gate.open()
            await answer.wait()
            assert client.heartbeat_age() < 0.5

    asyncio.run(main())


def test_stop_ends_what_runs_and_removes_the_socket() -> None:
    async def main() -> None:
        client = threaded_client(scripted(seconds_per_step=0.01))
        folder = socket_folder(client)
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        await client.start()
        assert not folder.exists()  # so nothing stays behind if this process is killed
        answer = ask(client, [1], 200)
        await until(lambda: answer.chunks)
        await client.stop()
        assert answer.finish is Finish.ERROR
        assert client.dead
        assert client.exit_code == 0
        with pytest.raises(EngineDead):
            client.submit([1], 1, Sampling(), Answer())

    asyncio.run(main())


def test_stop_does_not_wait_for_ever_for_a_hung_engine() -> None:
    async def main() -> None:
        gate = Gate()
        client = threaded_client(scripted(on_step=gate))
        await client.start()
        answer = ask(client, [1], 1)
        await until(lambda: gate.entered)
        await asyncio.wait_for(client.stop(patience=0.1), 20)
        assert "SIGKILL" in answer.error
        gate.open()

    asyncio.run(main())


@pytest.mark.parametrize("spawned", [False, True])
def test_stop_without_start(spawned: bool) -> None:
    async def main() -> None:
        client = threaded_client(scripted())
        folder = socket_folder(client)
        if spawned:
            client.spawn()
        await asyncio.wait_for(client.stop(), 20)
        assert not folder.exists()

    asyncio.run(main())


def test_a_failed_start_gives_its_sentence() -> None:
    def build() -> None:
        raise LoadError("the file x.gguf is not a GGUF file")

    async def main() -> None:
        client = EngineClient(EngineThread(build))  # type: ignore[arg-type]
        with pytest.raises(LoadError, match=re.escape("the file x.gguf is not a GGUF file")):
            await client.start()
        assert not socket_folder(client).exists()

    asyncio.run(main())


def test_messages_that_arrive_before_a_send_are_not_missed() -> None:
    """The socket's descriptor tells changes only, and a send consumes the change that an answer has caused."""

    async def main() -> None:
        async with running(threaded_client(scripted())) as client:
            for i in range(20):
                answer = ask(client, [i], 1)
                time.sleep(0.01)  # the event loop is busy while the answer arrives
                ask(client, [i], 1)
                await asyncio.wait_for(answer.done.wait(), 20)

    asyncio.run(main())


def test_a_temporary_folder_with_a_long_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    host: EngineHost = EngineThread(lambda: pytest.fail("never built"))
    with pytest.raises(LoadError, match="TMPDIR"):
        EngineClient(host)
    assert list(deep.iterdir()) == []


def socket_folder(client: EngineClient) -> Path:
    return Path(urlsplit(client._wire.endpoint).path).parent
