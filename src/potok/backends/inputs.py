"""From a batch of segments to the arrays of one step."""

from __future__ import annotations

from array import array

from potok.backends.api import StepInputs
from potok.core.batch import Batch

NO_COPIES = array("i")


def pack(batch: Batch, block_size: int) -> StepInputs:
    """The step's arrays, segments in the batch's order. block_size: tokens; tables are cut to what a segment covers.

    Built in array.array, which appends a request's tokens and blocks as one copy of memory each.
    """
    tokens, positions, kv_blocks = array("i"), array("i"), array("i")
    q_indptr, kv_indptr, out_rows = array("i", (0,)), array("i", (0,)), array("i")
    for _, start, ids, blocks, sample, rate in batch.segments:
        end = start + len(ids)
        if rate:
            out_rows.extend(range(len(tokens) + rate.start - start, len(tokens) + rate.stop - start))
        tokens.extend(ids)
        if end - start == 1:
            positions.append(start)
        else:
            positions.extend(range(start, end))
        num_blocks = -(-end // block_size)
        assert len(blocks) >= num_blocks, f"{len(blocks)} blocks of {block_size} do not cover {end} tokens"
        kv_blocks.extend(blocks if len(blocks) == num_blocks else blocks[:num_blocks])
        q_indptr.append(len(tokens))
        kv_indptr.append(len(kv_blocks))
        if sample:
            out_rows.append(len(tokens) - 1)
    copies = array("i", [block for copy in batch.copies for block in copy]) if batch.copies else NO_COPIES
    return StepInputs(tokens, positions, q_indptr, kv_indptr, kv_blocks, out_rows, copies)
