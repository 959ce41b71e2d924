"""Speed of single kernels on one core, next to what the machine could do, measured in the same run.

    make bench-kernels
    python benchmarks/kernels.py --isa avx2 --only linear --rows 1,4,32 --save

P is float32 fused multiply-adds (MACs) a cycle and W bytes a second streamed from memory on huge pages, both of one
thread, by loops that share no code with the kernels. Times are thread CPU time: of every kernel the best of several
calls of at least 2 ms, taken in turns with all others, so that a disturbance never hits one of them alone.
--save adds the figures to benchmarks/results/kernels.jsonl, with machine and commit.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from potok._native import kernels, supported_isas
from potok.backends.native.weights import PACKED
from potok.bench.bound import Ceilings
from potok.bench.machine import Machine, disturbances
from potok.bench.record import keep
from potok.bench.work import best, measure_ceilings
from potok.model.precision import INTEGER_FORMATS, Activation
from potok.weights.formats import FORMATS, Format
from potok.weights.rewritten import LISTED, REWRITTEN

RESULTS = Path(__file__).parent / "results" / "kernels.jsonl"
CALL_SECONDS = 0.002
ROUNDS = 7

#: A weight that stays in the second cache in every format, and one that no cache holds.
CACHED_ROWS, CACHED_K = 128, 768
STREAMED = "linear, streamed"
STREAMED_DECODE = "attention, decode streamed"
STREAM_K = 2048
STREAM_BYTES = 1 << 27
STREAM_KV_BYTES = 600 << 20

CONTEXT = 512  # tokens
PROMPT_ROWS = 64
LONG_CONTEXT = 8192
SHARING = 32  # requests that hold the same SHARED tokens, and some of their own
SHARED, OWN = 1024, 32
HEAD_DIM = 64
BLOCK_SIZE = 32
#: Element types of K and V: numpy's, the number in csrc/kernels/table.h, bytes of scales for a token and head.
KV_TYPES = {"f16": (np.float16, 0, 0), "f32": (np.float32, 1, 0), "int8": (np.int8, 2, 4)}
VOCAB = 49152

#: What is expected of AVX2 on Zen 3: MAC/cycle, or microseconds at most for a sampled row.
DECODE_GOAL, PROMPT_GOAL, SAMPLE_GOAL_US = 8.0, 10.0, 60.0


@dataclass(frozen=True)
class Case:
    """call(repeat) does the work `repeat` times, after preparations that cost the same for every `repeat`.

    macs, nbytes: of one repetition; bytes count where they come from memory. goal: MAC/cycle, or us where macs is 0.
    """

    kernel: str
    variant: str
    rows: int
    isa: str
    call: Callable[[int], object]
    macs: int
    nbytes: int = 0
    goal: float | None = None


@dataclass(frozen=True)
class Figure:
    kernel: str
    variant: str
    rows: int
    isa: str
    us: float
    macs_per_cycle: float | None
    gb_per_s: float | None
    goal: float | None


@dataclass(frozen=True)
class Result:
    command: str
    date: str
    machine: Machine
    ceilings: Ceilings
    notes: list[str]
    figures: list[Figure]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", help="kernel tables to measure, such as avx2,scalar; the fast ones if left out")
    parser.add_argument("--only", default="", help="only kernels whose name or variant holds this text")
    parser.add_argument("--rows", default="1,4,8,32", help="rows (tokens) of linears")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--save", action="store_true", help=f"add the figures to {RESULTS.name}")
    options = parser.parse_args()
    fast = [isa for isa in supported_isas() if isa != "scalar"]
    isas = options.isa.split(",") if options.isa else fast or supported_isas()
    rows = [int(part) for part in options.rows.split(",")]

    notes = disturbances()
    ceilings = measure_ceilings(1, STREAM_BYTES)
    figures = []
    cases = [c for isa in isas for c in cached_cases(isa, rows) if options.only in f"{c.kernel} {c.variant}"]
    for case, seconds in zip(cases, measure(cases, options.rounds), strict=True):
        figures.append(figure(case, seconds, ceilings.clock_hz))
    for isa in isas:
        for case in streamed_cases(isa, options.only):  # one large weight in memory at a time
            [seconds] = measure([case], options.rounds)
            figures.append(figure(case, seconds, ceilings.clock_hz))
    ceilings = best(ceilings, measure_ceilings(1, STREAM_BYTES))
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = Result(shlex.join(["python", *sys.argv]), date, Machine.read(), ceilings, notes, figures)
    show(result)
    if options.save:
        keep(result, RESULTS)


# --- cases --------------------------------------------------------------------------------------------------------


def cached_cases(isa: str, rows: list[int]) -> Iterator[Case]:
    for format, act in linears():
        for m in rows:
            yield linear_case(isa, format, act, m, CACHED_ROWS, CACHED_K, streamed=False)
    for kv in KV_TYPES:
        for heads, kv_heads in ((9, 3), (32, 8)):
            yield attention_case(isa, kv, heads, kv_heads, 1, DECODE_GOAL if kv == "f16" else None)
            yield attention_case(isa, kv, heads, kv_heads, PROMPT_ROWS, PROMPT_GOAL)
        yield shared_case(isa, kv, 9, 3)
    yield from sampling_cases(isa)


def streamed_cases(isa: str, only: str) -> Iterator[Case]:
    for format, act in linears():
        cheapest = act is not Activation.A16 or INTEGER_FORMATS.get(format.name, 8) > 5
        if cheapest and only in f"{STREAMED} {format.name} {act.name}":
            n = STREAM_BYTES // memory_bytes(format, 1, STREAM_K) // 16 * 16
            yield linear_case(isa, format, act, 1, n, STREAM_K, streamed=True)
    for kv in KV_TYPES:
        if only in f"{STREAMED_DECODE} {kv}":
            yield streamed_decode_case(isa, kv, 9, 3)


def linears() -> Iterator[tuple[Format, Activation]]:
    """Every form of weights, by a format that it holds as it is, with every form of activations that it takes."""
    for format in FORMATS.values():
        if format.name not in PACKED or format.name in REWRITTEN:
            continue
        bits = INTEGER_FORMATS.get(format.name)
        if bits is None:
            yield format, Activation.F32
        else:
            if bits <= 5:
                yield format, Activation.A8
            yield format, Activation.A16
    yield LISTED, Activation.A16


def linear_case(isa: str, format: Format, act: Activation, m: int, n: int, k: int, *, streamed: bool) -> Case:
    rng = np.random.default_rng(abs(format.id))
    linear = kernels.Linear(isa, format.id, int(act), random_weight(rng, format, n, k), k)
    x = rng.standard_normal((m, k), dtype=np.float32)
    out = np.empty((m, n), np.float32)
    return Case(
        STREAMED if streamed else "linear",
        f"{format.name} {act.name}",
        m,
        isa,
        lambda repeat: linear.run(x, out, repeat=repeat),
        macs=m * n * k,
        nbytes=memory_bytes(format, n, k) if streamed else 0,
        goal=None if streamed else linear_goal(format, act, m),
    )


def memory_bytes(format: Format, n: int, k: int) -> int:
    """Of a packed weight [n, k]."""
    return int(n * k * PACKED["MXFP4" if format is LISTED else format.name] / 8)


def linear_goal(format: Format, act: Activation, m: int) -> float | None:
    """For as many rows as a weight in registers serves at once; from 12 on panels are unpacked once for all rows."""
    if m < 4:
        return None
    if format.name == "F32":
        return 13.0
    if format.name in ("F16", "BF16"):
        return 12.0 if m >= 12 else 11.0
    bits = INTEGER_FORMATS.get(format.name, 8)
    if act is Activation.A16 and bits <= 5:
        return 17.0 if m >= 12 else None
    if bits in (2, 8):  # those of 2 bits have twice as many scales as the others with small levels
        return 17.0 if m >= 12 else 14.0
    return 24.0 if bits == 4 else 20.0


def random_weight(rng: np.random.Generator, format: Format, n: int, k: int) -> np.ndarray:
    """uint8 [n, row bytes] whose values are finite."""
    if format.qblock_elements == 1:
        values = rng.standard_normal((min(n, 64), k), dtype=np.float32)
        if format.name == "BF16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        elif format.name == "F16":
            values = values.astype(np.float16)
        raw = values.view(np.uint8)
    else:
        # Bytes below 0x3c leave every half that may be among them below 1.
        raw = rng.integers(0, 0x3C, (min(n, 64), format.nbytes(k)), dtype=np.uint8)
        if format is LISTED:
            raw.reshape(-1, format.qblock_bytes)[:, 16:24] = np.ones(2, np.float32).view(np.uint8)
    return np.tile(raw, (-(-n // len(raw)), 1))[:n]


class KvMemory:
    """K and V of one layer, in blocks. kv: uint8 [num_blocks, bytes]; values of no interest, but no subnormal ones."""

    def __init__(self, kv_type: str, kv_heads: int, num_blocks: int) -> None:
        dtype, self.number, scale_bytes = KV_TYPES[kv_type]
        self.kv_heads = kv_heads
        rng = np.random.default_rng(kv_heads)
        few = min(num_blocks, 64)
        values = rng.standard_normal((few, kv_heads, 2 * BLOCK_SIZE * HEAD_DIM), dtype=np.float32)
        values = (values * (40 if kv_type == "int8" else 1)).astype(dtype)
        scales = np.full((few, kv_heads, 2 * BLOCK_SIZE * scale_bytes // 4), 1 / 40, np.float32)
        blocks = np.concatenate([values.view(np.uint8), scales.view(np.uint8)], axis=2).reshape(few, -1)
        self.kv = np.tile(blocks, (-(-num_blocks // few), 1))[:num_blocks]
        self.order = rng.permutation(num_blocks).astype(np.int32)

    def attention(self, isa: str, heads: int, rows: list[int], tables: list[np.ndarray]) -> Callable[[int], object]:
        """The last `rows` tokens of each context, which its table covers exactly."""
        q = np.random.default_rng(0).standard_normal((sum(rows), heads * HEAD_DIM), dtype=np.float32) / 8
        out = np.empty_like(q)
        ends = [BLOCK_SIZE * len(table) for table in tables]
        positions = np.concatenate([np.arange(end - n, end) for n, end in zip(rows, ends, strict=True)])
        indptr = [np.cumsum([0, *sizes]).astype(np.int32) for sizes in (rows, map(len, tables))]
        step = indptr[0], positions.astype(np.int32), indptr[1], np.concatenate(tables)
        sizes = self.kv_heads, HEAD_DIM, BLOCK_SIZE
        return lambda repeat: kernels.attention(isa, q, self.kv, *step, *sizes, out, self.number, repeat=repeat)


def attention_case(isa: str, kv_type: str, heads: int, kv_heads: int, rows: int, goal: float | None) -> Case:
    """The last `rows` rows of a context, its blocks in random places."""
    memory = KvMemory(kv_type, kv_heads, CONTEXT // BLOCK_SIZE)
    pairs = sum(range(CONTEXT - rows + 1, CONTEXT + 1))
    name = "attention, decode" if rows == 1 else "attention, prompt"
    call = memory.attention(isa, heads, [rows], [memory.order])
    return Case(
        name, f"{kv_type} KV, {heads}/{kv_heads} heads", rows, isa, call, 2 * heads * HEAD_DIM * pairs, goal=goal
    )


def shared_case(isa: str, kv_type: str, heads: int, kv_heads: int) -> Case:
    """Requests that decode after a common prefix in the same blocks."""
    common, own = SHARED // BLOCK_SIZE, OWN // BLOCK_SIZE
    memory = KvMemory(kv_type, kv_heads, common + SHARING * own)
    private = memory.order[common:].reshape(SHARING, own)
    tables = [np.concatenate([memory.order[:common], blocks]) for blocks in private]
    call = memory.attention(isa, heads, [1] * SHARING, tables)
    macs = 2 * heads * HEAD_DIM * SHARING * (SHARED + OWN)
    return Case(f"attention, {SHARED} shared", f"{kv_type} KV, {heads}/{kv_heads} heads", SHARING, isa, call, macs)


def streamed_decode_case(isa: str, kv_type: str, heads: int, kv_heads: int) -> Case:
    """Requests at a long context each, whose blocks no cache holds."""
    count = LONG_CONTEXT // BLOCK_SIZE
    dtype, _, scale_bytes = KV_TYPES[kv_type]
    token_bytes = 2 * kv_heads * (HEAD_DIM * np.dtype(dtype).itemsize + scale_bytes)
    requests = STREAM_KV_BYTES // (token_bytes * LONG_CONTEXT)
    memory = KvMemory(kv_type, kv_heads, requests * count)
    call = memory.attention(isa, heads, [1] * requests, list(memory.order.reshape(requests, count)))
    return Case(
        STREAMED_DECODE,
        f"{kv_type} KV, {heads}/{kv_heads} heads, {LONG_CONTEXT} tokens",
        requests,
        isa,
        call,
        macs=2 * heads * HEAD_DIM * requests * LONG_CONTEXT,
        nbytes=requests * LONG_CONTEXT * token_bytes,
    )


def sampling_cases(isa: str) -> Iterator[Case]:
    logits = np.random.default_rng(0).standard_normal(VOCAB, dtype=np.float32) * 3
    ids, values = np.empty(0, np.int32), np.empty(0, np.float32)
    settings = {
        "greedy": (0.0, 0, 1.0),
        "temperature": (1.0, 0, 1.0),
        "top-k 40, top-p 0.95": (1.0, 40, 0.95),
        "top-p 0.95": (1.0, 0, 0.95),
    }
    for name, (temperature, top_k, top_p) in settings.items():

        def call(repeat: int, temperature: float = temperature, top_k: int = top_k, top_p: float = top_p) -> None:
            fixed = (0.0, 1, 0, 5, 0.0, 0.0, 1.0, ids, ids, ids, values, -1, False)
            kernels.sample_row(isa, logits, temperature, top_k, top_p, *fixed, repeat=repeat)

        yield Case("sample row", f"{name}, {VOCAB} ids", 1, isa, call, macs=0, goal=SAMPLE_GOAL_US)


# --- measuring ----------------------------------------------------------------------------------------------------


def measure(cases: list[Case], rounds: int) -> list[float]:
    """Seconds of one repetition of each case."""
    repeats = [enough_repeats(case) for case in cases]
    prepared, worked = [float("inf")] * len(cases), [float("inf")] * len(cases)
    for _ in range(rounds):
        for i, case in enumerate(cases):
            prepared[i] = min(prepared[i], cpu_seconds(case, 0))
            worked[i] = min(worked[i], cpu_seconds(case, repeats[i]))
    return [(w - p) / n for w, p, n in zip(worked, prepared, repeats, strict=True)]


def enough_repeats(case: Case) -> int:
    repeats = 1
    while cpu_seconds(case, repeats) - cpu_seconds(case, 0) < CALL_SECONDS:
        repeats *= 2
    return repeats


def cpu_seconds(case: Case, repeat: int) -> float:
    started = time.thread_time_ns()
    case.call(repeat)
    return (time.thread_time_ns() - started) / 1e9


def figure(case: Case, seconds: float, clock: float) -> Figure:
    return Figure(
        case.kernel,
        case.variant,
        case.rows,
        case.isa,
        us=1e6 * seconds,
        macs_per_cycle=case.macs / seconds / clock if case.macs else None,
        gb_per_s=case.nbytes / seconds / 1e9 if case.nbytes else None,
        goal=case.goal,
    )


# --- showing ------------------------------------------------------------------------------------------------------


def show(result: Result) -> None:
    c = result.ceilings
    p, wide, w = c.macs_per_s / c.clock_hz, c.wide_macs_per_s / c.clock_hz, c.bytes_per_s / 1e9
    view = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("kernel", "variant", "M", "table", "us", "MAC/cycle", "of P", "GB/s", "of W", "goal"):
        view.add_column(heading, justify="left" if heading in ("kernel", "variant", "table") else "right", no_wrap=True)
    for f in result.figures:
        rate = f.macs_per_cycle
        view.add_row(
            *(f.kernel, f.variant, f"{f.rows}", f.isa, f"{f.us:.1f}" if f.us < 1000 else f"{f.us:.0f}"),
            *("", "") if rate is None else (f"{rate:.1f}", f"{100 * rate / p:.0f} %"),
            *("", "") if f.gb_per_s is None else (f"{f.gb_per_s:.1f}", f"{100 * f.gb_per_s / w:.0f} %"),
            goal(f),
        )
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    out.print(view)
    out.print(
        f"One thread at {c.clock_hz / 1e9:.2f} GHz. P {p:.1f} MAC/cycle ({wide:.1f} with the widest vectors), "
        f"W {w:.1f} GB/s over {c.stream_bytes / 2**20:.0f} MiB."
    )
    out.print(
        f"Linears in cache: {CACHED_ROWS} x {CACHED_K}; GB/s in bytes of memory. "
        "Goals: of AVX2 on Zen 3, MAC/cycle or us; ! is missed."
    )
    for line in (f"{result.date}  {result.machine.line()}", *result.notes):
        out.print(line, soft_wrap=True)


def goal(f: Figure) -> str:
    if f.goal is None:
        return ""
    missed = f.us > f.goal if f.macs_per_cycle is None else f.macs_per_cycle < f.goal
    return f"{f.goal:g}{' !' if missed else '  '}"


if __name__ == "__main__":
    main()
