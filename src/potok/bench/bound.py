"""The least time that a step can take, given what the machine can do. Pure arithmetic.

Of the machine two measures are taken, with all threads, by loops that share no code with the kernels:
P, float32 fused multiply-adds (MACs) a second, and W, bytes a second streamed from memory on huge pages.
A step of M rows at context ctx takes at least

    max(weight_bytes / W,  M * (N4 / (1.77 P) + N8 / (1.15 P) + Nf / P))  +  M * ctx * kv_bytes / (0.72 W)

where N4, N8 and Nf are the MACs that a row needs in weights of 4 or 5 bits, of 6 or 8 bits, and in floats. The output
projection counts only for the rows that are sampled. Rows of a prompt share what they read of K and V; their attention
is arithmetic, at 0.75 P.

1.77, 1.15, 0.75 and 0.72 are the best kernels measured so far, on AVX2, as parts of P and W. They are no law: the
ports of the machine would allow 3.0 and 1.5. A kernel that beats its factor raises it here.
"""

from __future__ import annotations

from dataclasses import dataclass

FACTOR_4BIT = 1.77
FACTOR_8BIT = 1.15
FACTOR_FLOAT = 1.0
FACTOR_PROMPT_ATTENTION = 0.75
FACTOR_KV = 0.72


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine gives. macs_per_s: P, with the vectors of AVX2 where there are any. bytes_per_s: W.

    wide_macs_per_s: as P, with the widest vectors of this CPU; for the record, the bound does not use it.
    stream_bytes: memory that W was read from. clock_hz: of one busy core.
    """

    threads: int
    macs_per_s: float
    bytes_per_s: float
    stream_bytes: int
    wide_macs_per_s: float
    clock_hz: float


@dataclass(frozen=True, slots=True)
class Linears:
    """Matrices of a model: their bytes, and the MACs that one row needs in each kind of weight."""

    nbytes: int = 0
    macs_4bit: int = 0
    macs_8bit: int = 0
    macs_float: int = 0

    def seconds(self, rows: int, macs_per_s: float) -> float:
        """Of arithmetic for so many rows."""
        macs = self.macs_4bit / FACTOR_4BIT + self.macs_8bit / FACTOR_8BIT + self.macs_float / FACTOR_FLOAT
        return rows * macs / macs_per_s


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a model asks of a machine.

    layers: for every row. head: the output projection, for sampled rows. kv_bytes: K and V of one token, all layers.
    attention_macs: of one row for each token of its context, all layers.
    """

    layers: Linears
    head: Linears
    kv_bytes: int
    attention_macs: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes. rows: tokens. sampled: rows whose logits are wanted.

    decode_context: tokens of context that rows alone in their segment attend to, summed over those rows.
    prompt_context: the same of all other rows.
    """

    rows: int
    sampled: int
    decode_context: int
    prompt_context: int = 0


def step_seconds(model: ModelWork, machine: Ceilings, step: StepWork) -> float:
    """The bound of one step."""
    p, w = machine.macs_per_s, machine.bytes_per_s
    weight_bytes = model.layers.nbytes + (model.head.nbytes if step.sampled else 0)
    arithmetic = model.layers.seconds(step.rows, p) + model.head.seconds(step.sampled, p)
    decode_attention = step.decode_context * model.kv_bytes / (FACTOR_KV * w)
    prompt_attention = step.prompt_context * model.attention_macs / (FACTOR_PROMPT_ATTENTION * p)
    return max(weight_bytes / w, arithmetic) + decode_attention + prompt_attention
