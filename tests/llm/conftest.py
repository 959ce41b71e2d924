from __future__ import annotations

from collections.abc import Iterator

import pytest
from llm_kit import local_engine, scripted

from potok import LLM
from potok.frontend import TextModel, open_text_model
from potok.weights.default_model import find_default_model


@pytest.fixture(scope="session")
def text() -> TextModel:
    return open_text_model(find_default_model())


@pytest.fixture
def llm(text: TextModel) -> Iterator[LLM]:
    with LLM.over(local_engine(scripted()), text) as llm:
        yield llm
