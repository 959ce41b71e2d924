"""The engine in a process of its own: how it starts, how it ends, and what its client sees of that."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_kit import ask, expected, running

from potok.engine.client import EngineClient
from potok.engine.host import EngineProcess
from potok.errors import LoadError
from potok.finish import Finish

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")


def process(kind: str = "plain") -> tuple[EngineClient, EngineProcess]:
    host = EngineProcess([sys.executable, str(HERE / "scripted_engine.py"), kind])
    return EngineClient(host), host


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_end_to_end() -> None:
    async def main() -> None:
        client, host = process()
        async with running(client):
            assert f"pid {host.pid}" in client.info.notes
            answers = {i: ask(client, [i, i + 1], 20) for i in range(30)}
            for i, answer in answers.items():
                assert (await answer.wait()).tokens == expected([i, i + 1], 20)
        assert client.exit_code == 0
        assert not alive(host.pid)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["plain", "hang"])
def test_a_killed_engine_ends_all_requests(kind: str) -> None:
    async def main() -> None:
        client, host = process(kind)
        async with running(client):
            answers = [ask(client, [1, 2], 4000) for _ in range(10)]
            await asyncio.sleep(0.2)
            os.kill(host.pid, signal.SIGKILL)
            for answer in answers:
                await answer.wait()
                assert answer.finish is Finish.ERROR
                assert answer.error.startswith("the engine stopped: ")
                assert "SIGKILL" in answer.error
            assert "SIGKILL" in await client.wait_dead()
            assert client.exit_code == -signal.SIGKILL

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_reach_the_whole_group_are_left_to_the_parent(number: signal.Signals) -> None:
    async def main() -> None:
        client, host = process()
        async with running(client):
            answer = ask(client, [1], 50)
            os.kill(host.pid, number)
            assert (await answer.wait()).tokens == expected([1], 50)
        assert client.exit_code == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "sentence", "exit_code"),
    [
        ("refuse", "^the model m.gguf is made of cheese$", 2),
        ("bug", "ZeroDivisionError: one over nothing", 70),
        ("vanish", "exit code 3", 3),
    ],
)
def test_a_start_that_fails_says_why(kind: str, sentence: str, exit_code: int) -> None:
    async def main() -> None:
        client, host = process(kind)
        with pytest.raises(LoadError, match=sentence):
            await client.start()
        assert client.exit_code == exit_code
        assert not alive(host.pid)

    asyncio.run(main())


def test_stop_during_a_slow_start() -> None:
    async def main() -> None:
        client, host = process("slow start")
        start = asyncio.create_task(client.start())
        await asyncio.sleep(0.1)
        await asyncio.wait_for(client.stop(), 30)
        with pytest.raises(LoadError):
            await start
        assert not alive(host.pid)

    asyncio.run(main())


def test_an_idle_engine_uses_no_cpu() -> None:
    async def main() -> None:
        client, host = process()
        async with running(client):
            await ask(client, [1], 5).wait()
            await asyncio.sleep(0.1)
            before = cpu_seconds(host.pid)
            await asyncio.sleep(1.5)
            assert cpu_seconds(host.pid) - before <= 0.02

    asyncio.run(main())


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("kind", ["idle", "busy", "hang", "slow start"])
def test_no_engine_outlives_its_parent(kind: str, where: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, str(HERE / "orphan_parent.py"), kind, where], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    try:
        engine = int(parent.stdout.readline())
        assert alive(engine)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 30
    while alive(engine) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(engine)
