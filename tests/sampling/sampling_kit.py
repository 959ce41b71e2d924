"""Rows for the tests of sampling, and the native sampler with the signature of the reference."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from potok._native import kernels, supported_isas
from potok.protocol import Sampling
from potok.sampling import reference
from potok.sampling.rows import Sampled, SampleRows
from potok.sampling.state import RowState, build_rows

NO_IDS, NO_VALUES = np.empty(0, np.int32), np.empty(0, np.float32)

Sampler = Callable[[np.ndarray, SampleRows], Sampled]


def rows_of(
    *samplings: Sampling, position: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> SampleRows:
    """Rows of requests that share prompt, output and position."""
    states = [RowState(s, prompt, output) for s in samplings]
    return build_rows(states, array("i", [position] * len(states)), any(s.logit_hash for s in samplings))


def native(isa: str) -> Sampler:
    def sample_rows(logits: np.ndarray, rows: SampleRows) -> Sampled:
        count, width = len(logits), rows.width
        top_ids = np.full((count, width), -1, np.int32)
        top_logprobs = np.zeros((count, width), np.float32)
        ids, logprob, hashes = [], [], []
        for i, x in enumerate(logits):
            settings = rows.table[i]
            seen = (NO_IDS, NO_IDS) if rows.seen is None else rows.seen.of(i)
            biases = (NO_IDS, NO_VALUES) if rows.biases is None else rows.biases.of(i)
            wanted = int(settings["logprobs"])
            id, chosen, hash, best, best_logprobs = kernels.sample_row(
                isa,
                x,
                float(settings["temperature"]),
                int(settings["top_k"]),
                float(settings["top_p"]),
                float(settings["min_p"]),
                int(settings["seed"]),
                int(settings["choice"]),
                rows.position[i],
                float(settings["presence"]),
                float(settings["frequency"]),
                float(settings["repetition"]),
                *seen,
                *biases,
                wanted,
                rows.want_hashes,
            )
            ids.append(id)
            logprob.append(chosen)
            hashes.append(hash)
            top_ids[i, : max(0, wanted)] = best
            top_logprobs[i, : max(0, wanted)] = best_logprobs
        return Sampled(
            np.array(ids, np.int32),
            np.array(logprob, np.float32),
            top_ids,
            top_logprobs,
            np.array(hashes if rows.want_hashes else [], np.uint64),
        )

    return sample_rows


#: Every sampler there is, by name; the tests of the definition hold for each.
SAMPLERS: dict[str, Sampler] = {"numpy": reference.sample_rows} | {isa: native(isa) for isa in supported_isas()}


def difference(a: Sampled, b: Sampled) -> str | None:
    """The first row and field in which two answers differ in any bit, or None."""
    for name in Sampled._fields:
        x, y = getattr(a, name), getattr(b, name)
        if x.dtype != y.dtype or x.shape != y.shape:
            return f"{name}: {x.dtype}{x.shape} and {y.dtype}{y.shape}"
        if x.tobytes() != y.tobytes():
            row = int(np.flatnonzero((x != y).reshape(len(x), -1).any(axis=1))[0])
            return f"row {row}, {name}: {x[row]} and {y[row]}"
    return None
