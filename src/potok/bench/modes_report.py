"""Shows what `potok bench modes` measured to a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from potok.bench.cells import Cell, find
from potok.bench.crowd import SEATS, TENANT_REQUESTS, FairFigures, LongPromptFigures
from potok.bench.engine_report import bound_lines
from potok.bench.modes import HEAVY, ModesBenchOptions, ModesBenchResult
from potok.bench.prefix_loads import MIX, MIXED_PROMPT
from potok.bench.tables import milliseconds, percent, sheet
from potok.config import CONTINUOUS, OFF, STATIC

#: Within 80 columns.
CELL_HEADINGS = (
    *("\nclients", "\nbatching", "\nsent", "output\ntok/s", "\nbound", "of\nit", "mean\ns", "p99\ns"),
    *("dead\nrows", "of\noff", "of\nstatic"),
)
#: How much longer than its part of each step allows a prompt may take with a target, and 99 % of gaps beyond it.
GOAL_OF_PART, GOAL_OF_GAP = 1.25, 1.25
#: How much longer than at best a tenant with one request may wait.
GOAL_FAIR = 1.5


def tables(result: ModesBenchResult) -> list[Table]:
    """One for each part that was measured."""
    made = []
    for part in ("clients", "mixed", "prompt_heavy"):
        cells = [c for c in result.cells if c.part == part]
        if cells:
            made.append(_cells(f"{result.model}: {_lengths(part, result.options)}", cells))
    if result.long_prompt:
        made.append(_long_prompt(result.options, result.long_prompt))
    if result.fair:
        made.append(_fair(result.fair))
    return made


def footer(result: ModesBenchResult) -> list[str]:
    """What the figures mean and what they were measured with."""
    o, lines = result.options, []
    if result.cells:
        lines += [
            *(line for c in result.cells if (line := _gain(c, result.cells))),
            "Members of a static or dynamic batch that have ended are computed on as padding until all have; unpadded: "
            "static batches that leave them out. Answers of a batch are complete together.",
            f"Batches have at most {o.batch_size} members, dynamic ones are gathered for up to {o.max_wait_ms:g} ms, "
            f"continuous batching runs at most {result.max_num_seqs} requests at once, and with batching off at most "
            f"{o.requests_off} requests were sent.",
            "Seconds are those of complete answers. bound: tokens a second that the machine allows in the very steps "
            "that the mode took; dead rows: of their rows, those of members that had ended.",
            f"Answers are the same in every mode: {result.same_answers} requests were compared.",
            *bound_lines(result.ceilings, result.factors, result.work, result.isa),
        ]
    if result.long_prompt:
        lines.append(
            "Gaps are those of the streams while the prompt is computed. Where a target T leaves the prompt T - t of "
            "each step, t being a gap without it, it may take T / (T - t) times as long as without a target: of part "
            f"is its time in that. Goals: 99 % of gaps within {GOAL_OF_GAP:g} T, and at most {GOAL_OF_PART:g}x of part."
        )
    if result.fair:
        lines.append("Times in ms of one answer, the median of the rounds; at best: a seat is free and nobody waits.")
    return [
        *lines,
        f"{result.date}  {result.machine.line()}; {result.isa}, {result.threads} threads, at most "
        f"{result.max_num_batched_tokens} tokens a step",
        result.command,
        *result.notes,
    ]


def _lengths(part: str, options: ModesBenchOptions) -> str:
    if part == "clients":
        return f"{options.prompt_tokens} tokens in, {options.output_tokens} out"
    if part == "prompt_heavy":
        return f"{HEAVY.prompt} tokens in, {HEAVY.output} out"
    mixed = ", ".join(f"{low} to {high} ({share} %)" for low, high, share in MIX)
    return f"{MIXED_PROMPT[0]} to {MIXED_PROMPT[1]} tokens in, {mixed} out"


def _cells(title: str, cells: Sequence[Cell]) -> Table:
    view = sheet(title, *CELL_HEADINGS, between=0)
    view.columns[1].justify = "left"
    before = cells[0].clients
    for c in cells:
        if c.clients != before:
            view.add_section()
            before = c.clients
        view.add_row(
            f"{c.clients}",
            c.mode,
            f"{c.requests}",
            f"{c.tokens_per_s:.0f}",
            f"{c.bound:.0f}",
            percent(c.of_bound),
            f"{c.latency.mean / 1000:.2f}",
            f"{c.latency.p99 / 1000:.2f}",
            percent(c.dead) if c.padding_rows else "",
            *(_ratio(c, find(cells, c, mode)) for mode in (OFF, STATIC)),
        )
    return view


def _ratio(cell: Cell, base: Cell | None) -> str:
    return "" if base is None or base is cell else f"{cell.tokens_per_s / base.tokens_per_s:.2f}x"


def _gain(cell: Cell, cells: Sequence[Cell]) -> str:
    """A sentence for continuous batching where finished members were computed on; else nothing."""
    padded = find(cells, cell, STATIC)
    if cell.mode != CONTINUOUS or padded is None or not padded.padding_rows:
        return ""
    throughput, latency = cell.tokens_per_s / padded.tokens_per_s, padded.latency.mean / cell.latency.mean
    return (
        f"{cell.part}, {cell.clients} clients: continuous batching gives {throughput:.2f} times the tokens of static "
        f"batches with padding, and answers {latency:.2f} times as fast on average."
    )


def _long_prompt(options: ModesBenchOptions, figures: Sequence[LongPromptFigures]) -> Table:
    view = sheet(
        f"A prompt joins {options.streams} streams; times in ms",
        *("prompt\ntokens", "\ntarget", "gap\nalone", "\np50", "\np99", "\nmax", "prompt\ns"),
        *("of no\ntarget", "of\npart"),
    )
    without = {f.prompt_tokens: f for f in figures if not f.target_ms and not f.whole}
    before = figures[0].prompt_tokens
    for f in figures:
        if f.prompt_tokens != before:
            view.add_section()
            before = f.prompt_tokens
        base = without[f.prompt_tokens]
        of_part = f.of_its_part(base) if f.target_ms else None
        view.add_row(
            f"{f.prompt_tokens}",
            f"{f.target_ms:g}" if f.target_ms else "one step" if f.whole else "none",
            milliseconds(f.decode_ms),
            *(milliseconds(getattr(f.gap, name)) for name in ("p50", "p99", "max")),
            f"{f.prompt_ms / 1000:.2f}",
            f"{f.prompt_ms / base.prompt_ms:.2f}x",
            "" if of_part is None else f"{of_part:.2f}x",
        )
    return view


def _fair(figures: Sequence[FairFigures]) -> Table:
    at_best = figures[-1]
    view = sheet(
        f"One request of B after {TENANT_REQUESTS} of A, {SEATS} run at once",
        *("", "running\nof A", "waiting\nof A", "\nTTFT", "answered\nafter", "of\nbest", "\ngoal"),
    )
    view.columns[0].justify = "left"
    for f in figures:
        view.add_row(
            "at best" if f is at_best else f.policy,
            f"{f.running}",
            f"{f.waiting}",
            milliseconds(f.typical_ttft_ms),
            milliseconds(f.typical_ms),
            f"{f.typical_ms / at_best.typical_ms:.2f}x",
            f"<= {GOAL_FAIR}x" if f.policy == "fair" else "",
        )
    return view
