"""potok for compare.py: its engine on this thread, with no server and no wire around it."""

from __future__ import annotations

import gc
import json
import sys
from itertools import count

from lines import answer

from potok import __version__
from potok.bench.engine import run_burst
from potok.config import EngineConfig
from potok.engine.build import build_engine
from potok.protocol import Sampling, Submit


def main(descriptor: str, model: str, settings: str) -> None:
    engine = build_engine(EngineConfig(model=model, **json.loads(settings)))
    gc.freeze()
    ids = count(1)

    def generate(prompts: list[list[int]], output_tokens: int) -> int:
        steps = run_burst(engine, [Submit(next(ids), prompt, output_tokens, Sampling()) for prompt in prompts])
        return sum(len(step.inputs.out_rows) for step in steps)

    answer(descriptor, {"version": __version__, "notes": engine.info.notes}, generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
