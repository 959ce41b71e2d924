"""A parent that starts a scripted engine, keeps it busy, prints the engine's process id and waits to be killed.

orphan_parent.py KIND WHERE: the engine is spawned on the main thread, or on a thread that ends at once ("thread").
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

from engine_kit import ask

from potok.engine.client import EngineClient
from potok.engine.host import EngineProcess


async def main(kind: str, where: str) -> None:
    host = EngineProcess([sys.executable, str(Path(__file__).with_name("scripted_engine.py")), kind])
    client = EngineClient(host)
    if where == "thread":
        thread = threading.Thread(target=client.spawn)
        thread.start()
        thread.join()
    else:
        client.spawn()
    if kind != "slow start":
        await client.start()
        for _ in range(0 if kind == "idle" else 4):
            ask(client, [1, 2, 3], 4000)
        await asyncio.sleep(0.3)
        assert not client.dead
    print(host.pid, flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
