"""The goodput of potok and of other engines, in process against in process, in turns, in one run.

    python benchmarks/peers/goodput.py --python /path/to/their/python
    python benchmarks/peers/goodput.py --peer openvino --peer 'openvino {"max_num_batched_tokens": 64}'

Requests arrive by the clock (Poisson) with the lengths of `potok bench goodput`; each engine is told their token ids
and does as well as it can. The search, and what passes, are those of potok.bench.goodput. Nobody tokenises or sends
anything: what a server adds comes on top.
--save adds the figures to benchmarks/results/peers_goodput.jsonl, with machine and commit.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from compare import PEERS_PYTHON, RESULTS, Engine, best_settings, wanted
from rich.console import Console

from potok.bench.figures import Targets
from potok.bench.goodput import Round, Search, Window, allowed_late, judged
from potok.bench.goodput_http import GoodputOptions
from potok.bench.goodput_report import answer, loads, rounds_table
from potok.bench.machine import Machine, disturbances
from potok.bench.record import keep
from potok.bench.stream import Record
from potok.bench.workloads import poisson_arrivals, prompt
from potok.text.tokenizer import Tokenizer
from potok.weights.default_model import find_default_model
from potok.weights.gguf import GGUFFile

GOODPUT_RESULTS = RESULTS.with_name("peers_goodput.jsonl")
MOST = 128  # requests that run at once at the peer


@dataclass(frozen=True)
class Found:
    """goodput, failed: as in potok.bench.goodput_http.GoodputResult."""

    engine: str
    version: str
    settings: dict[str, Any]
    notes: list[str]
    rounds: list[Round]
    goodput: float | None
    failed: float | None


@dataclass(frozen=True)
class Result:
    command: str
    date: str
    machine: Machine
    model: str
    options: GoodputOptions
    notes: list[str]
    engines: list[Found]


class Measured:
    """One engine, and its search."""

    def __init__(self, engine: Engine, options: GoodputOptions) -> None:
        self.engine = engine
        self.rounds: list[Round] = []
        self.search = Search(options.start_rate, options.lowest_rate, options.resolution, options.rounds)

    def found(self) -> Found:
        about = self.engine.figures
        return Found(
            *(about.engine, about.version, about.settings, about.notes, self.rounds),
            goodput=self.search.passed,
            failed=self.search.failed,
        )


class Prompts:
    """Of token ids, no two alike."""

    def __init__(self, model: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_metadata(GGUFFile.open(str(model)).metadata)
        self._seed = seed
        self._index = count()

    def next(self, length: int) -> list[int]:
        return self._tokenizer.encode(prompt(self._seed, next(self._index), 2 * length))[:length]


def main() -> None:
    flags = parse()
    options = GoodputOptions(**{name: getattr(flags, name) for name in OPTIONS})
    options.check()
    notes = disturbances()
    prompts = Prompts(flags.model, options.seed)
    engines: list[Measured] = []
    console = Console(stderr=True, highlight=False)
    try:
        with console.status("") as status:
            for name, settings, python in wanted(flags, lambda name: best_for_goodput(name, flags.threads)):
                status.update(f"loading {name}")
                engines.append(Measured(Engine(name, settings, python, flags.model), options))
                engines[-1].engine.run([prompts.next(16) for _ in range(2)], 4)
            while any(m.search.rate is not None for m in engines):
                for measured in engines:
                    if (rate := measured.search.rate) is not None:
                        status.update(f"{measured.engine.name}, round {len(measured.rounds) + 1}: {rate:g} a second")
                        measured.rounds.append(run_round(measured, options, rate, prompts))
                        measured.search.note(not measured.rounds[-1].failed)
    finally:
        for measured in engines:
            measured.engine.close()
    result = Result(
        command=shlex.join(["python", *sys.argv]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=Machine.read(),
        model=flags.model.name,
        options=options,
        notes=notes,
        engines=[measured.found() for measured in engines],
    )
    show(result)
    if flags.save:
        keep(result, GOODPUT_RESULTS)


def best_for_goodput(name: str, threads: int) -> dict[str, Any]:
    """The best known where both the first token and the gaps count. potok has its defaults."""
    if name == "potok":
        return {"threads": threads}
    if name != "openvino":
        raise SystemExit(f"--peer {name} has a server of its own: potok bench goodput --url measures it.")
    return best_settings(name, MOST, threads) | {"max_num_batched_tokens": 128}


def run_round(measured: Measured, options: GoodputOptions, rate: float, prompts: Prompts) -> Round:
    seed = options.seed + len(measured.rounds)
    times = poisson_arrivals(seed, rate, options.warm_up + options.duration)
    lengths = options.lengths(len(times), seed)
    window = Window(options.warm_up, options.warm_up + options.duration)
    seen = measured.engine.ask(
        {
            "arrivals": [(at, prompts.next(n.prompt), n.output) for at, n in zip(times, lengths, strict=True)],
            "window": window,
            "ttft": options.ttft_ms / 1000,
            "allowed": allowed_late(sum(map(window.holds, times))),
        }
    )
    records = [Record(at, end, came) for at, end, came in zip(times, seen["ends"], seen["times"], strict=False)]
    targets = Targets(options.ttft_ms, options.gap_ms)
    return judged(rate, records, window, targets, seen["now"], cut=seen["now"] < window.end)


#: Fields of GoodputOptions that are options here.
OPTIONS = ("ttft_ms", "gap_ms", "start_rate", "resolution", "rounds", "duration", "warm_up", "seed")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="GGUF file; the default model if none is given")
    parser.add_argument("--peer", action="append", help="openvino, with JSON settings if wanted; may be repeated")
    parser.add_argument("--python", type=Path, default=PEERS_PYTHON, help="Python that the peers are installed for")
    defaults = GoodputOptions()
    for name in OPTIONS:
        value = getattr(defaults, name)
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help=f"add the figures to {GOODPUT_RESULTS.name}")
    options = parser.parse_args()
    options.model = options.model or find_default_model()
    options.peer = options.peer or ["openvino"]
    return options


def show(result: Result) -> None:
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    out.print(f"{result.model}: {loads(result.options)}; times in ms")
    ours = result.engines[0].goodput
    for found in result.engines:
        out.print(rounds_table(f"{found.engine} {found.version}", found.rounds))
        out.print(answer(found.goodput, found.failed, found.rounds))
        if found is not result.engines[0] and ours and found.goodput:
            out.print(f"potok: {ours / found.goodput:.2f} times that.")
        for note in (str(found.settings), *found.notes):
            out.print(note, soft_wrap=True, markup=False)
    for line in (f"{result.date}  {result.machine.line()}", result.command, *result.notes):
        out.print(line, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
