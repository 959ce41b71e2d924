from pathlib import Path

import numpy as np
import pytest
from make_model import make_model

from potok.errors import LoadError
from potok.weights.default_model import find_default_model
from potok.weights.describe import describe
from potok.weights.gguf import GGUFFile

KERNELS = {"F32": 32, "F16": 16, "Q4_1": 5, "Q5_0": 5.5, "Q8_0": 8.5, "Q4_K": 4.625, "Q6_K": 8.5625, "IQ2_XS": 6}


def test_default_model() -> None:
    file = GGUFFile.open(find_default_model())
    facts = describe(file, KERNELS)
    assert facts.parameters == 134_515_008  # as its authors count
    assert facts.file_bytes == file.path.stat().st_size
    assert sum(use.nbytes for use in facts.formats) == sum(t.data.nbytes for t in file.tensors.values())
    assert sum(use.tensors for use in facts.formats) == len(file.tensors) == 272
    assert facts.weights_memory == sum(use.nbytes for use in facts.formats)  # every row count is a multiple of 16
    assert facts.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert facts.kv_bytes_full_context == 8192 * 23040
    assert (facts.tokenizer, facts.has_template) == ("gpt2/smollm", True)


def test_formats_are_grouped_by_use() -> None:
    facts = describe(GGUFFile.open(find_default_model()), KERNELS)
    assert [(use.group, use.format, use.tensors) for use in facts.formats] == [
        ("embedding", "Q8_0", 1),
        ("attention q k v", "Q4_1", 90),
        ("attention output", "Q4_1", 30),
        ("feed-forward gate up", "Q4_1", 60),
        ("feed-forward down", "Q4_1", 30),
        ("norms and factors", "F32", 61),
    ]


def test_memory_is_counted_as_packed(tmp_path: Path) -> None:
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama-256", "Q4_K_M"))
    matrices = [t for t in file.tensors.values() if len(t.shape) == 2]
    vectors = 4 * sum(t.shape[0] for t in file.tensors.values() if len(t.shape) == 1)
    padded_rows = {t.name: -(-t.shape[0] // 16) * 16 for t in matrices}
    assert padded_rows["token_embd.weight"] == 512  # of 501
    stored = sum(padded_rows[t.name] * t.shape[1] * KERNELS[t.type.name] / 8 for t in matrices)
    assert describe(file, KERNELS).weights_memory == vectors + stored


def test_formats_that_grow_say_so(tmp_path: Path) -> None:
    def rows(format: str) -> dict[str, str]:
        return dict(
            describe(GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama-256", format)), KERNELS).rows()
        )

    down = 2 * 256 * 256
    assert rows("IQ2_XS")["feed-forward down"] == (
        f"IQ2_XS x 2, {down * 74 / 256 / 1e3:.3g} kB, {down * 6 / 8 / 1e3:.3g} kB in memory"
    )
    assert rows("Q4_K")["feed-forward down"] == f"Q4_K x 2, {down * 144 / 256 / 1e3:.3g} kB"


def test_rows_name_what_a_reader_wants_to_know(tmp_path: Path) -> None:
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-qwen2", "Q5_0"))
    del file.metadata["tokenizer.chat_template"]
    rows = dict(describe(file, KERNELS).rows())
    assert rows["architecture"] == "qwen2, 0.3 M parameters"
    assert rows["context"] == "2048 tokens"
    assert rows["chat template"].startswith("none")
    assert rows["memory: KV"] == "512 B a token"


def test_activations_are_those_of_the_file(tmp_path: Path) -> None:
    def into(shape: str, format: str) -> list[str]:
        rows = describe(GGUFFile.open(make_model(tmp_path / "tiny.gguf", shape, format)), KERNELS).rows()
        return [value for _, value in rows if "-bit into" in value or "float32 into" in value or "mean KL" in value]

    ends = "attention output ({0}), feed-forward gate up ({0}), feed-forward down ({0})"
    eight, sixteen, fidelity = into("tiny-llama-256", "Q4_K_M")
    assert eight == "8-bit into " + ends.format("Q4_K")
    assert sixteen == "16-bit into output (Q6_K), attention q k v (Q4_K Q6_K), feed-forward down (Q6_K)"
    assert "on the default model" in fidelity
    eight, sixteen, _ = into("tiny-llama", "Q4_1")  # whose embedding is in no linear
    assert eight == "8-bit into " + ends.format("Q4_1") + ", output (Q4_1)"
    assert sixteen == "16-bit into attention q k v (Q4_1)"
    [sixteen] = into("tiny-qwen2", "Q8_0")
    assert sixteen == "16-bit into output (Q8_0), attention q k v (Q8_0), " + ends.format("Q8_0")
    [floats] = into("tiny-qwen2", "F16")
    assert floats.startswith("float32 into output (F16)")


def test_a_file_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    file = GGUFFile.open(make_model(tmp_path / "tiny.gguf", "tiny-llama"))
    file.metadata["llama.expert_count"] = np.int64(4)
    with pytest.raises(LoadError, match="expert_count"):
        describe(file, KERNELS)
