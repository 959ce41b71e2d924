"""A recorded scheduler that never learns what was said: other token ids go in, and are put back on the way out.

What the scheduler decides may depend on the ids themselves, as the radix tree keeps neighbours sorted. So they are not
replaced in what is written, but before anything is decided: what the journal holds is what the scheduler was given.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from random import SystemRandom

import numpy as np

from potok.core.batch import Batch, Delta, Segment
from potok.core.describe import Prefix
from potok.core.radix import Domain
from potok.core.request import Request
from potok.core.scheduler import Reject
from potok.engine.recorded import RecordedScheduler

NAME_BYTES = 16


class Mask:
    """A permutation of the vocabulary and names for names, drawn anew for each journal and never written.

    `hide` and `show` undo each other. It is a cipher for words: how often each occurs, and where the same ones come
    again, can still be seen.
    """

    def __init__(self, vocab_size: int) -> None:
        self.hidden = list(range(vocab_size))  # by real id
        SystemRandom().shuffle(self.hidden)
        self.shown = [0] * vocab_size  # by hidden id
        for real, hidden in enumerate(self.hidden):
            self.shown[hidden] = real
        self._hide, self._show = np.array(self.hidden, np.int32), np.array(self.shown, np.int32)  # for many at once
        self._key = os.urandom(32)
        self._namespaces: dict[str, str] = {}  # by hidden name; there are as many as API keys

    def hide(self, tokens: array[int]) -> array[int]:
        return array("i", self._hide[tokens].tobytes())

    def show(self, tokens: array[int]) -> array[int]:
        return array("i", self._show[tokens].tobytes())

    def hide_namespace(self, name: str) -> str:
        return self._name(b"namespace", name)

    def hide_domain(self, domain: Domain) -> Domain:
        namespace = self.hide_namespace(domain.namespace)
        self._namespaces[namespace] = domain.namespace
        adapter, salt = self._name(b"adapter", domain.adapter), self._name(b"salt", domain.salt)
        return domain._replace(adapter=adapter, namespace=namespace, salt=salt)

    def show_domain(self, domain: Domain) -> Domain:
        """But for adapter and salt, of which only whether there is one can be told."""
        return domain._replace(namespace=self._namespaces[domain.namespace])

    def _name(self, kind: bytes, name: str) -> str:
        if not name:
            return ""
        return blake2b(name.encode(), digest_size=NAME_BYTES, key=self._key, person=kind).hexdigest()


class RedactedScheduler(RecordedScheduler):
    """`hide_with` comes before the first call. A request that was submitted holds hidden ids from then on."""

    def hide_with(self, mask: Mask) -> None:
        self._mask = mask

    def submit(self, request: Request) -> Reject | None:
        mask = self._mask
        request.tokens = mask.hide(request.tokens)
        request.stop_ids = frozenset([mask.hidden[id] for id in request.stop_ids])
        request.domain = mask.hide_domain(request.domain)
        return super().submit(request)

    def schedule(self, now_us: int) -> Batch | None:
        batch = super().schedule(now_us)
        if batch is None:
            return None
        flat, at, segments = array("i"), 0, []
        for segment in batch.segments:
            flat.extend(segment.tokens)
        flat = self._mask.show(flat)
        for id, start, tokens, blocks, sample, rate in batch.segments:
            end = at + len(tokens)
            segments.append(Segment(id, start, flat[at:end], blocks, sample, rate))
            at = end
        return batch._replace(segments=tuple(segments))

    def commit(self, batch: Batch, sampled_ids: Sequence[int], step_us: int) -> list[Delta]:
        """batch: as schedule() has given it; what is in flight is the same with hidden ids."""
        hidden, flight = self._mask.hidden, self.flight
        assert flight is not None and flight.step == batch.step, "only the step in flight can be committed"
        return self._show(super().commit(flight, [id if id < 0 else hidden[id] for id in sampled_ids], step_us))

    def take_ended(self) -> list[Delta]:
        return self._show(super().take_ended())

    def top_prefixes(self, top: int, namespace: str | None = None) -> list[Prefix]:
        mask = self._mask
        found = super().top_prefixes(top, None if namespace is None else mask.hide_namespace(namespace))
        return [p._replace(domain=mask.show_domain(p.domain), head=[mask.shown[id] for id in p.head]) for p in found]

    def _show(self, deltas: list[Delta]) -> list[Delta]:
        shown = self._mask.shown
        return [Delta(id, None if token is None else shown[token], finish, row) for id, token, finish, row in deltas]
