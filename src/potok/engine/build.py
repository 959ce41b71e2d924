"""From the settings to an engine that serves a GGUF file with the native backend."""

from __future__ import annotations

import time
from collections.abc import Callable

from potok.backends.api import AllocatingBackend
from potok.backends.native.backend import NativeBackend
from potok.config import EngineConfig
from potok.engine import resolve
from potok.engine.assemble import assemble
from potok.engine.fingerprint import Fingerprint
from potok.engine.journal import check_place
from potok.engine.machine import read_machine
from potok.engine.probe import Speed, measure
from potok.engine.serve import Engine
from potok.model.precision import ActivationRule, activation_of
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config


def build_engine(
    config: EngineConfig, quiet: Callable[[], None] = lambda: None, rule: ActivationRule = activation_of
) -> Engine:
    """Loads the weights, takes the KV memory and runs the first steps. Raises LoadError.

    quiet: called before the first steps are timed; returns when nothing else wants the cores. rule: see NativeBackend.
    """
    started = time.monotonic()
    file = GGUFFile.open(config.model)
    model = read_config(file)
    resolve.check(config, model.context_length)
    if config.journal:
        check_place(config.journal)
    fingerprint = Fingerprint(config) if config.prefix_cache_dir else None
    machine = read_machine()
    threads = resolve.threads(config.threads, machine)
    resolve.check_weights(sum(tensor.data.nbytes for tensor in file.tensors.values()), machine.available)
    backend = NativeBackend(
        file,
        model,
        threads=threads.value,
        activation_bits=config.activation_bits,
        block_size=config.block_size,
        kv_dtype=config.kv_cache_dtype,
        nodes=machine.nodes,
        rule=rule,
    )
    file.release_memory()
    loaded = f"weights loaded in {time.monotonic() - started:.2f} s"

    def probe(backend: AllocatingBackend) -> Speed:
        quiet()
        return measure(backend)

    return assemble(
        config,
        backend,
        memory=read_machine().available,
        notes=[loaded, threads.note],
        probe=probe,
        fingerprint=fingerprint.wait if fingerprint else lambda: "",
    )
