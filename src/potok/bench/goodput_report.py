"""Shows to a person how the goodput of a server was found."""

from __future__ import annotations

from rich.table import Table

from potok.bench.figures import Spread
from potok.bench.goodput import Round
from potok.bench.goodput_http import GoodputOptions, GoodputResult
from potok.bench.prefix_loads import MIX, MIXED_PROMPT
from potok.bench.tables import milliseconds, sheet

HEADINGS = ("\nreq/s", "\nrequests", "output\ntok/s", "TTFT\np50", "\np95", "gap\np50", "\np95", "\nerrors", "\n")


def rounds_table(title: str, rounds: list[Round]) -> Table:
    """One row a round, in the order in which they ran."""
    view = sheet(title, *HEADINGS, between=1)
    view.columns[-1].justify = "left"
    for r in rounds:
        view.add_row(
            f"{r.rate:g}",
            f"{r.requests}",
            f"{r.tokens_per_s:.0f}",
            *(_time(r.ttft, name) for name in ("p50", "p95")),
            *(_time(r.gap, name) for name in ("p50", "p95")),
            f"{sum(r.errors.values())}",
            "passed" if not r.failed else "failed: errors" if r.errors else f"failed: {r.failed}",
        )
    return view


def table(result: GoodputResult) -> Table:
    return rounds_table(f"{result.model}: {loads(result.options)}; times in ms", result.rounds)


def loads(options: GoodputOptions) -> str:
    prompts = f"{options.prompt_tokens}" if options.prompt_tokens else f"{MIXED_PROMPT[0]} to {MIXED_PROMPT[1]}"
    mixed = ", ".join(f"{low} to {high} ({part} %)" for low, high, part in MIX)
    return f"{prompts} tokens in, {options.output_tokens or mixed} out"


def answer(goodput: float | None, failed: float | None, rounds: list[Round]) -> str:
    """The sentence that it was all for."""
    if goodput is None:
        return f"No goodput: even {failed:g} requests a second failed." if failed else "No goodput: nothing was tried."
    passed = [r for r in rounds if r.rate == goodput and not r.failed]
    best = f"Goodput: {goodput:g} requests a second ({passed[-1].tokens_per_s:.0f} output tokens)"
    if failed is None:
        return f"{best}, and no higher rate was tried."
    why = [r.failed for r in rounds if r.rate == failed and r.failed]
    return f"{best}; at {failed:g} it failed: {why[-1]}."


def footer(result: GoodputResult) -> list[str]:
    """The answer, then what it means and what it was measured with."""
    o = result.options
    rounds = "the round must pass" if o.rounds == 1 else f"most of {o.rounds} rounds must pass"
    lines = [
        answer(result.goodput, result.failed, result.rounds),
        f"A round passes when nothing fails, 95 % of first tokens come within {o.ttft_ms:g} ms and 95 % of gaps are "
        f"within {o.gap_ms:g} ms; at each rate {rounds}. It counts {o.duration:g} s after {o.warm_up:g} s of warm-up, "
        "with Poisson arrivals, and is cut when it cannot pass any more.",
    ]
    kinds = {error: None for r in result.rounds for error in r.errors}
    return [*lines, *kinds, f"{result.date}  {result.machine.line()}", result.command, *result.notes]


def _time(spread: Spread | None, name: str) -> str:
    return "-" if spread is None else milliseconds(getattr(spread, name))
