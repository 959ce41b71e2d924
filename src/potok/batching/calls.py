"""One call of the batched function, wherever it runs, and what each caller is told of it."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

from potok.errors import ServerError

#: What means something to the task or the event loop that it is raised in: callers are told of it, but do not get it.
_NOT_FOR_CALLERS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration)


class Outcome(NamedTuple):
    """results: one an item; exceptions are to be raised. error: what ended the whole call, then in all results too."""

    results: list[Any]
    error: BaseException | None = None

    @property
    def ends_the_loop(self) -> bool:
        return isinstance(self.error, KeyboardInterrupt | SystemExit)


def failed(error: BaseException, count: int) -> Outcome:
    return Outcome([error] * count, error)


def in_thread(fn: Callable[[list[Any]], Any], items: list[Any]) -> Outcome | Awaitable[Any]:
    """Calls fn; never raises. A result to be awaited is returned as it is, because that needs the event loop.

    Not even StopIteration may leave the thread: a future cannot hold it, and the callers would wait for ever.
    """
    count = len(items)  # fn may do with its list what it likes
    try:
        given = fn(items)
        return given if inspect.isawaitable(given) else Outcome(_checked(given, count, fn))
    except BaseException as error:
        return failed(error, count)


async def on_loop(fn: Callable[[list[Any]], Any], start: Callable[[], Any], count: int) -> Outcome:
    """What `start` begins, awaited if it is awaitable; never raises. fn: of this name errors speak."""
    try:
        given = start()
        return Outcome(_checked(await given if inspect.isawaitable(given) else given, count, fn))
    except BaseException as error:
        return failed(error, count)


def _checked(given: Any, count: int, fn: Callable[..., Any]) -> list[Any]:
    """The results as a list. Raises ServerError when they are not `count` in a certain order."""
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Iterable):
        raise ServerError(
            f"{name_of(fn)} returned {type(given).__name__} for a batch of {count} items; it must return a list of "
            f"{count} results."
        )
    results = list(given)
    if len(results) != count:
        raise ServerError(
            f"{name_of(fn)} returned {len(results)} results for a batch of {count} items; it must return one for each, "
            "in their order."
        )
    return results


def for_one_caller(error: BaseException, fn: Callable[..., Any]) -> BaseException:
    """An exception for one caller alone to raise, caused by `error`: of the same class, else ServerError.

    Raising writes a traceback into the exception; in one object for all, callers would see those of each other.
    """
    own = None if isinstance(error, _NOT_FOR_CALLERS) else _twin(error)
    if own is None:
        try:
            said = str(error)
        except Exception:  # the caller must be told, whatever the class cannot do
            said = "(no text)"
        own = ServerError(f"{name_of(fn)} ended its batch with {type(error).__name__}: {said}")
        own.__cause__ = error
    return own


def _twin(error: BaseException) -> BaseException | None:
    """A faithful copy, or None. A class that makes its message from other arguments survives only the second way."""
    for copied in (copy.copy, _without_init):
        try:
            twin = copied(error)
            if (
                type(twin) is type(error)
                and twin is not error
                and all(mine is theirs for mine, theirs in zip(twin.args, error.args, strict=True))
                and str(twin) == str(error)
            ):
                twin.__cause__ = error
                if hasattr(error, "__notes__"):
                    twin.__notes__ = list(error.__notes__)
                return twin
        except Exception:  # whatever a class does when it is copied
            continue
    return None


def _without_init(error: BaseException) -> BaseException:
    twin = type(error).__new__(type(error), *error.args)
    twin.__dict__.update(error.__dict__)
    return twin


def is_async(fn: Callable[..., Any]) -> bool:
    """Coroutine functions, and objects whose call is one."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", type(fn).__name__)
