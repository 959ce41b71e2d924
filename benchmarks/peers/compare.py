"""potok and other engines on the same requests, in process against in process, in turns, in one run.

    make bench-peers
    python benchmarks/peers/compare.py --python /path/to/their/python MODEL.gguf --requests 1,8,32,100 --save
    python benchmarks/peers/compare.py --peer openvino --peer 'openvino {"max_num_batched_tokens": 1024}'
    python benchmarks/peers/compare.py --peer 'potok {"environment": {"POTOK_ISA": "avx2"}}'

Every engine is loaded once and waits while another runs. A load is so many requests at once, all greedy, each to its
last token; tokens a second count from the call to its return, prompts included. The best of the rounds counts.
Settings may hold "environment": variables of the engine's process.
--save adds the figures to benchmarks/results/peers.jsonl, with machine and commit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from potok.bench.machine import Machine, disturbances
from potok.bench.record import keep
from potok.bench.workloads import prompt
from potok.text.tokenizer import Tokenizer
from potok.weights.default_model import find_default_model
from potok.weights.gguf import GGUFFile

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "results" / "peers.jsonl"
PEERS_PYTHON = FOLDER.parents[1] / "build" / "peers" / "bin" / "python"
WARM_UP = (2, 4)  # requests, tokens

NAMES = ("potok", "openvino", "vllm")


@dataclass
class EngineFigures:
    """tokens_per_s: of each load, round by round."""

    engine: str
    version: str
    settings: dict[str, Any]
    notes: list[str]  # what it says of itself
    tokens_per_s: dict[int, list[float]] = field(default_factory=dict)

    def best(self, requests: int) -> float:
        return max(self.tokens_per_s[requests])


@dataclass(frozen=True)
class Result:
    command: str
    date: str
    machine: Machine
    model: str
    prompt_tokens: int
    output_tokens: int
    notes: list[str]
    engines: list[EngineFigures]


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, settings: dict[str, Any], python: Path, model: Path) -> None:
        fields = dict(settings)
        environment = os.environ | fields.pop("environment", {})
        answers, descriptor = os.pipe()
        loud = "PEERS_VERBOSE" in os.environ
        self._process = subprocess.Popen(
            [python, FOLDER / f"{name}_engine.py", str(descriptor), model, json.dumps(fields)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr if loud else subprocess.DEVNULL,
            stderr=sys.stderr if loud else subprocess.DEVNULL,
            pass_fds=(descriptor,),
            text=True,
            env=environment,
        )
        os.close(descriptor)
        self._answers = os.fdopen(answers)
        self.name = name
        about = self._read()
        self.figures = EngineFigures(name, about["version"], settings, about["notes"])

    def run(self, prompts: list[list[int]], output_tokens: int) -> float:
        """Tokens a second."""
        answer = self.ask({"prompts": prompts, "output_tokens": output_tokens})
        if answer["tokens"] != len(prompts) * output_tokens:
            raise SystemExit(f"{self.name} made {answer['tokens']} tokens, not {len(prompts)} x {output_tokens}.")
        return float(answer["tokens"] / answer["seconds"])

    def ask(self, load: dict[str, Any]) -> dict[str, Any]:
        """See lines.py."""
        assert self._process.stdin is not None
        print(json.dumps(load), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        self._process.communicate()  # ends its stdin
        self._answers.close()

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended; set PEERS_VERBOSE=1 to see what it says.")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    options = parse()
    notes = disturbances()
    tokenizer = Tokenizer.from_metadata(GGUFFile.open(str(options.model)).metadata)
    loads = [int(part) for part in options.requests.split(",")]
    engines: list[Engine] = []
    next_prompt = 0

    def prompts(count: int) -> list[list[int]]:
        nonlocal next_prompt
        texts = [prompt(options.seed, next_prompt + i, 2 * options.prompt_tokens) for i in range(count)]
        next_prompt += count
        return [tokenizer.encode(text)[: options.prompt_tokens] for text in texts]

    console = Console(stderr=True, highlight=False)
    try:
        with console.status("") as status:
            for name, settings, python in wanted(
                options, lambda name: best_settings(name, max(loads), options.threads)
            ):
                status.update(f"loading {name}")
                engines.append(Engine(name, settings, python, options.model))
                engines[-1].run(prompts(WARM_UP[0]), WARM_UP[1])
            for round in range(options.rounds):
                for load in loads:
                    same = prompts(load)
                    for engine in engines[:: 1 if round % 2 == 0 else -1]:  # nobody always comes first
                        status.update(f"round {round + 1}, {load} at once: {engine.name}")
                        rate = engine.run(same, options.output_tokens)
                        engine.figures.tokens_per_s.setdefault(load, []).append(rate)
    finally:
        for engine in engines:
            engine.close()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = Result(
        command=shlex.join(["python", *sys.argv]),
        date=date,
        machine=Machine.read(),
        model=options.model.name,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        notes=notes,
        engines=[engine.figures for engine in engines],
    )
    show(result, loads)
    if options.save:
        keep(result, RESULTS)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="GGUF file; the default model if none is given")
    parser.add_argument("--peer", action="append", help="engine, with JSON settings if wanted; may be repeated")
    parser.add_argument("--python", type=Path, default=PEERS_PYTHON, help="Python that the peers are installed for")
    parser.add_argument("--requests", default="1,8,32,100", help="requests at once, one load each")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help=f"add the figures to {RESULTS.name}")
    options = parser.parse_args()
    options.model = options.model or find_default_model()
    return options


def best_settings(name: str, most: int, threads: int) -> dict[str, Any]:
    """The best known for this kind of load. most: requests at once at most."""
    if name == "potok":
        return {"max_num_seqs": most, "max_num_batched_tokens": 256, "threads": threads}
    if name == "openvino":
        return {
            "max_num_seqs": most,
            "max_num_batched_tokens": 256,
            "dynamic_split_fuse": True,
            "enable_prefix_caching": False,
            "cache_size": 4,  # GB
            "properties": {"INFERENCE_NUM_THREADS": threads},
        }
    return {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "max_num_seqs": most,
        "max_model_len": 2048,
        "environment": {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "auto"},
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }


def wanted(
    options: argparse.Namespace, best: Callable[[str], dict[str, Any]]
) -> list[tuple[str, dict[str, Any], Path]]:
    """Name, settings and Python of each engine, potok first. best: settings by name, which the options may change."""
    engines = []
    for engine in ["potok", *(options.peer or installed(options.python))]:
        name, _, changes = engine.partition(" ")
        if name not in NAMES:
            raise SystemExit(f"--peer must begin with one of {', '.join(NAMES)}, not {name!r}.")
        settings = best(name) | json.loads(changes or "{}")
        engines.append((name, settings, Path(sys.executable) if name == "potok" else options.python))
    return engines


def installed(python: Path) -> list[str]:
    """Peers that this Python has."""
    if not python.exists():
        raise SystemExit(f"There is no {python}: `make bench-peers` installs the peers.")
    code = "import importlib.util, sys; print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    command = [python, "-c", code, "openvino", "vllm"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def show(result: Result, loads: list[int]) -> None:
    ours, *peers = result.engines
    view = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    headings = ["at once", f"potok\n{ours.version}"]
    for peer in peers:
        headings += [f"{peer.engine}\n{peer.version.split('-')[0]}", "ratio"]
    for heading in headings:
        view.add_column(heading, justify="right", no_wrap=True)
    for load in loads:
        cells = []
        for peer in peers:
            cells += [f"{peer.best(load):.1f}", f"{ours.best(load) / peer.best(load):.2f}"]
        view.add_row(f"{load}", f"{ours.best(load):.1f}", *cells)
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    out.print(f"{result.model}: {result.prompt_tokens} tokens in, {result.output_tokens} out; output tokens a second")
    out.print(view)
    for engine in result.engines:
        about = "; ".join([json.dumps(engine.settings), *engine.notes])
        out.print(f"{engine.engine} {engine.version}: {about}", soft_wrap=True, markup=False)
    for line in (f"{result.date}  {result.machine.line()}", result.command, *result.notes):
        out.print(line, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
