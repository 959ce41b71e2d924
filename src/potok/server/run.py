"""`potok serve` from start to end.

The order is what makes the start fast: take the port, start the engine's process, and only then import the web
framework and the tokenizer, on another core than the one that loads the weights. So this module imports little, and
names the module with the heavy imports instead of importing it.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module

from potok.config import EngineConfig, ServerConfig
from potok.engine.client import EngineClient
from potok.errors import LoadError
from potok.server.listen import listen

#: Imported when the engine is on its way; its function `serve` does the rest.
_HEAVY = "potok.server.serving"

#: Exit codes: 0 stopped as asked, 1 stopped for another reason, 2 could not start.
EXIT_CANNOT_START = 2


def run(engine_config: EngineConfig, server_config: ServerConfig, engine: EngineClient | None = None) -> int:
    """Serves until told to stop; the exit code. Call it on the main thread.

    engine: one that was not started yet, to be used instead of one that computes `engine_config.model`.
    """
    started_s = time.monotonic()
    try:
        listener = listen(server_config.host, server_config.port)
        engine = engine or EngineClient.for_model(engine_config)
        engine.spawn()
    except LoadError as error:
        print(f"potok: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    code: int = import_module(_HEAVY).serve(listener, engine, engine_config, server_config, started_s)
    return code
