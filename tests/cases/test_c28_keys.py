"""`potok serve --api-key` from its flags on: who has no key gets nothing, and nobody is told a key."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from case_kit import PROBE, Served

from potok.cli import execute

ALICE, BOB = "secret-of-alice", "secret-of-bob"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    server = Served("--kv-cache-tokens", "8192", keys=[f"alice={ALICE}", f"bob={BOB}"])
    yield server
    server.close()  # which checks that it has said nothing since its start


def test_keys(guarded: Served, capsys: pytest.CaptureFixture[str]) -> None:
    said = "".join(guarded.said)
    assert "API keys: alice, bob" in said and "secret" not in said
    cached = []
    for key in (ALICE, ALICE, BOB, BOB):
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
            answer = client.completions.create(model="smol", prompt=[7] * 100, max_tokens=1)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 96, 0, 96]
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-none", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    assert guarded.http.post("/v1/completions", json=PROBE, headers={"Authorization": ""}).status_code == 401
    assert execute(["cache", guarded.url, "--api-key", ALICE]) == 0
    listed = capsys.readouterr().out
    assert "alice" in listed and "bob" not in listed
    assert execute(["cache", guarded.url, "--api-key", "wrong"]) == 2
    assert "status 401" in capsys.readouterr().err
