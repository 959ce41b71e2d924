"""The whole engine with the native backend, on a small synthetic model: in this process, and as users start it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_kit import ask, running
from make_model import make_model

from potok.config import EngineConfig
from potok.engine.build import build_engine
from potok.engine.client import EngineClient
from potok.errors import LoadError
from potok.finish import Finish
from potok.protocol import Sampling
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", "tiny-llama"))


def config(model: str, **settings: int) -> EngineConfig:
    return EngineConfig(model=model, **{"threads": 1, "kv_cache_memory": 4 * 2**20, **settings})


def test_the_process_serves_and_neighbours_change_nothing(model: str) -> None:
    sampling = Sampling(temperature=1.0, seed=7, logit_hash=True, logprobs=2)
    prompt = list(range(40, 75))

    async def main() -> None:
        async with running(EngineClient.for_model(config(model, max_num_batched_tokens=24))) as client:
            alone = await ask(client, prompt, 12, sampling).wait()
            for i in range(6):
                ask(client, [i + 1] * (7 * i + 1), 30)
            among = await ask(client, prompt, 12, sampling).wait()
            assert alone.finish is among.finish is Finish.LENGTH
            hashes = [chunk.logit_hashes for chunk in alone.chunks]
            assert len(hashes) == 12 and all(hashes)
            assert hashes == [chunk.logit_hashes for chunk in among.chunks]
            assert alone.tokens == among.tokens
            assert [chunk.logprobs for chunk in alone.chunks] == [chunk.logprobs for chunk in among.chunks]

    asyncio.run(main())


def test_what_is_resolved_is_what_was_asked(model: str) -> None:
    context = read_config(GGUFFile.open(model)).context_length
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 48, "max_model_len": context - 1, "block_size": 16}
    info = build_engine(config(model, **settings)).info
    for name, value in settings.items():
        assert getattr(info, name) == value
    assert info.threads == 1
    assert info.kv_cache_bytes <= 4 * 2**20
    assert info.kv_cache_bytes % info.num_blocks == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 20}, "block_size"),
        ({"max_model_len": 10**6}, "max_model_len is 1000000, but the model's context"),
        ({"kv_cache_memory": 100}, "kv_cache_memory"),
        ({"kv_cache_memory": 2**50}, "kv_cache_memory is 1048576.0 GiB"),
    ],
)
def test_settings_that_cannot_be_are_refused(model: str, settings: dict[str, int], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        build_engine(config(model, **settings))


def test_a_missing_file_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    async def main() -> None:
        client = EngineClient.for_model(config(str(tmp_path / "no.gguf")))
        with pytest.raises(LoadError, match=r"no\.gguf") as caught:
            await client.start()
        assert "\n" not in str(caught.value)
        assert client.exit_code == 2

    asyncio.run(main())
