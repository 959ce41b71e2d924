"""Shows what `potok bench engine` measured to a person."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from potok.bench.engine import EngineBenchResult, Rate

HEADINGS = ("\nrequests", "decode\ntok/s", "\nbound", "of\nbound", "\nPython", "overall\ntok/s", "of\nbound")


def table(result: EngineBenchResult) -> Table:
    """One row a load, then one for prompts alone."""
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
    return view


def footer(result: EngineBenchResult) -> list[str]:
    """What the figures mean and what they were measured with."""
    ceilings, work = result.ceilings, result.work
    wide = f" ({ceilings.wide_macs_per_s / 1e9:.1f} with wider vectors)" if _is_wide(result) else ""
    megabytes = (work.layers.nbytes + work.head.nbytes) / 1e6
    return [
        "decode: while nothing but decoding happens; overall: prompts included. Python: time outside the backend.",
        f"bound: P {ceilings.macs_per_s / 1e9:.1f} GMAC/s{wide}, W {ceilings.bytes_per_s / 1e9:.1f} GB/s over "
        f"{ceilings.stream_bytes / 1e6:.0f} MB, {ceilings.threads} threads, {ceilings.clock_hz / 1e9:.2f} GHz; "
        f"weights {megabytes:.0f} MB, {work.kv_bytes} bytes of KV a token.",
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


def _is_wide(result: EngineBenchResult) -> bool:
    return result.ceilings.wide_macs_per_s > 1.3 * result.ceilings.macs_per_s
