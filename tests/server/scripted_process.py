"""`potok serve` over a scripted engine: scripted_process.py PORT DRAIN_SECONDS KIND. Started by test_process."""

from __future__ import annotations

import sys
from pathlib import Path

from potok.config import EngineConfig, ServerConfig
from potok.engine.client import EngineClient
from potok.engine.host import EngineProcess
from potok.server.run import run
from potok.weights.default_model import find_default_model

ENGINE = Path(__file__).with_name("scripted_engine_process.py")

if __name__ == "__main__":
    port, drain_seconds, kind = sys.argv[1:]
    settings = ServerConfig(port=int(port), served_model_name="smol", drain_seconds=float(drain_seconds), max_waiting=4)
    engine = EngineClient(EngineProcess([sys.executable, str(ENGINE), kind]))
    sys.exit(run(EngineConfig(model=str(find_default_model())), settings, engine))
