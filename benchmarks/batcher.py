"""What DynamicBatcher costs: a thousand concurrent callers, against a loop that hands the same function full batches.

    .venv/bin/python benchmarks/batcher.py

The function takes a modelled time for a batch and no processor, as one that waits for an accelerator or another machine
does. Callers ask several times each, so that their own start counts for little. "By hand" is the queue and loop that
people write around a model. Rounds go to all in turn; shares are of the rate at which the loop alone gets its answers.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from potok import DynamicBatcher

CALLERS = 1000
BATCH = 50


def blocking(seconds: float) -> Callable[[list[int]], list[int]]:
    def double(items: list[int]) -> list[int]:
        time.sleep(seconds)
        return [2 * item for item in items]

    return double


def awaitable(seconds: float) -> Callable[[list[int]], Awaitable[list[int]]]:
    async def double(items: list[int]) -> list[int]:
        await asyncio.sleep(seconds)
        return [2 * item for item in items]

    return double


class ByHand:
    """A queue, and a task that takes from it what a batch holds or max_wait_ms brings."""

    def __init__(self, fn: Callable[[list[int]], Any], max_batch_size: int, max_wait_ms: float) -> None:
        self._fn = fn
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_ms / 1e3
        self._queue: asyncio.Queue[tuple[int, asyncio.Future[int]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def predict(self, item: int) -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await self._queue.put((item, answer))
        return await answer

    async def aclose(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            deadline = loop.time() + self._max_wait_s
            while len(batch) < self._max_batch_size and (left := deadline - loop.time()) > 0:
                with suppress(TimeoutError):
                    batch.append(await asyncio.wait_for(self._queue.get(), left))
            items = [item for item, _ in batch]
            if inspect.iscoroutinefunction(self._fn):
                results = await self._fn(items)
            else:
                results = await loop.run_in_executor(None, self._fn, items)
            for (_, answer), result in zip(batch, results, strict=True):
                answer.set_result(result)


async def by_callers(make: Callable[..., Any], fn: Callable[[list[int]], Any], asks: int) -> float:
    """Seconds for all answers."""

    async def caller(i: int) -> None:
        for ask in range(asks):
            assert await batcher.predict(i + ask) == 2 * (i + ask)

    batcher = make(fn, max_batch_size=BATCH, max_wait_ms=20)
    started = time.perf_counter()
    await asyncio.gather(*(caller(i) for i in range(CALLERS)))
    seconds = time.perf_counter() - started
    await batcher.aclose()
    return seconds


async def directly(fn: Callable[[list[int]], Any], asks: int) -> float:
    """Seconds for as many full batches, one after the other."""
    started = time.perf_counter()
    for _ in range(CALLERS * asks // BATCH):
        given = fn([*range(BATCH)])
        if inspect.isawaitable(given):
            await given
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each")
    parser.add_argument("--asks", type=int, default=5, help="items that each caller asks for, one after the other")
    options = parser.parse_args()
    print(f"{CALLERS} callers, {options.asks} items each, batches of {BATCH}; medians of {options.rounds} rounds")
    print(f"{'a batch takes':>25}  {'direct':>9}  {'DynamicBatcher':>17}  {'by hand':>17}")
    for kind, make in (("on a thread", blocking), ("on the event loop", awaitable)):
        for milliseconds in (5, 20, 50):
            fn = make(milliseconds / 1e3)
            rounds = [
                (
                    asyncio.run(directly(fn, options.asks)),
                    asyncio.run(by_callers(DynamicBatcher, fn, options.asks)),
                    asyncio.run(by_callers(ByHand, fn, options.asks)),
                )
                for _ in range(options.rounds)
            ]
            direct, *others = (statistics.median(side) for side in zip(*rounds, strict=True))
            shares = "".join(f"  {seconds:7.3f} s {direct / seconds:7.1%}" for seconds in others)
            print(f"{f'{milliseconds} ms {kind}':>25}  {direct:7.3f} s{shares}")


if __name__ == "__main__":
    main()
