from __future__ import annotations

from collections.abc import Iterator

import pytest
from case_kit import PROBE, Served


@pytest.fixture(scope="session")
def shared_real_server() -> Iterator[Served]:
    server = Served()
    yield server
    server.close()


@pytest.fixture(scope="session")
def small_server() -> Iterator[Served]:
    """Blocks of 16 tokens, 160 of them: room for one request of 2048 tokens, and for what was cached only before it."""
    server = Served("--block-size", "16", "--kv-cache-tokens", "2560", "--max-model-len", "2100")
    yield server
    server.close()


@pytest.fixture
def real_server(shared_real_server: Served) -> Iterator[Served]:
    """Empty after the test, and still saying what it said at its start."""
    yield shared_real_server
    shared_real_server.eventually(shared_real_server.empty, 5.0)
    assert shared_real_server.http.get("/health").status_code == 200
    assert shared_real_server.ask(PROBE) == shared_real_server.probe
