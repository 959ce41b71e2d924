from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_kit import Script, Server, serving

from potok.frontend import TextModel, open_text_model
from potok.weights.default_model import find_default_model


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    """Tokenizer, template and name of the default model."""
    return open_text_model(find_default_model(), "smol")


@pytest.fixture(scope="session")
def shared_server(text_model: TextModel) -> Iterator[Server]:
    with serving(text_model, Script(), max_model_len=512, max_num_seqs=16) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """A scripted server, quiet before and after the test."""
    shared_server.script.reset()
    yield shared_server
    shared_server.script.reset()
    shared_server.eventually(shared_server.settled)
