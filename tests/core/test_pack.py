"""A batch becomes arrays: read back, they say the same."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from potok.backends.inputs import pack
from potok.core.batch import Batch, Segment


def test_arrays_say_what_the_segments_say() -> None:
    rng = random.Random(0)
    for _ in range(50):
        size = rng.choice([1, 4, 32])
        segments = []
        for id in range(rng.randint(0, 8)):
            start, n = rng.randint(0, 90), rng.choice([1, 1, rng.randint(2, 40)])
            blocks = [rng.randrange(1000) for _ in range(-(-(start + n) // size) + rng.choice([0, 0, 2]))]
            kind = rng.choice([tuple, list, lambda values: array("i", values)])
            tokens = kind([rng.randrange(50000) for _ in range(n)])
            segments.append(Segment(id, start, tokens, kind(blocks), rng.random() < 0.7))
        x = pack(Batch(1, tuple(segments)), size)
        fields = (x.tokens, x.positions, x.q_indptr, x.kv_indptr, x.kv_blocks, x.out_rows, x.copies)
        assert all(field.dtype == np.int32 for field in fields)
        assert len(x.tokens) == len(x.positions) == x.q_indptr[-1] == sum(len(s.tokens) for s in segments)
        assert len(x.q_indptr) == len(x.kv_indptr) == len(segments) + 1
        for i, s in enumerate(segments):
            rows = slice(x.q_indptr[i], x.q_indptr[i + 1])
            assert x.tokens[rows].tolist() == list(s.tokens)
            assert x.positions[rows].tolist() == list(range(s.start, s.start + len(s.tokens)))
            table = x.kv_blocks[x.kv_indptr[i] : x.kv_indptr[i + 1]].tolist()
            assert table == list(s.blocks)[: len(table)] and len(table) == -(-(s.start + len(s.tokens)) // size)
        assert x.out_rows.tolist() == [x.q_indptr[i + 1] - 1 for i, s in enumerate(segments) if s.sample]


def test_table_that_does_not_cover_the_segment_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="2 blocks of 4 do not cover 9 tokens"):
        pack(Batch(1, (Segment(0, 8, (5,), (0, 1), True),)), 4)
