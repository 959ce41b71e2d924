"""A scheduler that writes a journal of its calls. Whoever makes them need not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from potok.core.batch import Batch, Delta
from potok.core.request import Request
from potok.core.scheduler import Reject, Scheduler
from potok.core.tier import Done, Transfer
from potok.engine import calls
from potok.engine.calls import Call, Outcome
from potok.engine.journal import Journal

P = ParamSpec("P")
T = TypeVar("T", bound=Outcome)


class RecordedScheduler(Scheduler):
    """`record_to` comes before the first call."""

    def record_to(self, journal: Journal) -> None:
        self._journal = journal

    def submit(self, request: Request) -> Reject | None:
        return self._record(calls.Submit.of(request), super().submit, request)

    def cancel(self, id: int) -> None:
        self._record(calls.Cancel(id), super().cancel, id)

    def transferred(self, done: Sequence[Done]) -> None:
        if done:  # what has not happened is told between any two steps
            self._record(calls.Transferred(list(done)), super().transferred, done)

    def schedule(self, now_us: int) -> Batch | None:
        batch = self._record(calls.Schedule(now_us), super().schedule, now_us)
        self._journal.tick(now_us)
        return batch

    def take_transfers(self) -> list[Transfer]:
        return self._record(calls.TakeTransfers(), super().take_transfers)

    def take_ended(self) -> list[Delta]:
        return self._record(calls.TakeEnded(), super().take_ended)

    def commit(self, batch: Batch, sampled_ids: Sequence[int], step_us: int) -> list[Delta]:
        call = calls.Commit(list(sampled_ids), step_us)
        return self._record(call, super().commit, batch, sampled_ids, step_us)

    def _record(self, call: Call, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Makes the call. One that meets a bug is the last that anybody wants to miss."""
        try:
            outcome = make(*args, **kwargs)
        except Exception as error:
            self._journal.write_raised(call, error)
            raise
        self._journal.write(call, outcome)
        return outcome
