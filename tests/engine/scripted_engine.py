"""An engine process with a scripted backend: scripted_engine.py KIND ENDPOINT PARENT. Started by test_process."""

from __future__ import annotations

import os
import sys
import time

from engine_kit import VOCAB, remember_all

from potok.backends.api import StepInputs
from potok.backends.modelled.scripted import ScriptedBackend
from potok.config import EngineConfig
from potok.engine.assemble import assemble
from potok.engine.probe import Speed
from potok.engine.process import run
from potok.engine.serve import Engine
from potok.errors import LoadError


def hang(inputs: StepInputs) -> None:
    time.sleep(600)


def build(kind: str) -> Engine:
    match kind:
        case "refuse":
            raise LoadError("the model m.gguf is made of cheese")
        case "bug":
            raise ZeroDivisionError("one over nothing")
        case "vanish":
            os._exit(3)
        case "slow start":
            time.sleep(600)
    backend = ScriptedBackend(
        remember_all,
        vocab_size=VOCAB,
        seconds_per_step=0.005,
        **({"on_step": hang} if kind == "hang" else {}),  # type: ignore[arg-type]
    )
    config = EngineConfig(model="", kv_cache_memory=256 * 32 * 4, max_num_batched_tokens=128)
    return assemble(config, backend, memory=2**30, notes=[f"pid {os.getpid()}"], probe=lambda _: Speed(1e-3))


if __name__ == "__main__":
    kind, endpoint, parent = sys.argv[1:]
    sys.exit(run(endpoint, int(parent), lambda quiet: build(kind)))
