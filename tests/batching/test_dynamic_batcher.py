"""DynamicBatcher: when a batch starts, who is in it, and what each caller gets. Times are those of a virtual clock."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
import uvloop
from virtual_time import VirtualLoop, at_ms, now_ms, run, turns

from potok import ClientError, DynamicBatcher, ServerError, Unavailable


class Log:
    """A function that takes its time, knows when it was called with what, and doubles numbers.

    takes_ms: of the virtual clock. Items below zero fail the batch.
    """

    def __init__(self, takes_ms: float = 10) -> None:
        self.takes_ms = takes_ms
        self.calls: list[tuple[float, list[int]]] = []

    async def __call__(self, items: list[int]) -> list[int]:
        self.calls.append((now_ms(), list(items)))
        await asyncio.sleep(self.takes_ms / 1e3)
        if min(items) < 0:
            raise ValueError(f"{min(items)} is below zero")
        return [2 * item for item in items]


async def ask_at(batcher: DynamicBatcher[int, int], when: float, item: int) -> int:
    await at_ms(when)
    return await batcher.predict(item)


def asks(batcher: DynamicBatcher[int, int], items: list[int], when: float = 0) -> list[asyncio.Task[int]]:
    """One caller an item, in this order: timers of the same time have none, so they come a microsecond apart."""
    return [asyncio.create_task(ask_at(batcher, when and when + i / 1e3, item)) for i, item in enumerate(items)]


async def settled(tasks: list[asyncio.Task[int]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def doubled(items: list[int]) -> list[int]:
    return [2 * item for item in items]


async def doubled_later(items: list[int]) -> list[int]:
    await asyncio.sleep(0)
    return doubled(items)


BOTH = pytest.mark.parametrize("fn", [doubled, doubled_later], ids=["thread", "loop"])


# -- When a batch starts ------------------------------------------------------------------------------------------


def test_a_lone_item_waits_for_max_wait_ms_and_no_longer() -> None:
    log = Log()

    async def main() -> tuple[int, float]:
        async with DynamicBatcher(log, max_wait_ms=20) as batcher:
            return await ask_at(batcher, 5, 21), now_ms()

    assert run(main) == (42, 35)
    assert log.calls == [(25, [21])]


def test_a_full_batch_starts_at_once() -> None:
    log = Log()

    async def main() -> None:
        async with DynamicBatcher(log, max_batch_size=3, max_wait_ms=1000) as batcher:
            assert await asyncio.gather(*(ask_at(batcher, t, t) for t in (1, 4, 6))) == [2, 8, 12]

    run(main)
    assert log.calls == [(6, [1, 4, 6])]


@pytest.mark.parametrize(
    ("items", "batches"),
    [
        ([4, 6], [[4, 6]]),  # exactly as much as a batch takes
        ([4, 5, 2], [[4, 5], [2]]),  # the third does not fit: the first two need not wait for anything
        ([10], [[10]]),
        ([1, 10], [[1], [10]]),
    ],
)
def test_a_batch_that_is_full_by_tokens_starts_at_once(items: list[int], batches: list[list[int]]) -> None:
    log = Log(takes_ms=0)

    async def main() -> list[int]:
        async with DynamicBatcher(log, 32, 1000, 10, cost=abs) as batcher:
            return await asyncio.gather(*(batcher.predict(item) for item in items))

    assert run(main) == doubled(items)
    assert [batch for _, batch in log.calls] == batches
    assert log.calls[0][0] == 0


def test_without_a_wait_only_callers_of_the_same_turn_share_a_batch() -> None:
    log = Log(takes_ms=1)

    async def main() -> None:
        async with DynamicBatcher(log, max_wait_ms=0) as batcher:
            await settled([*asks(batcher, [1, 2, 3]), *asks(batcher, [4], when=5)])

    run(main)
    assert log.calls == [(0, [1, 2, 3]), (5, [4])]


def test_while_a_batch_runs_the_next_one_is_gathered_and_starts_with_its_end() -> None:
    log = Log(takes_ms=100)

    async def main() -> None:
        async with DynamicBatcher(log, max_batch_size=3, max_wait_ms=20) as batcher:
            await settled(
                [
                    *asks(batcher, [1, 2, 3]),  # full: 0
                    *asks(batcher, [4, 5], when=50),  # over at 70, while the first runs: 100
                    *asks(batcher, [6], when=195),  # 200 finds it neither full nor waited for: 215
                    *asks(batcher, [7, 8, 9, 10], when=300),  # joins nobody: 315 is its start, full
                ]
            )

    run(main)
    assert log.calls == [(0, [1, 2, 3]), (100, [4, 5]), (215, [6]), (315, [7, 8, 9]), (415, [10])]


def test_one_call_at_a_time_unless_max_concurrency_says_otherwise() -> None:
    log = Log(takes_ms=10)

    async def main(max_concurrency: int) -> float:
        async with DynamicBatcher(log, max_batch_size=2, max_concurrency=max_concurrency) as batcher:
            await settled(asks(batcher, [1, 2, 3, 4, 5, 6, 7, 8]))
            return now_ms()

    assert [run(lambda n=n: main(n)) for n in (1, 2, 3, 4)] == [40, 20, 20, 10]  # type: ignore[misc]


def test_threads_run_as_many_calls_as_max_concurrency_says() -> None:
    together = threading.Barrier(3)

    def meet(items: list[int]) -> list[int]:
        together.wait(20)
        return doubled(items)

    async def main() -> list[int]:
        async with DynamicBatcher(meet, max_batch_size=1, max_concurrency=3) as batcher:
            return await asyncio.gather(*(batcher.predict(i) for i in range(6)))

    assert asyncio.run(main()) == doubled([*range(6)])


@BOTH
@pytest.mark.parametrize("loop", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_thousand_callers_make_twenty_full_batches(fn: Callable[..., Any], loop: Any) -> None:
    async def main() -> None:
        async with DynamicBatcher(fn, max_batch_size=50, max_wait_ms=1000) as batcher:
            assert await asyncio.gather(*(batcher.predict(i) for i in range(1000))) == doubled([*range(1000)])
            assert (batcher.stats.batches, batcher.stats.items, batcher.stats.mean_batch_size) == (20, 1000, 50)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


# -- Where the function runs ---------------------------------------------------------------------------------------


def test_a_function_that_blocks_does_not_block_the_event_loop() -> None:
    ticked = threading.Event()

    def block(items: list[int]) -> list[bool]:
        return [ticked.wait(20) for _ in items]

    async def tick() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)
        ticked.set()

    async def main() -> bool:
        async with DynamicBatcher(block, max_batch_size=1) as batcher:
            answer = asyncio.create_task(batcher.predict(0))
            while not batcher.stats.running:
                await asyncio.sleep(0)
            await tick()
            return await answer

    assert asyncio.run(main())


def ident(items: list[int]) -> list[int]:
    return [threading.get_ident() for _ in items]


async def ident_later(items: list[int]) -> list[int]:
    return ident(items)


def ident_to_be_awaited(items: list[int]) -> Awaitable[list[int]]:
    return ident_later(items)


def ident_lazily(items: list[int]) -> Iterator[int]:
    yield from ident(items)


class IdentLater:
    async def __call__(self, items: list[int]) -> list[int]:
        return ident(items)


@pytest.mark.parametrize(
    ("fn", "options", "on_loop"),
    [
        (ident, {}, False),
        (ident, {"in_thread": True}, False),
        (ident, {"in_thread": False}, True),
        (ident_later, {}, True),
        (ident_later, {"in_thread": False}, True),
        (IdentLater(), {}, True),
        (partial(IdentLater()), {}, True),
        (ident_to_be_awaited, {}, True),  # called on a thread, awaited on the event loop
        (ident_to_be_awaited, {"in_thread": False}, True),
        (ident_lazily, {}, False),
        (ident_lazily, {"in_thread": False}, True),
    ],
)
def test_where_a_function_runs(fn: Callable[..., Any], options: dict[str, Any], on_loop: bool) -> None:
    async def main() -> int:
        async with DynamicBatcher(fn, **options) as batcher:
            return await batcher.predict(0)

    assert (run(main) == threading.get_ident()) is on_loop


@pytest.mark.parametrize(
    ("size", "wait_ms", "closes"),
    [(1, 1000, False), (2, 0, False), (2, 1000, True)],
    ids=["full", "waited for", "closing"],
)
def test_a_thread_needs_no_event_loop_to_go_on(size: int, wait_ms: float, closes: bool) -> None:
    """The next batch starts with the end of the one before, also when the event loop is busy at that moment."""
    gate = threading.Event()
    second = threading.Event()

    def work(items: list[int]) -> list[int]:
        if 1 in items:
            assert gate.wait(20)
        else:
            second.set()
        return items

    async def main() -> None:
        batcher = DynamicBatcher(work, max_batch_size=size, max_wait_ms=wait_ms)
        tasks = asks(batcher, [1] * size)
        while not batcher.stats.running:
            await asyncio.sleep(0)
        tasks += asks(batcher, [2])
        await turns()
        closing = asyncio.create_task(batcher.aclose()) if closes else None
        await turns()
        gate.set()
        assert second.wait(20)  # here, where the event loop runs
        assert await settled(tasks) == [1] * size + [2]
        await (closing or batcher.aclose())

    asyncio.run(main())


def test_one_thread_runs_all_batches_and_ends_with_the_batcher() -> None:
    threads: set[threading.Thread] = set()

    def remember(items: list[int]) -> list[int]:
        threads.add(threading.current_thread())
        return items

    batcher = DynamicBatcher(remember, max_batch_size=1)

    async def main() -> None:
        async with batcher:
            await asyncio.gather(*(batcher.predict(i) for i in range(50)))
        await batcher.aclose()

    run(main)
    [thread] = threads
    thread.join(20)
    assert not thread.is_alive()


@BOTH
def test_the_function_sees_no_callers_context(fn: Callable[..., Any]) -> None:
    who = contextvars.ContextVar("who", default="nobody")

    def sync(items: list[int]) -> list[str]:
        return [who.get() for _ in items]

    async def later(items: list[int]) -> list[str]:
        return sync(items)

    async def main() -> None:
        who.set("the maker")
        batcher = DynamicBatcher(sync if fn is doubled else later, max_batch_size=2, max_wait_ms=1)

        async def caller(name: str) -> str:
            who.set(name)
            return await batcher.predict(0)

        # Batches that start by being full, by the timer, and with the end of another one.
        assert {*await asyncio.gather(*(caller(f"caller {i}") for i in range(7)))} == {"the maker"}
        await batcher.aclose()

    run(main)


# -- Callers that leave --------------------------------------------------------------------------------------------


def test_a_caller_that_is_cancelled_in_the_queue_is_not_computed() -> None:
    log = Log()

    async def main() -> list[Any]:
        async with DynamicBatcher(log, max_wait_ms=20) as batcher:
            tasks = asks(batcher, [1, 2, 3])
            await at_ms(5)
            tasks[1].cancel()
            await turns()
            assert batcher.stats.queue_length == 2
            return await settled(tasks)

    one, two, three = run(main)
    assert (one, type(two), three) == (2, asyncio.CancelledError, 6)
    assert log.calls == [(20, [1, 3])]


def test_a_batch_with_a_leaver_of_the_same_turn_is_not_full() -> None:
    log = Log()

    async def main() -> list[Any]:
        async with DynamicBatcher(log, max_batch_size=2, max_wait_ms=20) as batcher:
            first, third = [*asks(batcher, [1]), *asks(batcher, [3], when=7)]
            await turns()
            first.cancel()
            return [await batcher.predict(2), await third]  # 2 comes before 1 has had its turn to leave

    assert run(main) == [4, 6]
    assert log.calls == [(7, [2, 3])]


def test_who_leaves_lets_the_clock_run_for_the_next() -> None:
    log = Log()

    async def main() -> None:
        async with DynamicBatcher(log, max_wait_ms=20) as batcher:
            tasks = [*asks(batcher, [1]), *asks(batcher, [2], when=9)]
            await at_ms(15)
            tasks[0].cancel()
            await settled(tasks)

    run(main)
    assert log.calls == [(29, [2])]


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_caller_that_is_cancelled_while_its_batch_runs_does_not_disturb_the_others(leaver: int) -> None:
    log = Log()

    async def main() -> list[Any]:
        async with DynamicBatcher(log, max_batch_size=3) as batcher:
            tasks = asks(batcher, [1, 2, 3])
            await at_ms(5)
            tasks[leaver].cancel()
            return await settled(tasks)

    answers = run(main)
    assert type(answers.pop(leaver)) is asyncio.CancelledError
    assert answers == [2 * item for item in (1, 2, 3) if item != leaver + 1]


def test_a_batch_without_callers_runs_to_its_end_and_the_next_one_follows() -> None:
    log = Log()

    async def main() -> None:
        async with DynamicBatcher(log, max_batch_size=2) as batcher:
            tasks = asks(batcher, [-1, 2])  # it fails, and nobody is there to be told
            await at_ms(5)
            for task in tasks:
                task.cancel()
            assert await settled(asks(batcher, [3, 4], when=6)) == [6, 8]
            assert batcher.stats.failed_batches == 1

    run(main)
    assert log.calls == [(0, [-1, 2]), (10, [3, 4])]


def test_a_timeout_of_a_caller_is_its_own() -> None:
    log = Log(takes_ms=50)

    async def hasty(batcher: DynamicBatcher[int, int]) -> int:
        async with asyncio.timeout(0.03):
            return await batcher.predict(1)

    async def main() -> list[Any]:
        async with DynamicBatcher(log, max_batch_size=2) as batcher:
            return await asyncio.gather(hasty(batcher), batcher.predict(2), return_exceptions=True)

    hasty_one, patient_one = run(main)
    assert (type(hasty_one), patient_one) == (TimeoutError, 4)


# -- Bounds ---------------------------------------------------------------------------------------------------------


def test_an_item_too_large_for_any_batch_is_refused_at_once_and_delays_nobody() -> None:
    log = Log()

    async def main() -> list[Any]:
        async with DynamicBatcher(log, 4, 1000, max_tokens_per_batch=10, cost=abs) as batcher:
            first = asks(batcher, [4])
            await at_ms(1)
            with pytest.raises(ClientError, match=r"has 11 tokens, and a batch takes 10; .* max_tokens_per_batch") as e:
                await batcher.predict(11)
            assert (now_ms(), e.value.param, batcher.stats.queue_length) == (1, "item", 1)
            return await settled([*first, *asks(batcher, [6])])

    assert run(main) == [8, 12]
    assert log.calls == [(1, [4, 6])]


def test_an_item_costs_its_length_where_nothing_else_is_said() -> None:
    async def main() -> None:
        seen: list[list[list[int]]] = []

        async def lengths(items: list[list[int]]) -> list[int]:
            seen.append(items)
            return [len(item) for item in items]

        async with DynamicBatcher(lengths, max_tokens_per_batch=4) as batcher:
            assert await asyncio.gather(*(batcher.predict([7] * n) for n in (3, 1, 2))) == [3, 1, 2]
            with pytest.raises(ClientError, match="has 5 tokens"):
                await batcher.predict([7] * 5)
        assert [len(items) for items in seen] == [2, 1]

    run(main)


@pytest.mark.parametrize("given", [-1, 1.5, "7", None])
def test_a_cost_that_is_none_fails_its_caller_only(given: Any) -> None:
    async def main() -> None:
        async with DynamicBatcher(doubled_later, 8, 20, 10, cost=lambda item: given if item else 1) as batcher:
            good = asyncio.create_task(batcher.predict(0))
            with pytest.raises(ServerError, match="cost must return a whole number of tokens"):
                await batcher.predict(1)
            assert await good == 0

    run(main)


def test_an_item_without_length_asks_for_a_cost() -> None:
    async def main() -> None:
        async with DynamicBatcher(doubled, max_tokens_per_batch=10) as batcher:
            with pytest.raises(ServerError, match="int has no length; give cost"):
                await batcher.predict(1)

    run(main)


def test_a_full_queue_makes_callers_wait_in_their_order() -> None:
    log = Log(takes_ms=5)

    async def main() -> list[Any]:
        async with DynamicBatcher(log, max_batch_size=2, max_wait_ms=20, max_queue=3) as batcher:
            tasks = asks(batcher, [1, 2, 3, 4, 5, 6, 7, 8, 9])
            await at_ms(1)
            assert (batcher.stats.running, batcher.stats.queue_length, batcher.stats.outside) == (1, 3, 4)
            tasks[2].cancel()  # in the queue: 6 gets its room
            tasks[7].cancel()  # outside
            await turns()
            assert (batcher.stats.queue_length, batcher.stats.outside) == (3, 2)
            return await settled(tasks)

    answers = run(main)
    assert [i + 1 for i, answer in enumerate(answers) if isinstance(answer, asyncio.CancelledError)] == [3, 8]
    # The wait of 9 began at 5, when it came in.
    assert log.calls == [(0, [1, 2]), (5, [4, 5]), (10, [6, 7]), (25, [9])]


def test_a_full_queue_can_refuse() -> None:
    log = Log()

    async def main() -> list[Any]:
        async with DynamicBatcher(log, max_batch_size=2, max_queue=2, when_full="raise") as batcher:
            answers = await settled(asks(batcher, [1, 2, 3, 4, 5, 6]))
            assert await asyncio.gather(batcher.predict(7), batcher.predict(8)) == [14, 16]  # there is room again
            return answers

    *served, five, six = run(main)
    assert served == [2, 4, 6, 8]
    for refused in (five, six):
        assert isinstance(refused, Unavailable)
        assert (str(refused), refused.code) == ("2 items wait already; try again in a moment.", "overloaded")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fn": None}, "fn must be a function, not None."),
        ({"cost": 7}, "cost must be a function, not 7."),
        ({"max_batch_size": 0}, "max_batch_size must be a whole number, 1 or more, not 0."),
        ({"max_batch_size": 2.0}, "max_batch_size must be a whole number, 1 or more, not 2.0."),
        ({"max_batch_size": True}, "max_batch_size must be a whole number, 1 or more, not True."),
        ({"max_wait_ms": -1}, "max_wait_ms must be milliseconds, 0 or more, not -1."),
        ({"max_wait_ms": float("nan")}, "max_wait_ms must be milliseconds, 0 or more, not nan."),
        ({"max_wait_ms": float("inf")}, "max_wait_ms must be milliseconds, 0 or more, not inf."),
        ({"max_wait_ms": "5"}, "max_wait_ms must be milliseconds, 0 or more, not '5'."),
        ({"max_tokens_per_batch": -5}, "max_tokens_per_batch must be 0 or a whole number, not -5."),
        ({"max_concurrency": 0}, "max_concurrency must be a whole number, 1 or more, not 0."),
        ({"max_queue": 31}, "max_queue must be 0 or a whole number, 32 (max_batch_size) or more, not 31."),
        ({"when_full": "drop"}, "when_full must be 'wait' or 'raise', not 'drop'."),
        ({"fn": doubled_later, "in_thread": True}, "in_thread must be left out for a coroutine function, not True."),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ClientError) as e:
        DynamicBatcher(**({"fn": doubled} | wrong))
    assert (str(e.value), e.value.param) == (message, [*wrong][-1])


# -- The end -------------------------------------------------------------------------------------------------------


def test_closing_computes_what_waits_at_once_and_refuses_the_rest() -> None:
    log = Log()

    async def main() -> list[Any]:
        batcher = DynamicBatcher(log, max_batch_size=3, max_wait_ms=1000, max_queue=3)
        tasks = asks(batcher, [1, 2, 3, 4, 5, 6, 7])
        await at_ms(2)
        assert batcher.stats.outside == 1
        closers = [asyncio.create_task(batcher.aclose()) for _ in range(2)]
        await turns()
        with pytest.raises(Unavailable, match="closed") as e:
            await batcher.predict(8)
        assert e.value.code == "shutting_down"
        await asyncio.gather(*closers)
        assert all(task.done() for task in tasks)
        return await settled(tasks)

    assert run(main) == [2, 4, 6, 8, 10, 12, 14]
    assert log.calls == [(0, [1, 2, 3]), (10, [4, 5, 6]), (20, [7])]


def test_closing_waits_for_a_thread() -> None:
    gate = threading.Event()

    def wait(items: list[int]) -> list[int]:
        assert gate.wait(20)
        return doubled(items)

    async def main() -> None:
        batcher = DynamicBatcher(wait, max_batch_size=2, max_wait_ms=1000)
        tasks = asks(batcher, [1, 2, 3])
        await turns()
        closing = asyncio.create_task(batcher.aclose())
        await turns()
        assert not closing.done()
        gate.set()
        await closing
        assert [task.result() for task in tasks] == [2, 4, 6]

    run(main)


def test_a_closing_that_is_cancelled_leaves_nothing_undone() -> None:
    log = Log()

    async def main() -> list[Any]:
        batcher = DynamicBatcher(log, max_batch_size=2)
        tasks = asks(batcher, [1, 2, 3])
        await turns()
        closing = asyncio.create_task(batcher.aclose())
        await turns()
        closing.cancel()
        answers = await settled(tasks)
        with pytest.raises(Unavailable):
            await batcher.predict(4)
        await batcher.aclose()
        return answers

    assert run(main) == [2, 4, 6]
    assert log.calls == [(0, [1, 2]), (10, [3])]


def test_closing_waits_for_what_came_while_a_batch_ran() -> None:
    log = Log(takes_ms=10)

    async def main() -> None:
        batcher = DynamicBatcher(log, max_batch_size=2, max_wait_ms=20)
        tasks = [*asks(batcher, [1, 2]), *asks(batcher, [3], when=5)]
        await at_ms(15)
        await batcher.aclose()
        assert [task.result() for task in tasks] == [2, 4, 6]

    run(main)
    assert log.calls == [(0, [1, 2]), (15, [3])]


def test_closing_does_not_wait_for_those_who_leave() -> None:
    async def main() -> None:
        batcher = DynamicBatcher(Log(takes_ms=50), max_batch_size=1)
        tasks = asks(batcher, [1, 2])
        await turns()
        closing = asyncio.create_task(batcher.aclose())
        await turns()
        for task in tasks:
            task.cancel()
        await closing
        assert now_ms() == 50

    run(main)


@BOTH
def test_no_timer_is_left(fn: Callable[..., Any]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        batcher = DynamicBatcher(fn, max_batch_size=2, max_wait_ms=20)
        lone = asyncio.create_task(batcher.predict(1))
        await turns()
        assert loop.timers == 1
        await asyncio.gather(lone, batcher.predict(2))
        assert loop.timers == 0  # the batch was full
        lone = asyncio.create_task(batcher.predict(1))
        await turns()
        lone.cancel()
        await turns()
        assert loop.timers == 0  # nobody waits
        lone = asyncio.create_task(batcher.predict(1))
        await turns()
        await batcher.aclose()
        assert (loop.timers, await lone) == (0, 2)

    run(main)


def test_no_timer_runs_beside_a_batch() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        gate = asyncio.Event()

        async def wait(items: list[int]) -> list[int]:
            await gate.wait()
            return items

        async with DynamicBatcher(wait, max_batch_size=2, max_wait_ms=20) as batcher:
            tasks = asks(batcher, [1])
            await turns()
            tasks += asks(batcher, [2, 3])
            await turns()
            assert (batcher.stats.running, batcher.stats.queue_length, loop.timers) == (1, 1, 0)
            gate.set()
            await settled(tasks)

    run(main)


def test_a_timer_that_is_early_by_the_resolution_of_the_clock_will_do() -> None:
    """Setting it again would keep the event loop busy until the clock moves on."""
    log = Log(takes_ms=0)

    async def main() -> None:
        asyncio.get_running_loop()._clock_resolution = 0.001  # type: ignore[attr-defined]
        async with DynamicBatcher(log, max_wait_ms=20.5) as batcher:
            await settled([*asks(batcher, [1]), asyncio.create_task(asyncio.sleep(0.02, 0))])

    run(main)
    assert log.calls == [(20, [1])]


def test_waiting_costs_no_turns_of_the_event_loop() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns_taken = 0
        run_once = loop._run_once  # type: ignore[attr-defined]

        def counted() -> None:
            nonlocal turns_taken
            turns_taken += 1
            run_once()

        loop._run_once = counted  # type: ignore[attr-defined]
        async with DynamicBatcher(Log(takes_ms=10_000), max_wait_ms=10_000, max_batch_size=3) as batcher:
            await settled([*asks(batcher, [1, 2, 3]), *asks(batcher, [4], when=1000)])
        assert now_ms() == 21_000
        assert turns_taken < 40

    run(main)


# -- Event loops ---------------------------------------------------------------------------------------------------


@BOTH
def test_event_loops_one_after_the_other(fn: Callable[..., Any]) -> None:
    batcher = DynamicBatcher(fn, max_wait_ms=1)

    async def main() -> int:
        abandoned = asyncio.create_task(batcher.predict(1))  # asyncio.run cancels it
        await turns()
        assert not abandoned.done()
        return await batcher.predict(2)

    assert [asyncio.run(main()) for _ in range(3)] == [4, 4, 4]


def test_an_event_loop_that_ends_before_its_batch_disturbs_no_later_one() -> None:
    gate = threading.Event()

    def wait(items: list[int]) -> list[int]:
        assert gate.wait(20)
        return doubled(items)

    batcher = DynamicBatcher(wait, max_batch_size=1)

    async def leave() -> None:
        for task in asks(batcher, [1, 2]):
            await turns()
            task.cancel()

    async def stay() -> int:
        asyncio.get_running_loop().call_soon(gate.set)
        return await batcher.predict(3)

    run(leave)
    assert run(stay) == 6
    assert batcher.stats.running == 0


def test_two_event_loops_at_once_are_refused() -> None:
    batcher = DynamicBatcher(doubled_later, max_wait_ms=1)

    async def elsewhere() -> None:
        for call in (batcher.predict(1), batcher.aclose()):
            with pytest.raises(RuntimeError, match="in use on another event loop"):
                await call

    async def main() -> None:
        await batcher.predict(0)
        await asyncio.to_thread(asyncio.run, elsewhere())
        assert await batcher.predict(1) == 2  # and nothing has come of it

    asyncio.run(main())
