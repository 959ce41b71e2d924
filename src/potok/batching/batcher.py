"""DynamicBatcher: items come one by one from concurrent callers, the function gets them in batches."""

from __future__ import annotations

import asyncio
import math
import operator
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from potok.batching.calls import Outcome, failed, for_one_caller, in_thread, is_async, on_loop
from potok.batching.waiting import Bounds, Entry, Waiting
from potok.errors import ClientError, ServerError, Unavailable

Item = TypeVar("Item")
Result = TypeVar("Result")

_Answers = list[asyncio.Future[Any]]


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """batches, items: calls of fn that have ended, and the items in them. failed_batches: of these, by an error.

    running: calls of fn now. queue_length: items that wait for their batch. outside: callers that wait for room there.
    """

    batches: int
    items: int
    failed_batches: int
    running: int
    queue_length: int
    outside: int

    @property
    def mean_batch_size(self) -> float:
        """Items; 0 before the first batch."""
        return self.items / self.batches if self.batches else 0.0


class DynamicBatcher(Generic[Item, Result]):
    """Gathers the items of concurrent callers into batches for a function.

        async with DynamicBatcher(model.embed, max_batch_size=32, max_wait_ms=5) as batcher:
            vector = await batcher.predict("one text")

    fn: takes a list of items and returns one result for each, in their order. An exception among the results is raised
        in its item's caller alone; what fn raises, in all callers of that batch. Each gets an exception of its own, of
        the same class and with the original as its cause; ServerError stands for what would mean something else in a
        caller (CancelledError, SystemExit) and for what cannot be copied.
    max_batch_size: items. A full batch starts at once.
    max_wait_ms: how long the oldest item waits for others. 0: only for those of the same turn of the event loop.
    max_tokens_per_batch: bounds a batch in tokens as well; 0: no such bound. An item that exceeds it alone is refused.
    cost: tokens of an item, a whole number; without it, the item's length. Called on the event loop: it must be quick.
    max_queue: items that may wait for their batch, max_batch_size or more; 0: any number.
    when_full: a caller that finds the queue full is to "wait" for room, in order of arrival, or to "raise" Unavailable.
    max_concurrency: calls of fn at once.
    in_thread: whether fn runs on a thread of the batcher's own. None: unless it is a coroutine function, which runs on
        the event loop. False is for plain functions that return at once, perhaps something to be awaited.

    A caller that is cancelled before its batch starts leaves the queue, and its item is not computed; a batch that has
    started runs to its end. fn sees the context variables of the place where the batcher was made, never a caller's.
    SystemExit and KeyboardInterrupt from fn end the event loop, as they do from any task.

    It serves one event loop; once that is closed, another. Raises ClientError when an argument is out of bounds.
    """

    _loop: asyncio.AbstractEventLoop  # the one in use, from the first call on

    def __init__(
        self,
        fn: Callable[[list[Item]], Iterable[Result] | Awaitable[Iterable[Result]]],
        max_batch_size: int = 32,
        max_wait_ms: float = 20.0,
        max_tokens_per_batch: int = 0,
        *,
        cost: Callable[[Item], int] | None = None,
        max_queue: int = 0,
        when_full: Literal["wait", "raise"] = "wait",
        max_concurrency: int = 1,
        in_thread: bool | None = None,
    ) -> None:
        _check(callable(fn), "fn", "a function", fn)
        _check(cost is None or callable(cost), "cost", "a function", cost)
        _check(_is_whole(max_batch_size, 1), "max_batch_size", "a whole number, 1 or more", max_batch_size)
        _check(_is_whole(max_tokens_per_batch, 0), "max_tokens_per_batch", "0 or a whole number", max_tokens_per_batch)
        _check(_is_whole(max_concurrency, 1), "max_concurrency", "a whole number, 1 or more", max_concurrency)
        is_number = isinstance(max_wait_ms, int | float) and not isinstance(max_wait_ms, bool)
        _check(is_number and 0 <= max_wait_ms < math.inf, "max_wait_ms", "milliseconds, 0 or more", max_wait_ms)
        # A queue that holds less than a batch would have no batch ever full.
        enough = f"0 or a whole number, {max_batch_size} (max_batch_size) or more"
        _check(_is_whole(max_queue, max_batch_size) or max_queue == 0, "max_queue", enough, max_queue)
        _check(when_full in ("wait", "raise"), "when_full", "'wait' or 'raise'", when_full)
        coroutine_function = is_async(fn)
        _check(not (in_thread and coroutine_function), "in_thread", "left out for a coroutine function", in_thread)
        self._fn = fn
        self._cost = cost or _length
        self._bounds = Bounds(
            max_batch_size, max_tokens_per_batch or math.inf, max_queue or math.inf, max_wait_ms / 1000.0
        )
        self._raises_when_full = when_full == "raise"
        self._max_concurrency = max_concurrency
        self._in_thread = not coroutine_function if in_thread is None else in_thread
        self._context = copy_context()
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False
        self._batches = self._items = self._failed_batches = 0
        self._reset()

    def _reset(self) -> None:
        """Begins anew. Whatever an event loop has left behind ended with it."""
        self._waiting = Waiting(self._bounds)
        self._running = 0
        self._tasks: set[asyncio.Task[Outcome]] = set()  # the event loop alone would not keep them alive
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def predict(self, item: Item) -> Result:
        """The result for one item, computed together with those of other callers.

        Raises what fn raised, as the class says; ServerError when fn returned something else than one result an item.
        At once: ClientError for an item that no batch can take; Unavailable after `aclose`, and when the queue is full
        and `when_full` is "raise"; RuntimeError on another event loop than the one in use.
        """
        loop = self._bound()
        if self._closed:
            raise Unavailable("the batcher is closed; make another one.", code="shutting_down")
        tokens = self._tokens_of(item)
        if self._raises_when_full and not self._waiting.has_room:
            raise Unavailable(f"{self._bounds.queue} items wait already; try again in a moment.", code="overloaded")
        answer: asyncio.Future[Result] = loop.create_future()
        entry = Entry(item, tokens, answer)
        self._enter(entry, loop.time())
        try:
            return await answer
        finally:
            if entry.line is not None:
                self._leave(entry, loop.time())
            # An exception raised here knows this frame. If the frame kept the future, which knows the exception, the
            # three would keep each other alive.
            del answer, entry

    async def aclose(self) -> None:
        """Refuses items from now on, computes those that wait without waiting for more, and ends the threads.

        May be called again. Whoever is cancelled here leaves the batcher closed; what waits is computed all the same.
        """
        loop = self._bound()
        self._closed = True
        self._start_batches(loop.time())
        await self._idle.wait()
        if self._executor is not None:
            self._executor.shutdown(wait=False)  # its threads have nothing left to do, and end

    async def __aenter__(self) -> Self:
        self._bound()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def stats(self) -> BatcherStats:
        return BatcherStats(
            batches=self._batches,
            items=self._items,
            failed_batches=self._failed_batches,
            running=self._running,
            queue_length=len(self._waiting.queue),
            outside=len(self._waiting.outside),
        )

    def _bound(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        in_use = getattr(self, "_loop", None)
        if in_use is not loop:
            if in_use is not None and not in_use.is_closed():
                raise RuntimeError(
                    "this DynamicBatcher is in use on another event loop; make one for each, or send the item there "
                    "with asyncio.run_coroutine_threadsafe."
                )
            self._reset()
            self._loop = loop
            # Its clock against the system's, for threads: to ask an event loop for its time may change it (uvloop).
            self._ahead_s = loop.time() - time.monotonic()
        return loop

    def _tokens_of(self, item: Item) -> int:
        limit = self._bounds.batch_tokens
        if limit == math.inf:
            return 0
        given = self._cost(item)
        try:
            tokens = operator.index(given)
        except TypeError:
            tokens = -1
        if tokens < 0:
            raise ServerError(f"cost must return a whole number of tokens, 0 or more, not {given!r:.60}.")
        if tokens > limit:
            raise ClientError(
                f"the item has {tokens} tokens, and a batch takes {limit}; shorten it, or raise max_tokens_per_batch.",
                "item",
                "out_of_range",
            )
        return tokens

    def _enter(self, entry: Entry, now: float) -> None:
        self._waiting.enter(entry, now)
        self._idle.clear()
        if self._running < self._max_concurrency:  # else the end of a batch looks at the queue
            if self._waiting.fills_a_batch:
                self._start_batches(now)
            elif self._timer is None:
                self._wake_at(entry.deadline)

    def _leave(self, entry: Entry, now: float) -> None:
        self._waiting.leave(entry, now)
        if not self._waiting.queue:
            self._wake_at(None)
            self._rest()

    def _rest(self) -> None:
        if not (self._running or self._waiting.queue):
            self._idle.set()

    def _wake_at(self, when: float | None) -> None:
        """One timer at most, which may be early: then it sets the next one."""
        if self._timer is not None and when is None:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and when is not None:
            self._timer = self._loop.call_at(when, self._wake, when, context=self._context)

    def _wake(self, when: float) -> None:
        self._timer = None
        self._start_batches(max(when, self._loop.time()))  # a timer may be early by the resolution of the clock

    def _start_batches(self, now: float) -> None:
        """Starts every batch whose time has come, and sets the timer for the next."""
        while self._running < self._max_concurrency:
            batch = self._waiting.next_batch(now, wait=not self._closed)
            if not batch:
                self._wake_at(self._waiting.deadline)
                return
            self._start(batch)
        self._wake_at(None)

    def _start(self, batch: list[Entry]) -> None:
        self._running += 1
        if not self._in_thread:
            items: list[Item] = [entry.item for entry in batch]
            self._start_task(partial(self._fn, items), [entry.answer for entry in batch])
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._max_concurrency, "potok-batcher")
        try:
            self._executor.submit(self._work, self._loop, self._waiting, batch)
        except RuntimeError as error:  # no thread is to be had, or the interpreter is about to end
            self._executor.shutdown(wait=False, cancel_futures=True)  # it has kept the batch, for a later thread
            self._executor = None
            self._loop.call_soon(self._end, [entry.answer for entry in batch], failed(error, len(batch)))

    def _work(self, loop: asyncio.AbstractEventLoop, waiting: Waiting, batch: list[Entry]) -> None:
        """Runs on a thread of the executor.

        After a batch it takes the next itself if there is one whose time has come. By way of the event loop, that would
        start only when all callers of the one before have been told: the thread that tells them holds the GIL. When the
        event loop was closed meanwhile, it ends with a RuntimeError that nobody hears of, as nobody is left to be told.
        """
        while batch:
            batch = self._work_off(loop, waiting, batch)

    def _work_off(self, loop: asyncio.AbstractEventLoop, waiting: Waiting, batch: list[Entry]) -> list[Entry]:
        """Returns the next batch.

        An exception that fn raises knows the frames from here down, the executor's too. So that callers who keep it do
        not keep alive what those know, and above all no future that knows the exception, nothing is left there.
        """
        items: list[Item] = [entry.item for entry in batch]
        answers: _Answers = [entry.answer for entry in batch]
        batch.clear()
        outcome = self._context.copy().run(in_thread, self._fn, items)
        following: list[Entry] = []
        try:
            if isinstance(outcome, Outcome) and not outcome.ends_the_loop:
                following = waiting.next_batch(time.monotonic() + self._ahead_s, wait=not self._closed)
            loop.call_soon_threadsafe(self._end, answers, outcome, bool(following))
            return following
        finally:
            del items, answers, outcome, following

    def _start_task(self, start: Callable[[], Any], answers: _Answers) -> None:
        work = on_loop(self._fn, start, len(answers))
        task = self._loop.create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(partial(self._end_task, answers))

    def _end_task(self, answers: _Answers, task: asyncio.Task[Outcome]) -> None:
        self._tasks.discard(task)
        # Only a task that was cancelled before its first turn ends so; later ones give an outcome.
        self._end(answers, failed(asyncio.CancelledError(), len(answers)) if task.cancelled() else task.result())

    def _end(self, answers: _Answers, outcome: Outcome | Awaitable[Any], goes_on: bool = False) -> None:
        """A call of fn has ended. Another one starts before the callers of this one are told: fn waits for nobody.

        goes_on: its thread has started another one by itself.
        """
        if not isinstance(outcome, Outcome):
            self._start_task(lambda: outcome, answers)
            return
        self._batches += 1
        self._items += len(answers)
        self._failed_batches += outcome.error is not None
        if not goes_on:
            self._running -= 1
            now = self._loop.time()
            if outcome.ends_the_loop:
                self._wake_at(now + self._bounds.wait_s)  # should the event loop go on after all
            else:
                self._start_batches(now)
        for answer, result in zip(answers, outcome.results, strict=True):
            if answer.done():  # its caller was cancelled
                continue
            if isinstance(result, BaseException):
                answer.set_exception(for_one_caller(result, self._fn))
            else:
                answer.set_result(result)
        self._rest()
        if outcome.error is not None and outcome.ends_the_loop:
            raise outcome.error


def _length(item: Any) -> int:
    try:
        return len(item)
    except TypeError:
        raise ServerError(
            f"max_tokens_per_batch needs to know the tokens of an item, and {type(item).__name__} has no length; "
            "give cost, a function from an item to its tokens."
        ) from None


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check(holds: bool, name: str, legal: str, given: Any) -> None:
    if not holds:
        raise ClientError(f"{name} must be {legal}, not {given!r:.60}.", name, "out_of_range")
