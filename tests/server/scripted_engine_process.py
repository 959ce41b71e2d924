"""The engine of scripted_process: scripted_engine_process.py KIND ENDPOINT PARENT.

KIND: "steady" counts upwards at 100 steps a second; "mortal" dies in its tenth step; "slow" takes 1.5 s to load;
"broken" cannot load.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from potok.backends.api import StepInputs
from potok.backends.modelled.scripted import ScriptedBackend
from potok.config import EngineConfig
from potok.engine.assemble import assemble
from potok.engine.probe import Speed
from potok.engine.process import run
from potok.engine.serve import Engine
from potok.errors import LoadError


class Mortal:
    """Kills its process in the tenth step."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, inputs: StepInputs) -> None:
        self.steps += 1
        if self.steps == 10:
            os.kill(os.getpid(), signal.SIGKILL)


def build(kind: str) -> Engine:
    kind, _, loaded = kind.partition(":")
    while loaded and not Path(loaded).exists():
        time.sleep(0.01)
    if kind == "broken":
        raise LoadError("the model m.gguf is made of cheese")
    backend = ScriptedBackend(
        lambda history: 1000 + len(history),
        seconds_per_step=0.01,
        **({"on_step": Mortal()} if kind == "mortal" else {}),  # type: ignore[arg-type]
    )
    config = EngineConfig(model="", kv_cache_memory=256 * 32 * 4, max_num_seqs=2, max_num_batched_tokens=64)
    return assemble(config, backend, memory=2**30, notes=[f"engine pid {os.getpid()}"], probe=lambda _: Speed(1e-3))


if __name__ == "__main__":
    kind, endpoint, parent = sys.argv[1:]
    sys.exit(run(endpoint, int(parent), lambda quiet: build(kind)))
