"""Rows for the tests of sampling, and the native sampler with the signature of the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from potok._native import kernels, supported_isas
from potok.protocol import Sampling
from potok.sampling import reference
from potok.sampling.rows import Sampled, SampleRows
from potok.sampling.state import RowState, build_rows

Sampler = Callable[[np.ndarray, SampleRows], Sampled]


def rows_of(
    *samplings: Sampling, position: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> SampleRows:
    """Rows of requests that share prompt, output and position."""
    return build_rows(
        [(RowState(s, prompt, output), position) for s in samplings], any(s.logit_hash for s in samplings)
    )


def native(isa: str) -> Sampler:
    def sample_rows(logits: np.ndarray, rows: SampleRows) -> Sampled:
        count, width = len(logits), max(0, int(rows.logprobs.max(initial=0)))
        top_ids = np.full((count, width), -1, np.int32)
        top_logprobs = np.zeros((count, width), np.float32)
        ids, logprob, hashes = [], [], []
        for i, x in enumerate(logits):
            seen = slice(rows.seen_indptr[i], rows.seen_indptr[i + 1])
            bias = slice(rows.bias_indptr[i], rows.bias_indptr[i + 1])
            wanted = int(rows.logprobs[i])
            id, chosen, hash, best, best_logprobs = kernels.sample_row(
                isa,
                x,
                float(rows.temperature[i]),
                int(rows.top_k[i]),
                float(rows.top_p[i]),
                float(rows.min_p[i]),
                int(rows.seed[i]),
                int(rows.choice[i]),
                int(rows.position[i]),
                float(rows.presence[i]),
                float(rows.frequency[i]),
                float(rows.repetition[i]),
                rows.seen_ids[seen],
                rows.seen_counts[seen],
                rows.bias_ids[bias],
                rows.bias_values[bias],
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
