"""How far the engine is from the float model, over English prose, and what each precision costs in speed.

    make bench-fidelity
    python benchmarks/fidelity.py MODEL.gguf --passages 4 --rounds 1 --save

The texts of tests/fidelity/english go through the serving path in passages of 512 tokens, and every position's
distribution is compared with that of the same file in float32: weights, activations, K and V. Then the engines take
turns on prompts and decoding. --save adds the figures to benchmarks/results/fidelity.jsonl, with machine and commit.
"""

from __future__ import annotations

import argparse
import datetime
import lzma
import os
import shlex
import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from potok.bench.fidelity import (
    AT_ONCE,
    DEFAULT,
    FLOAT,
    LOADS,
    PASSAGE,
    SERVED,
    TIMED,
    Comparison,
    Speed,
    compare,
    passages,
    time_engines,
)
from potok.bench.machine import Machine, disturbances
from potok.bench.record import keep
from potok.text.tokenizer import Tokenizer
from potok.weights.default_model import find_default_model
from potok.weights.gguf import GGUFFile

ENGLISH = Path(__file__).parents[1] / "tests" / "fidelity" / "english"
RESULTS = Path(__file__).parent / "results" / "fidelity.jsonl"


@dataclass(frozen=True)
class Result:
    """settings, comparison.fidelity and speeds are of the same engines in the same order; no speeds when not timed."""

    command: str
    date: str
    machine: Machine
    model: str
    isa: str
    threads: int
    max_num_batched_tokens: int
    texts: list[str]
    passage: int
    at_once: int
    notes: list[str]
    settings: list[str]
    comparison: Comparison
    loads: tuple[int, ...]
    speeds: list[Speed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="GGUF files; the default model if none")
    parser.add_argument("--passages", type=int, help=f"of {PASSAGE} tokens, of each text; all if left out")
    parser.add_argument("--rounds", type=int, default=3, help="of the timed loads, the best counts; 0 times nothing")
    parser.add_argument("--save", action="store_true", help=f"add the figures to {RESULTS.name}")
    options = parser.parse_args()
    for model in options.models or [find_default_model()]:
        result = measure(model, options.passages, options.rounds)
        show(result)
        if options.save:
            keep(result, RESULTS)


def measure(model: Path, most: int | None, rounds: int) -> Result:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    notes = disturbances()
    texts = sorted(ENGLISH.glob("*.txt.xz"))
    tokenizer = Tokenizer.from_metadata(GGUFFile.open(model).metadata)
    prose = [tokenizer.encode(lzma.decompress(text.read_bytes()).decode()) for text in texts]
    with Console(stderr=True, highlight=False).status("loading") as status:
        default = DEFAULT.build(str(model))
        budget = default.info.max_num_batched_tokens
        engines = [default if setting is DEFAULT else setting.build(str(model), budget) for setting in SERVED]
        speeds = time_engines(str(model), engines, rounds, status.update) if rounds else []
        status.update("loading as float32")
        reference = FLOAT.build(str(model), budget)
        some = [passage for ids in prose for passage in passages(ids)[:most]]
        comparison = compare(reference, engines, some, status.update)
    return Result(
        command=shlex.join(["python", *sys.argv]),
        date=date,
        machine=Machine.read(),
        model=os.path.basename(model),
        isa=default.info.isa,
        threads=default.info.threads,
        max_num_batched_tokens=budget,
        texts=[text.name for text in texts],
        passage=PASSAGE,
        at_once=AT_ONCE,
        notes=notes,
        settings=[setting.name for setting in SERVED],
        comparison=comparison,
        loads=LOADS,
        speeds=speeds,
    )


def show(result: Result) -> None:
    """Speeds are followed by what they are of the default's."""
    c = result.comparison
    view = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, title=result.model, title_justify="left")
    view.add_column("\nsetting", no_wrap=True)
    headings = ["mean KL\nnats", "\np99", "same\nbest id", "\nperplexity", "of\nfloat32"]
    speeds = [f"prompt of {TIMED.long_prompt_tokens}\ntok/s", *(f"decode, {n} at once\ntok/s" for n in result.loads)]
    for heading in headings + (speeds if result.speeds else []):
        view.add_column(heading, justify="right", no_wrap=True)
    view.add_row("float32: weights, activations, K and V", "", "", "", f"{c.float_perplexity:.3f}")
    base = result.speeds[result.settings.index(DEFAULT.name)] if result.speeds else None
    for name, f, speed in zip_longest(result.settings, c.fidelity, result.speeds):
        row = [f"{f.mean_kl:.2e}", f"{f.p99_kl:.1e}", f"{100 * f.same_top:.2f} %", f"{f.perplexity:.3f}"]
        row.append(f"{100 * (f.of_float - 1):+.3f} %")
        if base is not None:
            rates = zip([speed.prompt, *speed.decode], [base.prompt, *base.decode], strict=True)
            row += [f"{rate:.0f}  {100 * rate / of:3.0f} %" for rate, of in rates]
        view.add_row(name, *row)
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    out.print(view)
    for line in (
        f"{c.positions} positions in passages of {result.passage} tokens, {result.at_once} at once, "
        f"at most {result.max_num_batched_tokens} tokens a step; KL: of each setting's distribution from float32's.",
        *(["Speeds: the best of the rounds, taken in turns, and what part of the default's."] * bool(result.speeds)),
        f"{result.date}  {result.machine.line()}; {result.isa}, {result.threads} threads",
        *result.notes,
    ):
        out.print(line, soft_wrap=True)


if __name__ == "__main__":
    main()
