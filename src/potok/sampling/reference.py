"""The sampler in numpy: the definition that the kernels equal. Steps are numbered as in potok.sampling."""

from __future__ import annotations

import numpy as np

from potok.sampling.math import exp_f32, log_f32
from potok.sampling.philox import uniform
from potok.sampling.rows import F32, F64, I32, Sampled, SampleRows

GREEDY_BELOW = np.float32(1e-5)
WEIGHT_STEP = np.float32(2.0**-11)
LARGEST = np.finfo(np.float32).max


def sample_rows(logits: F32, rows: SampleRows) -> Sampled:
    """One token for each row of logits [S, V], which stay as they are. V <= 2^19."""
    count = len(logits)
    out = Sampled(
        ids=np.full(count, -1, np.int32),
        logprob=np.zeros(count, np.float32),
        top_ids=np.full((count, rows.width), -1, np.int32),
        top_logprobs=np.zeros((count, rows.width), np.float32),
        hashes=np.array([hash_row(x) for x in logits] if rows.want_hashes else [], np.uint64),
    )
    for i, raw in enumerate(logits):
        if np.isfinite(raw).all():
            _sample_row(raw, rows, i, out)
    return out


def hash_row(x: F32) -> int:
    """Step 0: the 64-bit hash of a row [V]."""
    key = np.arange(len(x), dtype=np.uint64) << np.uint64(32) | np.ascontiguousarray(x).view(np.uint32)
    key *= np.uint64(0x9E3779B97F4A7C15)
    key = (key ^ key >> np.uint64(32)) * np.uint64(0xBF58476D1CE4E5B9)
    return int(key.sum(dtype=np.uint64))


def edit(raw: F32, rows: SampleRows, i: int) -> F32:
    """Steps 2 and 3: row i of `rows` applied to its raw logits [V]."""
    x, settings = raw.copy(), rows.table[i]
    with np.errstate(over="ignore"):
        if rows.seen is not None:
            ids, times = rows.seen.of(i)
            v = x[ids]
            v = np.where(v > 0, v / settings["repetition"], v * settings["repetition"])
            fewer = (v - settings["frequency"] * times.astype(np.float32)) - settings["presence"]
            x[ids] = np.minimum(np.where(times > 0, fewer, v), LARGEST)
        if rows.biases is not None:
            ids, values = rows.biases.of(i)
            x[ids] = np.minimum(x[ids] + values, LARGEST)
    return x


def weights(x: F32, temperature: np.float32) -> F64:
    """Step 5: the weight of each id, of logits [V] whose highest is finite; multiples of 2^-34 from 0 to 1."""
    with np.errstate(over="ignore"):
        z = (x - x.max()) * (np.float32(1) / temperature)
    return ((exp_f32(z) + WEIGHT_STEP) - WEIGHT_STEP).astype(np.float64)


def order(x: F32) -> I32:
    """Step 6: ids [V] by logit descending, then id ascending."""
    return np.argsort(-x, kind="stable").astype(np.int32)


def choose(x: F32, u: float, *, temperature: np.float32, top_k: int, top_p: float, min_p: np.float32) -> int:
    """Steps 4 to 7: the token of edited logits [V] for the random number u."""
    if temperature < GREEDY_BELOW:
        return int(np.argmax(x))
    ids = order(x)
    w = weights(x, temperature)[ids]
    mass = np.cumsum(w)
    kept = len(ids)
    if min_p > 0:
        kept = int(np.count_nonzero(w >= min(min_p, np.float32(1))))
    if top_k > 0:
        kept = min(kept, top_k)
    if top_p < 1:
        kept = 1 + int(np.searchsorted(mass, top_p * mass[kept - 1], side="left"))
    return int(ids[np.searchsorted(mass, u * mass[kept - 1], side="right")])


def _sample_row(raw: F32, rows: SampleRows, i: int, out: Sampled) -> None:
    x, settings = edit(raw, rows, i), rows.table[i]
    if x.max() == -np.inf:
        out.ids[i] = int(np.argmax(raw))
    else:
        u = uniform(int(settings["seed"]), int(settings["choice"]), int(rows.position[i]))
        out.ids[i] = choose(
            x,
            u,
            temperature=settings["temperature"],
            top_k=int(settings["top_k"]),
            top_p=float(settings["top_p"]),
            min_p=settings["min_p"],
        )

    wanted = int(settings["logprobs"])
    if wanted >= 0:  # step 1
        mass = weights(raw, np.float32(1)).sum()
        logprobs = (raw - raw.max()) - log_f32(np.array([mass], np.float32))
        best = order(raw)[:wanted]
        out.logprob[i] = logprobs[out.ids[i]]
        out.top_ids[i, : len(best)] = best
        out.top_logprobs[i, : len(best)] = logprobs[best]
