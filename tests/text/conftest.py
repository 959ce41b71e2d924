from __future__ import annotations

from typing import Any

import pytest

from potok.text.tokenizer import Tokenizer
from potok.weights.default_model import find_default_model
from potok.weights.gguf import GGUFFile


@pytest.fixture(scope="session")
def metadata() -> dict[str, Any]:
    """Of the default model. Tests that change it take a copy."""
    return dict(GGUFFile.open(find_default_model()).metadata)


@pytest.fixture(scope="session")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(metadata)
