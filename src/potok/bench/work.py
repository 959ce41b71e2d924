"""What the bound needs to know of a model, a step and the machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from potok._native import ceiling
from potok.backends.api import StepInputs
from potok.bench.bound import Ceilings, Linears, ModelWork, StepWork
from potok.model.config import ModelConfig
from potok.model.families import FAMILIES
from potok.model.plan import Node, Op
from potok.weights.gguf import GGUFFile

FLOATS = ("F32", "F16", "BF16")
SIX_OR_EIGHT_BITS = ("Q6_K", "Q8_0", "Q8_1")


def model_work(file: GGUFFile, config: ModelConfig, kv_bytes: int) -> ModelWork:
    """Counted in the formats of the file, whatever a backend makes of them. kv_bytes: K and V of one token."""
    linears = [node for node in FAMILIES[config.architecture](config).nodes if node.op is Op.LINEAR]
    return ModelWork(
        layers=_linears(file, linears[:-1]),
        head=_linears(file, linears[-1:]),
        kv_bytes=kv_bytes,
        attention_macs=2 * config.num_layers * config.num_heads * config.head_dim,
    )


def _linears(file: GGUFFile, nodes: list[Node]) -> Linears:
    nbytes, macs = 0, {"4bit": 0, "8bit": 0, "float": 0}
    for name in (name for node in nodes for name in node.weights):
        tensor = file.tensors[name]
        nbytes += tensor.data.nbytes
        macs[_kind(tensor.type.name)] += int(np.prod(tensor.shape))
    return Linears(nbytes, macs["4bit"], macs["8bit"], macs["float"])


def _kind(format_name: str) -> str:
    """Formats of 2 and 3 bits count as 4: they have no faster kernel."""
    if format_name in FLOATS:
        return "float"
    return "8bit" if format_name in SIX_OR_EIGHT_BITS else "4bit"


def step_work(inputs: StepInputs) -> StepWork:
    lengths = np.diff(inputs.q_indptr)
    alone = np.repeat(lengths == 1, lengths)
    contexts = inputs.positions.astype(np.int64) + 1
    return StepWork(
        rows=len(inputs.positions),
        sampled=len(inputs.out_rows),
        decode_context=int(contexts[alone].sum()),
        prompt_context=int(contexts[~alone].sum()),
    )


def measure_ceilings(threads: int, stream_bytes: int) -> Ceilings:
    """Takes a second or two. stream_bytes: read again and again, as the weights of a model are."""
    widths = ceiling.fma_widths()
    return Ceilings(
        threads=threads,
        macs_per_s=ceiling.fma_macs_per_second(threads, "avx2" if "avx2" in widths else widths[-1]),
        bytes_per_s=ceiling.stream_bytes_per_second(threads, stream_bytes),
        small_pages_bytes_per_s=ceiling.stream_bytes_per_second(threads, stream_bytes, huge_pages=False),
        stream_bytes=stream_bytes,
        wide_macs_per_s=ceiling.fma_macs_per_second(threads, widths[-1]),
        clock_hz=ceiling.clock_hz(),
    )


def best(a: Ceilings, b: Ceilings) -> Ceilings:
    """Of two measurements on the same machine: whatever disturbs one makes it lower."""
    return _of_both(a, b, max)


def mean(a: Ceilings, b: Ceilings) -> Ceilings:
    """Of the machine as it was at two times, with whatever disturbed it."""
    return _of_both(a, b, lambda x, y: (x + y) / 2)


def _of_both(a: Ceilings, b: Ceilings, of: Callable[[float, float], float]) -> Ceilings:
    return Ceilings(
        threads=a.threads,
        macs_per_s=of(a.macs_per_s, b.macs_per_s),
        bytes_per_s=of(a.bytes_per_s, b.bytes_per_s),
        small_pages_bytes_per_s=of(a.small_pages_bytes_per_s, b.small_pages_bytes_per_s),
        stream_bytes=a.stream_bytes,
        wide_macs_per_s=of(a.wide_macs_per_s, b.wide_macs_per_s),
        clock_hz=of(a.clock_hz, b.clock_hz),
    )
