"""The goldens are what they say: of this model, whole, and equal to a second float64 evaluation by other code."""

import hashlib
import json

import numpy as np
from float64_plan import logits_float64
from golden_data import ANSWER, GOLDENS, QUESTION, load_goldens

from potok.text.chat import ChatTemplate
from potok.text.tokenizer import Tokenizer
from potok.weights.default_model import find_default_model
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config

PROMPTS = json.loads((GOLDENS.parent / "prompts.json").read_text(encoding="utf-8"))


def test_they_belong_to_the_default_model_and_are_whole() -> None:
    goldens = load_goldens()
    assert hashlib.sha256(find_default_model().read_bytes()).hexdigest() == goldens.model_sha256
    assert len(goldens.ids) == len(PROMPTS["chats"]) + len(PROMPTS["texts"]) == 20
    assert goldens.top_ids.shape == goldens.top_logits.shape == (20, 64, 16)
    assert goldens.positions.shape == goldens.logsumexp.shape == (20, 64)
    assert [positions[-1] + 2 for positions in goldens.positions] == [len(ids) for ids in goldens.ids]
    assert (np.diff(goldens.top_logits, axis=2) <= 0).all()
    assert (goldens.top_logits[:, :, 0] < goldens.logsumexp).all()
    assert sum(path.stat().st_size for path in GOLDENS.parent.iterdir()) < 300_000


def test_chats_are_followed_greedily_and_texts_by_themselves() -> None:
    file = GGUFFile.open(find_default_model())
    tokenizer = Tokenizer.from_metadata(file.metadata)
    chat = ChatTemplate(file.metadata["tokenizer.chat_template"], tokenizer)
    goldens = load_goldens()
    num_chats = len(PROMPTS["chats"])
    for n, messages in enumerate(PROMPTS["chats"]):
        prompt = chat.encode(messages)
        assert goldens.ids[n] == prompt + goldens.top_ids[n, :, 0].tolist()
    assert goldens.ids[num_chats:] == [tokenizer.encode(text) for text in PROMPTS["texts"]]


def test_the_first_answer() -> None:
    tokenizer = Tokenizer.from_metadata(GGUFFile.open(find_default_model()).metadata)
    answer = load_goldens().top_ids[0, :, 0].tolist()
    end = next(i for i, id in enumerate(answer) if id in tokenizer.end_ids)
    assert PROMPTS["chats"][0] == [{"role": "user", "content": QUESTION}]
    assert tokenizer.decode(answer[:end]) == ANSWER


def test_numpy_in_float64_agrees() -> None:
    file, goldens, n = GGUFFile.open(find_default_model()), load_goldens(), 13
    rows = goldens.positions[n].tolist()
    logits = logits_float64(file, read_config(file), goldens.ids[n][:-1], rows)
    best = logits.max(axis=1)
    logsumexp = best + np.log(np.exp(logits - best[:, None]).sum(axis=1))
    np.testing.assert_allclose(logsumexp, goldens.logsumexp[n], rtol=0, atol=1e-9)
    got = np.take_along_axis(logits, goldens.top_ids[n], axis=1)
    np.testing.assert_allclose(got, goldens.top_logits[n], rtol=1e-6, atol=0)
    np.testing.assert_array_equal(np.argsort(-logits, axis=1, kind="stable")[:, :16], goldens.top_ids[n])
