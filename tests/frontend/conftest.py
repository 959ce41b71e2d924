from __future__ import annotations

import pytest
from hand_fed import VOCAB, HandFedEngine

from potok.frontend import FrontEnd, TextModel, open_text_model
from potok.protocol import EngineInfo
from potok.weights.default_model import find_default_model


@pytest.fixture
def engine() -> HandFedEngine:
    return HandFedEngine(
        EngineInfo(
            vocab_size=VOCAB,
            max_model_len=64,
            block_size=16,
            num_blocks=100,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            threads=1,
            isa="none",
            kv_cache_bytes=0,
            notes=[],
        )
    )


@pytest.fixture(scope="session")
def text() -> TextModel:
    return open_text_model(find_default_model())


@pytest.fixture
def frontend(engine: HandFedEngine, text: TextModel) -> FrontEnd:
    return FrontEnd(engine, *text)
