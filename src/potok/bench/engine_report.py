"""Shows what `potok bench engine` measured to a person."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from potok.bench.bound import FACTOR_KV
from potok.bench.engine import EngineBenchResult
from potok.bench.steps import Rate

HEADINGS = ("\nrequests", "decode\ntok/s", "\nbound", "of\nbound", "\nPython", "overall\ntok/s", "of\nbound")


def table(result: EngineBenchResult) -> Table:
    """One row a load, then prompts alone: the whole, and the end where that is a part."""
    options = result.options
    view = Table(
        title=f"{result.model}: {options.prompt_tokens} tokens in, {options.output_tokens} out",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for heading in HEADINGS:
        view.add_column(heading, justify="right", no_wrap=True)
    for load in result.loads:
        rows = f"{load.requests}" if load.rows == load.requests else f"{load.requests} ({load.rows} a step)"
        view.add_row(rows, *_cells(load.decode), f"{load.overall.tokens_per_s:.1f}", _percent(load.overall.of_bound))
    view.add_section()
    view.add_row(f"prompt of {options.long_prompt_tokens}", *_cells(result.prompt), "", "")
    if result.prompt_end_tokens < options.long_prompt_tokens:
        view.add_row(f"its last {result.prompt_end_tokens}", *_cells(result.prompt_end), "", "")
    return view


def footer(result: EngineBenchResult) -> list[str]:
    """What the figures mean and what they were measured with."""
    ceilings, work, f = result.ceilings, result.work, result.factors
    small_pages = ceilings.small_pages_bytes_per_s / 1e9
    megabytes = (work.layers.nbytes + work.head.nbytes) / 1e6
    return [
        "decode: while nothing but decoding happens; overall: prompts included. Python: time outside the backend.",
        f"machine: {ceilings.threads} threads, {ceilings.clock_hz / 1e9:.2f} GHz; P {ceilings.macs_per_s / 1e9:.1f} "
        f"GMAC/s ({ceilings.wide_macs_per_s / 1e9:.1f} with the widest vectors), W {ceilings.bytes_per_s / 1e9:.1f} "
        f"GB/s over {ceilings.stream_bytes / 1e6:.0f} MB ({small_pages:.1f} on 4 KiB pages).",
        f"bound: the best kernels known of {result.isa}, {f.bits4:.2f} P for weights of 4 and 5 bits, {f.bits8:.2f} P "
        f"for 6 and 8, {f.floats:.2f} P for floats, {f.prompt_attention:.2f} P for the attention of prompts, with P = "
        f"{ceilings.p(f) / 1e9:.1f}; KV at {FACTOR_KV} W.",
        f"model: weights {megabytes:.0f} MB, {work.kv_bytes} bytes of KV a token.",
        f"{result.date}  {result.machine.line()}; {result.isa}, at most {result.max_num_batched_tokens} tokens a step",
        result.command,
        *result.notes,
    ]


def _cells(rate: Rate) -> tuple[str, str, str, str]:
    return (
        f"{rate.tokens_per_s:.1f}",
        f"{rate.bound:.1f}",
        _percent(rate.of_bound),
        f"{100 * rate.python:.1f} %",
    )


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"
