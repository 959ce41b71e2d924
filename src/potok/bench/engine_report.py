"""Shows what `potok bench engine` measured to a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from potok.bench.bound import FACTOR_KV, Ceilings, Factors, ModelWork
from potok.bench.engine import EngineBenchResult, LoadFigures
from potok.bench.steps import Rate
from potok.bench.tables import percent, sheet

HEADINGS = (
    *("\nrequests", "decode\ntok/s", "\nbound", "of\nbound", "\nPython", "overall\ntok/s", "of\nbound"),
    *("P\nG/s", "W\nGB/s"),
)


def table(result: EngineBenchResult) -> Table:
    """One row a load, then prompts alone: the whole, and the end where that is a part."""
    options = result.options
    title = f"{result.model}: {options.prompt_tokens} tokens in, {options.output_tokens} out"
    view = sheet(title, *HEADINGS, between=1)
    for load in result.loads:
        rows = f"{load.requests}" if load.rows == load.requests else f"{load.requests} ({load.rows} a step)"
        overall = f"{load.overall.tokens_per_s:.1f}", percent(load.overall.of_bound)
        view.add_row(rows, *_cells(load.decode), *overall, *_machine(load.ceilings, result.factors))
    view.add_section()
    machine = _machine(result.prompt_ceilings, result.factors)
    view.add_row(f"prompt of {options.long_prompt_tokens}", *_cells(result.prompt), "", "", *machine)
    if result.prompt_end_tokens < options.long_prompt_tokens:
        view.add_row(f"its last {result.prompt_end_tokens}", *_cells(result.prompt_end), "", "", *machine)
    return view


def footer(result: EngineBenchResult) -> list[str]:
    """What the figures mean and what they were measured with."""
    return [
        "decode: while nothing but decoding happens; overall: prompts included. Python: time outside native code.",
        f"{result.options.rounds} rounds, the median of their parts of the bound. P: multiply-adds, W: reading as many "
        "bytes as such a step; both of the machine just before and after the round.",
        *(f"rounds of {load.requests}: {_percents(rounds)}" for load, rounds in _rounds(result)),
        *factor_lines(result.factors, result.work, result.isa),
        f"{result.date}  {result.machine.line()}; {result.isa}, at most {result.max_num_batched_tokens} tokens a step",
        result.command,
        *result.notes,
    ]


def bound_lines(ceilings: Ceilings, factors: Factors, work: ModelWork, isa: str) -> list[str]:
    """What a bound was made of."""
    small_pages = ceilings.small_pages_bytes_per_s / 1e9
    return [
        f"machine: {ceilings.threads} threads, {ceilings.clock_hz / 1e9:.2f} GHz; P {ceilings.macs_per_s / 1e9:.1f} "
        f"GMAC/s ({ceilings.wide_macs_per_s / 1e9:.1f} with the widest vectors), W {ceilings.bytes_per_s / 1e9:.1f} "
        f"GB/s over {ceilings.stream_bytes / 1e6:.0f} MB ({small_pages:.1f} on 4 KiB pages).",
        *factor_lines(factors, work, isa),
    ]


def factor_lines(f: Factors, work: ModelWork, isa: str) -> list[str]:
    vectors = "the widest vectors" if f.wide else "the vectors of AVX2"
    return [
        f"bound: the best kernels known of {isa}, {f.bits4:.2f} P for weights of 4 and 5 bits, {f.bits8:.2f} P "
        f"for 6 and 8, {f.floats:.2f} P for floats, {f.prompt_attention:.2f} P for the attention of prompts, with P of "
        f"{vectors}; KV at {FACTOR_KV} W.",
        f"model: weights {work.nbytes / 1e6:.0f} MB, {work.kv_bytes} bytes of KV a token.",
    ]


def _rounds(result: EngineBenchResult) -> list[tuple[LoadFigures, list[float]]]:
    return list(zip(result.loads, result.of_rounds, strict=True)) if result.options.rounds > 1 else []


def _percents(parts: Sequence[float]) -> str:
    return ", ".join(percent(part) for part in parts)


def _machine(ceilings: Ceilings, factors: Factors) -> tuple[str, str]:
    return f"{ceilings.p(factors) / 1e9:.0f}", f"{ceilings.bytes_per_s / 1e9:.0f}"


def _cells(rate: Rate) -> tuple[str, str, str, str]:
    return (
        f"{rate.tokens_per_s:.1f}",
        f"{rate.bound:.1f}",
        percent(rate.of_bound),
        f"{100 * rate.python:.1f} %",
    )
