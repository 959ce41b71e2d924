"""potok for compare.py and goodput.py: its engine on this thread, with no server and no wire around it."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from itertools import count

from lines import Arrivals, answer

from potok import __version__
from potok.bench.closed_loop import stamped
from potok.bench.engine import run_burst
from potok.config import EngineConfig
from potok.engine.build import build_engine
from potok.engine.loop import EngineLoop
from potok.finish import Finish
from potok.protocol import Cancel, FromEngine, Sampling, Shutdown, Step, Submit, ToEngine


def main(descriptor: str, model: str, settings: str) -> None:
    engine = build_engine(EngineConfig(model=model, **json.loads(settings)))
    gc.freeze()
    ids = count(1)

    def generate(prompts: list[list[int]], output_tokens: int) -> int:
        steps = run_burst(engine, [Submit(next(ids), prompt, output_tokens, Sampling()) for prompt in prompts])
        return sum(len(step.inputs.out_rows) for step in steps)

    def serve(arrivals: Arrivals) -> None:
        EngineLoop(engine.scheduler, engine.backend, Connection(arrivals, ids)).run()

    answer(descriptor, {"version": __version__, "notes": engine.info.notes}, generate, serve)


class Connection:
    """The engine's end of the way to those who arrive."""

    def __init__(self, arrivals: Arrivals, ids: count[int]) -> None:
        self._arrivals = arrivals
        self._ids = ids
        self._open: dict[int, int] = {}  # index of the arrival, by id

    def receive(self, timeout: float) -> Sequence[ToEngine]:
        if self._arrivals.over:
            return [*map(Cancel, self._open), Shutdown()]
        if timeout:
            self._arrivals.wait()
        return [self._submit(*arrival) for arrival in self._arrivals.due()]

    def send(self, message: FromEngine) -> None:
        if not isinstance(message, Step):
            return
        for chunk in message.chunks:
            if chunk.finish is Finish.ERROR:
                raise SystemExit(f"a request failed: {chunk.error}")
            self._arrivals.tokens(self._open[chunk.id], len(chunk.tokens))
            if chunk.finish is not None:
                self._arrivals.ended(self._open.pop(chunk.id))

    def _submit(self, index: int, prompt: list[int], output_tokens: int) -> Submit:
        id = next(self._ids)
        self._open[id] = index
        return stamped(Submit(id, prompt, output_tokens, Sampling()))


if __name__ == "__main__":
    main(*sys.argv[1:])
