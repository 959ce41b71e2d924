"""Shows what `potok bench prefix` measured to a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from potok.bench.modelled import BUDGET
from potok.bench.prefix import POOL_PART, RESERVED_TOKENS, MemoryFigures, PrefixBenchResult, PressureFigures
from potok.bench.tables import percent, sheet


def tables(result: PrefixBenchResult) -> list[Table]:
    """One for each part that was measured."""
    made = []
    if result.shared:
        made.append(_shared(result))
    if result.dialogues:
        made.append(_dialogues(result))
    if result.memory is not None:
        made.append(_memory(result.memory))
    if result.pressure:
        made.append(_pressure(result.pressure))
    return made


def footer(result: PrefixBenchResult) -> list[str]:
    """What the figures mean and what they were measured with."""
    lines = []
    if result.shared:
        on, off = result.shared
        lines.append(
            f"Without the cache {off.requests} of the {on.requests} requests were sent; figures are per request. Their "
            f"answers are the same. {result.options.clients} clients, each asks again when it is answered."
        )
    if result.dialogues:
        first = result.dialogues[0]
        lines.append(
            f"Dialogues: {result.options.turns_open} turns open, {result.options.turns_running} of them running; "
            f"{100 * first.at_best:.1f} % of the {first.prompt_tokens} prompt tokens are of earlier turns. "
            "All answers are the same."
        )
    if result.memory is not None or result.pressure:
        lines.append(
            f"Modelled: the real scheduler, where a step takes {1000 * result.step_cost.step:g} ms and "
            f"{1000 * result.step_cost.token:g} ms a token, with at most {BUDGET} tokens."
        )
    return [
        *lines,
        f"{result.date}  {result.machine.line()}; {result.isa}, {result.threads} threads, at most "
        f"{result.max_num_batched_tokens} tokens a step, blocks of {result.block_size}",
        result.command,
        *result.notes,
    ]


def _shared(result: PrefixBenchResult) -> Table:
    o = result.options
    view = sheet(
        f"{result.model}: {o.system_tokens} tokens in common, {o.question_tokens} of each, {o.answer_tokens} out",
        *("prefix\ncache", "\nrequests", "prompt\ntokens", "\ncomputed", "system\nsaved", "ms a\nrequest"),
        "TTFT\np50 ms",
    )
    for f in result.shared:
        view.add_row(
            "on" if f.caching else "off",
            f"{f.requests}",
            f"{f.prompt_tokens}",
            f"{f.computed_tokens}",
            f"{100 * f.saved:.2f} %",
            f"{f.ms_per_request:.1f}",
            f"{f.ttft.p50:.0f}",
        )
    on, off = result.shared
    view.add_section()
    faster, sooner = off.ms_per_request / on.ms_per_request, off.ttft.p50 / on.ttft.p50
    view.add_row("gain", "", "", "", "", f"{faster:.1f}x", f"{sooner:.1f}x")
    return view


def _dialogues(result: PrefixBenchResult) -> Table:
    o = result.options
    view = sheet(
        f"{o.users} users x {o.turns} turns, {o.turn_tokens} tokens in, {o.turn_answer_tokens} out each; "
        f"{result.dialogue_blocks} blocks hold a third of the histories",
        *("\npolicy", "prompts\ncomputed", "\nhits", "\nsteps", "turns\na second", "TTFT\np50 ms", "TTFT\np95 ms"),
    )
    for f in result.dialogues:
        view.add_row(
            f.policy,
            f"{f.computed_tokens}",
            f"{100 * f.hit_rate:.1f} %",
            f"{f.steps}",
            f"{f.turns_per_s:.1f}",
            f"{f.ttft.p50:.0f}",
            f"{f.ttft.p95:.0f}",
        )
    return view


def _memory(f: MemoryFigures) -> Table:
    view = sheet(
        f"{f.requests} requests at once into {f.num_blocks} blocks of {f.block_size}, modelled", "", "measured", "goal"
    )
    view.add_row(f"admitted when each reserves {RESERVED_TOKENS} tokens", f"{f.reserving}", "")
    view.add_row("running before the first preemption", f"{f.admitted}", f">= {3 * f.reserving}")
    view.add_row("joined before the first preemption", f"{f.joined}", "")
    view.add_row("empty slots of a running request", f"{f.empty_slots:.2f}", f"<= {1.01 * f.block_size / 2:.2f}")
    view.columns[0].justify = "left"
    return view


def _pressure(pressure: Sequence[PressureFigures]) -> Table:
    view = sheet(
        f"{pressure[0].num_blocks} blocks ({pressure[2].num_blocks} modelled) for one client in {POOL_PART}, against a "
        "load that fits",
        *("", "\nclients", "\nrequests", "\nfailed", "preempted\na request", "at\nmost", "output\ntok/s"),
        "of what\nfits",
    )
    for fits, third in zip(pressure[::2], pressure[1::2], strict=True):
        for f in (fits, third):
            view.add_row(
                "modelled" if f.modelled else "measured",
                f"{f.clients}",
                f"{f.requests}",
                f"{f.failures}",
                f"{f.preemptions / f.requests:.2f}",
                "" if f.most_preemptions is None else f"{f.most_preemptions}",
                f"{f.tokens_per_s:.1f}",
                "" if f is fits else percent(f.tokens_per_s / fits.tokens_per_s),
            )
        view.add_section()
    view.add_row("goal", "", "", "0", "< 3", "", "", ">= 80 %")
    return view
