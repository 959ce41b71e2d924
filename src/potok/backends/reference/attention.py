"""Rotation, and causal attention in tiles and segments at absolute positions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from potok.backends.reference.arithmetic import fma, sum_lanes
from potok.model.config import ModelConfig
from potok.model.plan import RopeKind
from potok.sampling.math import exp_f32
from potok.sampling.rows import F32, F64, I32

Bool = npt.NDArray[np.bool_]

TILE = 64  # tokens
SEGMENT = 512  # tokens


def rope_table(config: ModelConfig, factors: F64, num_positions: int) -> tuple[F32, F32]:
    """Cosines and sines [num_positions, rope_dim / 2], computed in float64. factors: [rope_dim / 2] divisors."""
    i = np.arange(config.rope_dim // 2, dtype=np.float64)
    frequencies = config.rope_theta ** (-2 * i / config.rope_dim) / factors
    angles = np.arange(num_positions, dtype=np.float64)[:, None] / config.rope_scale * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: F32, cos: F32, sin: F32, kind: RopeKind) -> F32:
    """x: [T, heads, head_dim]; cos, sin: [T, rope_dim / 2]. Elements past rope_dim stay as they are."""
    n = cos.shape[1]
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    if kind is RopeKind.HALVES:
        first, second = slice(0, n), slice(n, 2 * n)
    a, b, c, s = x[..., first], x[..., second], cos[:, None], sin[:, None]
    out = x.copy()
    out[..., first] = a * c - b * s
    out[..., second] = a * s + b * c
    return out


class Stored(NamedTuple):
    """K or V as the cache holds them, on the way in and out: x = levels * scales.

    levels: [..., H_kv, D], exact in float32; scales: [..., H_kv], 1 but for int8.
    """

    levels: F32
    scales: F32


def store(x: F32, dtype: str) -> Stored:
    """x [..., H_kv, D] rounded to f16, f32, or int8 with one scale for each token and head."""
    scales = np.ones(x.shape[:-1], np.float32)
    if dtype == "f16":
        return Stored(x.astype(np.float16).astype(np.float32), scales)
    if dtype == "f32":
        return Stored(x, scales)
    amax = np.abs(x).max(axis=-1)
    inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax > 0)
    return Stored(np.rint(x * inverse[..., None]), amax / np.float32(127))


class Partial(NamedTuple):
    """Softmax-weighted values of some tokens, not yet divided. peak, sum: [R, H]; out: [R, H, D]."""

    peak: F32
    sum: F32
    out: F32

    def of(self, rows: Bool) -> Partial:
        return Partial(self.peak[rows], self.sum[rows], self.out[rows])

    def put(self, rows: Bool, part: Partial) -> None:
        for mine, new in zip(self, part, strict=True):
            mine[rows] = new


def attend(q: F32, positions: I32, k: Stored, v: Stored) -> F32:
    """Rows of one request: q [R, H, D], rotated and scaled, at ascending positions [R] -> [R, H, D].

    k, v: [at least n, H_kv, D] and scales, of its tokens from 0 on. A row sees those up to its own position, n - 1 is
    the last. Head h reads KV head h // (H / H_kv).
    """
    n = positions[-1] + 1
    kv_heads = k.levels.shape[1]
    heads = np.repeat(np.arange(kv_heads), q.shape[1] // kv_heads)
    keys, values = (Stored(x.levels[:n, heads], x.scales[:n, heads]) for x in (k, v))  # [n, H, D] and [n, H]
    total = _nothing(q)
    for begin in range(0, n, SEGMENT):
        part = _nothing(q)
        for start in range(begin, min(begin + SEGMENT, n), TILE):
            rows = positions >= start
            tile = slice(start, start + TILE)
            k_tile, v_tile = (Stored(x.levels[tile], x.scales[tile]) for x in (keys, values))
            seen = positions[rows, None] >= np.arange(start, start + len(k_tile.levels))
            part.put(rows, _visit(part.of(rows), q[rows], k_tile, v_tile, seen))
        rows = positions >= begin
        total.put(rows, _merge(total.of(rows), part.of(rows)))
    return total.out / total.sum[..., None]


def _nothing(q: F32) -> Partial:
    return Partial(np.full(q.shape[:2], -np.inf, np.float32), np.zeros(q.shape[:2], np.float32), np.zeros_like(q))


def _visit(part: Partial, q: F32, k: Stored, v: Stored, seen: Bool) -> Partial:
    """Takes one tile into the partial: k, v [t, H, D] and [t, H], t <= 64.

    seen: [R, t], at least the first token of each row.

    What a row does not see is replaced or left out, never multiplied: it may be NaN.
    """
    num = len(k.levels)
    scores = np.zeros((*q.shape[:2], num), np.float32)
    for d in range(q.shape[2]):
        scores = fma(q[..., d, None], k.levels[..., d].T, scores)
    scores = scores * k.scales.T
    scores = np.where(seen[:, None], scores, np.float32(-np.inf))
    peak = np.maximum(part.peak, scores.max(axis=-1))
    fade = exp_f32(part.peak - peak)
    weights = np.zeros((*q.shape[:2], TILE), np.float32)
    weights[..., :num] = exp_f32(scores - peak[..., None])
    scaled = weights[..., :num] * v.scales.T
    out = part.out * fade[..., None]
    for t in range(num):
        out = np.where(seen[:, t, None, None], fma(scaled[..., t, None], v.levels[t], out), out)
    return Partial(peak, fma(part.sum, fade, sum_lanes(weights)), out)


def _merge(total: Partial, part: Partial) -> Partial:
    """Both softmax partials in one, the earlier tokens first."""
    peak = np.maximum(total.peak, part.peak)
    a, b = exp_f32(total.peak - peak), exp_f32(part.peak - peak)
    out = fma(total.out, a[..., None], part.out * b[..., None])
    return Partial(peak, fma(total.sum, a, part.sum * b), out)
