"""What callers are told when the function fails, answers nonsense or ends the program; and what is kept alive."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import uvloop
from virtual_time import VirtualLoop, run, turns

from potok import ClientError, DynamicBatcher, ServerError

Fn = Callable[[list[Any]], list[Any]]


def kinds(fn: Fn) -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """The same function on a thread, on the event loop, and as a coroutine function."""

    async def later(items: list[Any]) -> list[Any]:
        await asyncio.sleep(0)
        return fn(items)

    return [(fn, {}), (fn, {"in_thread": False}), (later, {})]


KINDS = pytest.mark.parametrize("kind", [0, 1, 2], ids=["thread", "plain on loop", "coroutine"])


def outcomes(fn: Fn, kind: int, items: list[Any], **options: Any) -> list[Any]:
    """What a caller of each item got, exceptions included."""
    function, where = kinds(fn)[kind]

    async def main() -> list[Any]:
        async with DynamicBatcher(function, **where, **options) as batcher:
            return await asyncio.gather(*(batcher.predict(item) for item in items), return_exceptions=True)

    return run(main)


def raising(error: BaseException) -> Fn:
    def fail(items: list[Any]) -> list[Any]:
        raise error

    return fail


# -- Failing batches -----------------------------------------------------------------------------------------------


@KINDS
def test_one_failing_batch_among_many_fails_its_own_callers_only(kind: int) -> None:
    def invert(items: list[int]) -> list[float]:
        return [1 / item for item in items]

    answers = outcomes(invert, kind, [i - 57 for i in range(200)], max_batch_size=10)
    failed = answers[50:60]
    assert {type(error) for error in failed} == {ZeroDivisionError}
    assert len({id(error) for error in failed}) == 10
    [original] = {error.__cause__ for error in failed}
    assert type(original) is ZeroDivisionError
    assert traceback.extract_tb(original.__traceback__)[-1].line == "return [1 / item for item in items]"
    assert answers[:50] + answers[60:] == [1 / (i - 57) for i in range(200) if not 50 <= i < 60]


class Built(Exception):
    def __init__(self, code: int, *, detail: str = "") -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail


class Described(Built):
    def __str__(self) -> str:
        return f"number {self.code}"


class Picky(Exception):
    def __new__(cls, *args: Any, magic: int) -> Picky:
        return super().__new__(cls, *args)

    def __init__(self, *args: Any, magic: int) -> None:
        super().__init__(*args)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@dataclass(frozen=True)
class Frozen(Exception):
    code: int

    def __str__(self) -> str:
        return str(self.code)


class Same(Exception):
    def __copy__(self) -> Same:
        return self

    def __new__(cls, text: str) -> Same:
        return super().__new__(cls, text + "!")


def undecodable() -> UnicodeError:
    try:
        b"\xff".decode()
    except UnicodeError as error:
        return error
    raise AssertionError


def noted() -> Exception:
    error = ValueError("with a note")
    error.add_note("seen at noon")
    return error


@KINDS
@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError(("a", 1)),
        Built(7, detail="x"),
        Described(8),
        ClientError("too hot", "temperature", "out_of_range"),
        FileNotFoundError(2, "No such file", "model.gguf"),
        json.JSONDecodeError("Expecting value", "{", 1),
        undecodable(),
        ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
        noted(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_each_caller_gets_the_exception_as_an_object_of_its_own(kind: int, error: Exception) -> None:
    first, second = outcomes(raising(error), kind, [1, 2])
    for own in (first, second):
        assert type(own) is type(error)
        assert (str(own), own.args, repr(own)) == (str(error), error.args, repr(error))
        assert vars(own) == vars(error)
        assert own.__cause__ is error
    assert first is not second
    first.add_note("mine")
    assert "mine" not in getattr(second, "__notes__", []) + getattr(error, "__notes__", [])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Picky("why", magic=3), "Picky: why"),
        (Mute(), "Mute: (no text)"),
        (Frozen(7), "Frozen: 7"),
        (Same("x"), "Same: x"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_an_exception_that_cannot_be_copied_is_told_of(error: Exception, told: str) -> None:
    for own in outcomes(raising(error), 0, [1, 2]):
        assert type(own) is ServerError
        assert str(own) == f"raising.<locals>.fail ended its batch with {told}"
        assert own.__cause__ is error


def test_callers_do_not_see_each_others_tracebacks() -> None:
    async def caller(batcher: DynamicBatcher[int, int]) -> list[str]:
        try:
            await batcher.predict(1)
        except ValueError as error:
            await asyncio.sleep(0)  # meanwhile the others raise theirs
            return [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        raise AssertionError

    async def main() -> list[list[str]]:
        async with DynamicBatcher(raising(ValueError()), max_batch_size=5) as batcher:
            return await asyncio.gather(*(caller(batcher) for _ in range(5)))

    assert run(main) == [["caller", "predict"]] * 5


@KINDS
def test_an_exception_among_the_results_is_for_its_item_alone(kind: int) -> None:
    def half(items: list[int]) -> list[Any]:
        return [ValueError(item) if item % 2 else item // 2 for item in items]

    two, three, four = outcomes(half, kind, [2, 3, 4])
    assert (two, type(three), three.args, four) == (1, ValueError, (3,), 2)


# -- Answers that are none -----------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1], "returned 1 results for a batch of 3 items; it must return one for each, in their order."),
        ([1, 2, 3, 4], "returned 4 results for a batch of 3 items; it must return one for each, in their order."),
        (None, "returned NoneType for a batch of 3 items; it must return a list of 3 results."),
        ("abc", "returned str for a batch of 3 items; it must return a list of 3 results."),
        ({1: 1, 2: 2, 3: 3}, "returned dict for a batch of 3 items; it must return a list of 3 results."),
        ({1, 2, 3}, "returned set for a batch of 3 items; it must return a list of 3 results."),
    ],
)
def test_anything_but_a_result_for_each_is_an_error(kind: int, answer: Any, message: str) -> None:
    def wrong(items: list[int]) -> Any:
        items.clear()  # a function may use up its list
        return answer

    for error in outcomes(wrong, kind, [1, 2, 3]):
        assert type(error) is ServerError
        assert str(error).endswith(message)
        assert "wrong" in str(error) or "later" in str(error)


def test_the_function_is_named_as_its_author_named_it() -> None:
    def nothing(more: int, items: list[int]) -> None: ...

    [error] = outcomes(partial(nothing, 1), 0, [1])  # type: ignore[arg-type]
    assert "<locals>.nothing returned NoneType for" in str(error)


@KINDS
@pytest.mark.parametrize("make", [tuple, np.array, iter, lambda items: (item for item in items)])
def test_any_ordered_results_will_do(kind: int, make: Callable[..., Any]) -> None:
    assert outcomes(make, kind, [1, 2, 3]) == [1, 2, 3]


# -- What means something else in a task or an event loop ----------------------------------------------------------


@KINDS
@pytest.mark.parametrize("error", [StopIteration(7), asyncio.CancelledError("inside"), GeneratorExit()], ids=repr)
def test_what_would_end_a_task_otherwise_is_told_of(kind: int, error: BaseException) -> None:
    for own in outcomes(raising(error), kind, [1, 2]):
        # A coroutine cannot raise StopIteration; Python makes it a RuntimeError.
        assert type(own) is (RuntimeError if kind == 2 and isinstance(error, StopIteration) else ServerError)
        assert type(error).__name__ in repr(own)


def test_a_batch_that_somebody_cancels_fails_its_callers_and_no_more() -> None:
    async def double(items: list[int]) -> list[int]:
        await asyncio.sleep(1)
        return [2 * item for item in items]

    async def main() -> list[Any]:
        async with DynamicBatcher(double, max_batch_size=2) as batcher:
            mine = asyncio.all_tasks()
            tasks = [asyncio.create_task(batcher.predict(i)) for i in range(6)]
            for count in (1, 3):  # before its first turn, and in its sleep
                await turns(count)
                [batch] = asyncio.all_tasks() - mine - {*tasks}
                batch.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

    *failed, four, five = run(main)
    assert [type(error) for error in failed] == [ServerError] * 4
    assert (four, five) == (8, 10)


@KINDS
@pytest.mark.parametrize("cls", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("loop", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_function_can_end_the_program(kind: int, cls: type[BaseException], loop: Any) -> None:
    error = cls(3)
    calls: list[list[int]] = []
    told: list[BaseException] = []
    gate = threading.Event()

    def leave(items: list[int]) -> list[int]:
        calls.append(items)
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(20)
        if items[0] < 10:
            raise error
        return items

    async def caller(item: int) -> None:
        try:
            await batcher.predict(item)
        except BaseException as own:
            told.append(own)
            raise

    function, where = kinds(leave)[kind]

    batcher = DynamicBatcher(function, max_batch_size=2, max_wait_ms=60_000, **where)

    async def ask(*items: int) -> None:
        tasks = [asyncio.create_task(caller(item)) for item in items]
        await turns()
        gate.set()
        await asyncio.gather(*tasks)

    with pytest.raises(cls) as raised, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(ask(0, 1, 2, 3, 4, 5))
    assert raised.value is error
    assert len(told) == 6
    assert {type(own) for own in told} <= {ServerError, asyncio.CancelledError}
    asyncio.run(ask(10, 11))  # by the same thread: after whatever it may have begun
    assert calls == [[0, 1], [10, 11]]


def test_an_event_loop_that_goes_on_after_all_serves_those_who_wait() -> None:
    def leave_once(items: list[int]) -> list[int]:
        if 0 in items:
            raise SystemExit
        return items

    async def ask() -> list[Any]:
        return await asyncio.gather(*(batcher.predict(i) for i in range(5)), return_exceptions=True)

    batcher = DynamicBatcher(leave_once, max_batch_size=2)
    loop = VirtualLoop()
    asked = loop.create_task(ask())
    with pytest.raises(SystemExit):
        loop.run_until_complete(asked)
    zero, one, *others = loop.run_until_complete(asked)
    assert (type(zero), type(one), others) == (ServerError, ServerError, [2, 3, 4])
    loop.run_until_complete(batcher.aclose())
    loop.close()


def test_without_a_thread_callers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    computed: list[list[int]] = []

    def remember(items: list[int]) -> list[int]:
        computed.append(items)
        return items

    async def main() -> None:
        async with DynamicBatcher(remember, max_batch_size=2) as batcher:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                answers = await asyncio.gather(*(batcher.predict(i) for i in range(2)), return_exceptions=True)
            assert [str(error) for error in answers] == ["can't start new thread"] * 2
            assert await asyncio.gather(batcher.predict(3), batcher.predict(4)) == [3, 4]
        assert computed == [[3, 4]]

    run(main)


# -- Nothing is kept alive -----------------------------------------------------------------------------------------


class Thing:
    """An item that can be watched."""


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@KINDS
@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_that_has_ended_keeps_nothing_alive(kind: int, fails: bool) -> None:
    def work(items: list[Thing]) -> list[int]:
        if fails:
            raise ValueError("no")
        return [1 for _ in items]

    function, where = kinds(work)[kind]

    async def caller(batcher: DynamicBatcher[Thing, int], watched: list[weakref.ref[Thing]]) -> None:
        thing = Thing()
        watched.append(weakref.ref(thing))
        try:
            assert await batcher.predict(thing) == 1
        except ValueError:
            assert fails

    async def main() -> None:
        watched: list[weakref.ref[Thing]] = []
        async with DynamicBatcher(function, max_batch_size=2, **where) as batcher:
            await asyncio.gather(*(caller(batcher, watched) for _ in range(4)))
            # The thread drops its last batch a moment after the callers were told.
            for _ in range(1000):
                if not any(thing() for thing in watched):
                    break
                await asyncio.to_thread(int)
            assert [thing() for thing in watched] == [None] * 4

    with no_collector():
        asyncio.run(main())


def test_a_batch_that_nobody_else_knows_stays_alive() -> None:
    waited_for: list[weakref.ref[asyncio.Future[None]]] = []

    async def wait(items: list[int]) -> list[int]:
        future = asyncio.get_running_loop().create_future()
        waited_for.append(weakref.ref(future))
        await future
        return items

    async def main() -> None:
        async with DynamicBatcher(wait, max_batch_size=1) as batcher:
            asked = asyncio.create_task(batcher.predict(1))
            await turns()
            gc.collect()
            future = waited_for[0]()
            assert future is not None
            future.set_result(None)
            assert await asked == 1

    run(main)


def test_callers_that_left_are_not_kept_alive() -> None:
    gate = asyncio.Event()

    async def wait(items: list[Thing]) -> list[Thing]:
        await gate.wait()
        return items

    async def main() -> None:
        batcher = DynamicBatcher(wait, max_batch_size=1, max_queue=2)
        first = asyncio.create_task(batcher.predict(Thing()))
        await turns()
        watched = []
        for _ in range(4):  # two in the queue, two outside
            thing = Thing()
            watched.append(weakref.ref(thing))
            task = asyncio.create_task(batcher.predict(thing))
            del thing
            await turns()
            task.cancel()
            await turns()
            del task
        assert [thing() for thing in watched] == [None] * 4
        gate.set()
        await first
        await batcher.aclose()

    with no_collector():
        run(main)


def test_a_batcher_that_is_dropped_without_closing_is_gone() -> None:
    async def main() -> weakref.ref[Any]:
        batcher = DynamicBatcher(lambda items: items, max_batch_size=2, max_wait_ms=1)
        await asyncio.gather(*(batcher.predict(i) for i in range(5)))
        await turns()
        await asyncio.to_thread(int)
        return weakref.ref(batcher)

    with no_collector():
        gone = asyncio.run(main())
        for _ in range(1000):
            if gone() is None:
                break
            threading.Event().wait(0.001)
        assert gone() is None
