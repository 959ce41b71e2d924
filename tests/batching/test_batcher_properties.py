"""Whatever arrives, fails, leaves or is too large: every caller gets the answer to its own item, in time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import VirtualLoop, at_ms, now_ms, run

from potok import ClientError, DynamicBatcher, ServerError, Unavailable


class Boom(Exception):
    pass


@dataclass(frozen=True)
class Item:
    """kind: good; bad: an exception in place of its result; boom: fails its batch; short: one result is missing."""

    number: int
    tokens: int
    kind: str


@dataclass(frozen=True)
class Caller:
    """leaves_after: ms after its arrival; None: it stays."""

    arrives: int
    tokens: int
    kind: str
    leaves_after: int | None


@dataclass(frozen=True)
class Scene:
    """takes: ms that the calls of the function take, in turn. closes: at this ms; None: when all callers have gone."""

    callers: list[Caller]
    size: int
    wait: int
    tokens: int
    spare: int | None
    when_full: Any
    concurrency: int
    takes: list[int]
    closes: int | None
    in_thread: bool

    @property
    def max_queue(self) -> int:
        return 0 if self.spare is None else self.size + self.spare


@dataclass
class Batch:
    start: float
    items: list[Item]
    end: float = -1


@dataclass
class Seen:
    """What happened. arrived: numbers in the order in which they asked. left: at this ms. answers: by number."""

    batches: list[Batch] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    came: dict[int, float] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    answers: list[Any] = field(default_factory=list)
    longest_queue: int = 0
    stats: Any = None
    timers: int = 0


callers = st.builds(
    Caller,
    arrives=st.integers(0, 60),
    tokens=st.integers(0, 9),
    kind=st.sampled_from(["good"] * 8 + ["bad", "boom", "short"]),
    leaves_after=st.none() | st.none() | st.integers(0, 40),
)
scenes = st.builds(
    Scene,
    callers=st.lists(callers, max_size=30),
    size=st.integers(1, 5),
    wait=st.integers(0, 20),
    tokens=st.sampled_from([0, 1, 5, 8, 20]),
    spare=st.none() | st.integers(0, 3),
    when_full=st.sampled_from(["wait", "raise"]),
    concurrency=st.integers(1, 3),
    takes=st.lists(st.integers(0, 25), min_size=1, max_size=4),
    closes=st.none() | st.integers(0, 80),
    in_thread=st.booleans(),
)


def answered(items: list[Item]) -> list[Any]:
    kinds = {item.kind for item in items}
    if "boom" in kinds:
        raise Boom
    results = [ValueError(item.number) if item.kind == "bad" else (item.number, "answer") for item in items]
    return results[1:] if "short" in kinds else results


def play(scene: Scene) -> Seen:
    seen = Seen()

    def on_thread(items: list[Item]) -> list[Any]:
        seen.batches.append(Batch(0, list(items)))
        return answered(items)

    async def on_loop(items: list[Item]) -> list[Any]:
        batch = Batch(now_ms(), list(items))
        seen.batches.append(batch)
        await asyncio.sleep(scene.takes[len(seen.batches) % len(scene.takes)] / 1e3)
        batch.end = now_ms()
        return answered(items)

    async def main() -> None:
        batcher: DynamicBatcher[Item, Any] = DynamicBatcher(
            on_thread if scene.in_thread else on_loop,
            scene.size,
            scene.wait,
            scene.tokens,
            cost=lambda item: item.tokens,
            max_queue=scene.max_queue,
            when_full=scene.when_full,
            max_concurrency=scene.concurrency,
        )

        async def ask(number: int, caller: Caller) -> Any:
            await at_ms(caller.arrives)
            seen.arrived.append(number)
            seen.came[number] = now_ms()
            seen.longest_queue = max(seen.longest_queue, batcher.stats.queue_length)
            return await batcher.predict(Item(number, caller.tokens, caller.kind))

        async def leave(number: int, caller: Caller, task: asyncio.Task[Any]) -> None:
            if caller.leaves_after is not None:
                await at_ms(caller.arrives + caller.leaves_after)
                if task.cancel():
                    seen.left[number] = now_ms()

        async def close() -> None:
            if scene.closes is not None:
                await at_ms(scene.closes)
                await batcher.aclose()

        asked = [asyncio.create_task(ask(*numbered)) for numbered in enumerate(scene.callers)]
        leaving = [leave(i, caller, task) for i, (caller, task) in enumerate(zip(scene.callers, asked, strict=True))]
        await asyncio.gather(close(), *leaving)
        seen.answers = await asyncio.gather(*asked, return_exceptions=True)
        await batcher.aclose()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        seen.stats, seen.timers = batcher.stats, loop.timers

    run(main)
    return seen


@settings(deadline=None, max_examples=300)
@given(scenes)
def test_every_caller_gets_its_own(scene: Scene) -> None:
    seen = play(scene)
    batch_of = {item.number: batch for batch in seen.batches for item in batch.items}
    for number, (caller, answer) in enumerate(zip(scene.callers, seen.answers, strict=True)):
        batch = batch_of.get(number)
        if isinstance(answer, asyncio.CancelledError):
            assert number in seen.left
        elif batch is None:
            too_large = scene.tokens and caller.tokens > scene.tokens
            closed = scene.closes is not None and seen.came[number] >= scene.closes
            if isinstance(answer, Unavailable):
                assert closed or (scene.max_queue and scene.when_full == "raise")
            else:
                assert too_large
                assert type(answer) is ClientError
        elif any(item.kind == "boom" for item in batch.items):
            assert type(answer) is Boom
        elif any(item.kind == "short" for item in batch.items):
            assert type(answer) is ServerError
        elif caller.kind == "bad":
            assert (type(answer), answer.args) == (ValueError, (number,))
        else:
            assert answer == (number, "answer")


@settings(deadline=None, max_examples=300)
@given(scenes)
def test_no_bound_is_exceeded_and_nobody_overtakes(scene: Scene) -> None:
    seen = play(scene)
    for batch in seen.batches:
        assert 0 < len(batch.items) <= scene.size
        assert not scene.tokens or sum(item.tokens for item in batch.items) <= scene.tokens
    assert not scene.max_queue or seen.longest_queue <= scene.max_queue
    computed = [item.number for batch in seen.batches for item in batch.items]
    if not scene.in_thread:
        assert computed == [number for number in seen.arrived if number in computed]
        for batch in seen.batches:
            assert sum(other.start <= batch.start < other.end for other in seen.batches) <= scene.concurrency
    assert len(computed) == len({*computed})
    counts = (seen.stats.batches, seen.stats.items, seen.stats.running, seen.stats.queue_length, seen.stats.outside)
    assert counts == (len(seen.batches), len(computed), 0, 0, 0)
    assert seen.timers == 0


@settings(deadline=None, max_examples=300)
@given(scenes.filter(lambda scene: not scene.in_thread and (scene.spare is None or scene.when_full == "raise")))
def test_a_batch_starts_in_time_and_not_before(scene: Scene) -> None:
    """Not with a bounded queue whose callers wait outside: there the wait begins later."""
    seen = play(scene)
    items = {item.number: item for batch in seen.batches for item in batch.items}
    computed_before: set[int] = set()
    for batch in seen.batches:
        numbers = [item.number for item in batch.items]
        tokens = sum(item.tokens for item in batch.items)
        due = seen.came[numbers[0]] + scene.wait
        if scene.closes is not None:
            due = min(due, max(scene.closes, seen.came[numbers[0]]))
        computed_before.update(numbers)
        # Not before: it is full, or the next one in the queue does not fit, or the oldest has waited.
        next_ones = [items[n].tokens for n in seen.arrived if n in items and n not in computed_before]
        next_ones += [scene.callers[n].tokens for n in seen.left if n not in items]
        full = len(numbers) == scene.size or (
            scene.tokens > 0 and (tokens == scene.tokens or any(tokens + more > scene.tokens for more in next_ones))
        )
        assert full or batch.start >= due - 1e-6
        # In time: after it was due, calls of the function took all the room there is.
        for when in [due, *(other.end for other in seen.batches if due < other.end < batch.start)]:
            running = sum(other.start <= when < other.end for other in seen.batches)
            assert batch.start <= when + 1e-6 or running == scene.concurrency
        for number in numbers:
            assert seen.left.get(number, batch.start) >= batch.start
