"""The calls to a scheduler, each as what it is made of: what a journal holds, and how a replay makes it again."""

from __future__ import annotations

from array import array
from typing import TypeVar

import msgspec

from potok.core.batch import Batch, Delta
from potok.core.radix import Domain
from potok.core.request import Request
from potok.core.scheduler import Reject, Scheduler
from potok.core.tier import Done, Transfer


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """The fields of a Request that are its caller's, all of them and in the same order."""

    id: int
    tokens: list[int]
    prompt_len: int
    max_new: int
    stop_ids: list[int]
    domain: Domain
    rate_until: int
    arrived_us: int
    first_by_us: int
    ends_by_us: int
    priority: int
    whole: bool

    @classmethod
    def of(cls, request: Request) -> Submit:
        return cls(
            request.id,
            request.tokens.tolist(),
            request.prompt_len,
            request.max_new,
            sorted(request.stop_ids),
            request.domain,
            request.rate_until,
            request.arrived_us,
            request.first_by_us,
            request.ends_by_us,
            request.priority,
            request.whole,
        )

    def make(self, scheduler: Scheduler) -> Reject | None:
        _, tokens, prompt_len, max_new, stop_ids, *rest = msgspec.structs.astuple(self)
        request = Request(self.id, array("i", tokens), prompt_len, max_new, frozenset(stop_ids), *rest)
        return scheduler.submit(request)


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    id: int

    def make(self, scheduler: Scheduler) -> None:
        scheduler.cancel(self.id)


class Transferred(msgspec.Struct, frozen=True, tag="transferred", array_like=True):
    done: list[Done]

    def make(self, scheduler: Scheduler) -> None:
        scheduler.transferred(self.done)


class Schedule(msgspec.Struct, frozen=True, tag="schedule", array_like=True):
    now_us: int

    def make(self, scheduler: Scheduler) -> Batch | None:
        return scheduler.schedule(self.now_us)


class TakeTransfers(msgspec.Struct, frozen=True, tag="take_transfers", array_like=True):
    def make(self, scheduler: Scheduler) -> list[Transfer]:
        return scheduler.take_transfers()


class TakeEnded(msgspec.Struct, frozen=True, tag="take_ended", array_like=True):
    def make(self, scheduler: Scheduler) -> list[Delta]:
        return scheduler.take_ended()


class Commit(msgspec.Struct, frozen=True, tag="commit", array_like=True):
    """Of the step in flight."""

    sampled_ids: list[int]
    step_us: int

    def make(self, scheduler: Scheduler) -> list[Delta]:
        assert scheduler.flight is not None, "no step is in flight"
        return scheduler.commit(scheduler.flight, self.sampled_ids, self.step_us)


Call = Submit | Cancel | Transferred | Schedule | TakeTransfers | TakeEnded | Commit
#: What can come of a call.
Outcome = Batch | list[Delta] | list[Transfer] | Reject | None
T = TypeVar("T", bound=Outcome)
