"""The least time that a step can take, given what the machine can do. Pure arithmetic.

Of the machine two measures are taken, with all threads, by loops that share no code with the kernels:
P, float32 fused multiply-adds (MACs) a second, and W, bytes a second streamed from memory on huge pages.
A step of M rows at context ctx takes at least

    max(weight_bytes / W,  M * (N4 / (f4 P) + N8 / (f8 P) + Nf / (ff P)))  +  M * ctx * kv_bytes / (0.72 W)

where N4, N8 and Nf are the MACs that a row needs in weights of 4 or 5 bits, of 6 or 8 bits, and in floats. The output
projection counts only for the rows that are sampled. Rows of a prompt share what they read of K and V; their attention
is arithmetic, at fa P.

f4, f8, ff and fa belong to the table of kernels that is in use, as does the P that they are parts of: FACTORS. They and
0.72 are the best kernels measured so far, in cache. They are no law: the ports of the machine would allow more. A
kernel that beats its factor raises it here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Factors:
    """The best kernels of one table, as parts of P.

    wide: of P with the widest vectors of the CPU, else of P with those of AVX2. bits4: weights of 4 or 5 bits, also
    where their activations have 16. bits8: of 6 or 8 bits.
    """

    wide: bool
    bits4: float
    bits8: float
    floats: float
    prompt_attention: float


#: By name of the table. MAC/cycle of one core: AVX2 has P = 16, AVX-512 has 32.
FACTORS = {
    "avx2": Factors(wide=False, bits4=1.77, bits8=1.15, floats=1.0, prompt_attention=0.75),
    "avxvnni": Factors(wide=False, bits4=2.2, bits8=1.4, floats=1.0, prompt_attention=0.75),
    "avx512vnni": Factors(wide=True, bits4=1.96, bits8=1.35, floats=1.0, prompt_attention=0.75),
    "amx": Factors(wide=True, bits4=2.70, bits8=1.35, floats=1.0, prompt_attention=0.75),
}

FACTOR_KV = 0.72


def factors_of(isa: str) -> Factors:
    """Tables that nobody has tuned are held against AVX2's."""
    return FACTORS.get(isa, FACTORS["avx2"])


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine gives. macs_per_s: P, with the vectors of AVX2 where there are any. bytes_per_s: W.

    wide_macs_per_s: as P, with the widest vectors of this CPU.
    small_pages_bytes_per_s: as W, from pages of 4 KiB; for the record. stream_bytes: memory that W was read from.
    clock_hz: of one busy core.
    """

    threads: int
    macs_per_s: float
    bytes_per_s: float
    small_pages_bytes_per_s: float
    stream_bytes: int
    wide_macs_per_s: float
    clock_hz: float

    def p(self, factors: Factors) -> float:
        """The P that these factors are parts of."""
        return self.wide_macs_per_s if factors.wide else self.macs_per_s


@dataclass(frozen=True, slots=True)
class Linears:
    """Matrices of a model: their bytes, and the MACs that one row needs in each kind of weight."""

    nbytes: int = 0
    macs_4bit: int = 0
    macs_8bit: int = 0
    macs_float: int = 0

    def seconds(self, rows: int, macs_per_s: float, factors: Factors) -> float:
        """Of arithmetic for so many rows."""
        macs = self.macs_4bit / factors.bits4 + self.macs_8bit / factors.bits8 + self.macs_float / factors.floats
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

    @property
    def nbytes(self) -> int:
        """Of all weights."""
        return self.layers.nbytes + self.head.nbytes


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


def step_seconds(model: ModelWork, machine: Ceilings, factors: Factors, step: StepWork) -> float:
    """The bound of one step."""
    p, w = machine.p(factors), machine.bytes_per_s
    weight_bytes = model.layers.nbytes + (model.head.nbytes if step.sampled else 0)
    arithmetic = model.layers.seconds(step.rows, p, factors) + model.head.seconds(step.sampled, p, factors)
    decode_attention = step.decode_context * model.kv_bytes / (FACTOR_KV * w)
    prompt_attention = step.prompt_context * model.attention_macs / (factors.prompt_attention * p)
    return max(weight_bytes / w, arithmetic) + decode_attention + prompt_attention
