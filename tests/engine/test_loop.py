"""The loop over a connection made of two lists: what goes in, what comes out, turn by turn."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import msgspec
import pytest
from engine_kit import VOCAB, expected, remember_all

from potok.backends.modelled.scripted import ScriptedBackend
from potok.core.gate import Gate, Gathered
from potok.core.request import Request
from potok.core.scheduler import Limits, Scheduler
from potok.engine.loop import HEARTBEAT_SECONDS, EngineLoop, lateness
from potok.finish import Finish
from potok.protocol import Cancel, Chunk, FromEngine, Sampling, Shutdown, Step, Submit, ToEngine

BLOCK = 16


class Tape:
    """Each turn receives the next list; the turn after the last receives a Shutdown."""

    def __init__(self, *turns: Sequence[ToEngine]) -> None:
        self._turns = deque(turns)
        self.waits: list[float] = []
        self.sent: list[FromEngine] = []

    def receive(self, timeout: float) -> Sequence[ToEngine]:
        self.waits.append(timeout)
        return self._turns.popleft() if self._turns else [Shutdown()]

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


def play(
    tape: Tape,
    backend: ScriptedBackend | None = None,
    *,
    budget: int = 64,
    seqs: int = 8,
    num_blocks: int = 32,
    gate: Gate | None = None,
) -> list[Step]:
    backend = backend or ScriptedBackend(remember_all, vocab_size=VOCAB, block_size=BLOCK)
    backend.allocate(num_blocks, num_blocks * BLOCK)
    limits = Limits(
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=num_blocks * BLOCK, block_size=BLOCK
    )
    EngineLoop(Scheduler(limits, num_blocks, gate=gate, checked=True), backend, tape).run()
    return [message for message in tape.sent if isinstance(message, Step)]


def submit(id: int, prompt: list[int], max_tokens: int, **sampling: object) -> Submit:
    return Submit(id, prompt, max_tokens, Sampling(**sampling))  # type: ignore[arg-type]


def gather(steps: list[Step], id: int) -> list[Chunk]:
    return [chunk for step in steps for chunk in step.chunks if chunk.id == id]


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


def test_one_message_a_turn_and_the_right_tokens() -> None:
    tape = Tape([submit(1, [5, 6, 7], 3), submit(2, [9], 2)], [], [])
    steps = play(tape)
    assert len(tape.sent) == 3
    assert [len(step.chunks) for step in steps] == [2, 2, 1]
    assert tokens_of(gather(steps, 1)) == expected([5, 6, 7], 3)
    assert tokens_of(gather(steps, 2)) == expected([9], 2)
    assert [chunk.finish for chunk in gather(steps, 1)] == [None, None, Finish.LENGTH]


def test_it_waits_only_when_nothing_is_alive() -> None:
    tape = Tape([], [submit(1, [5], 2)], [], [])
    play(tape)
    assert tape.waits == [0.0, HEARTBEAT_SECONDS, 0.0, HEARTBEAT_SECONDS, HEARTBEAT_SECONDS]


def test_an_idle_turn_is_a_heartbeat_with_fresh_stats() -> None:
    steps = play(Tape([submit(1, [5] * 20, 2)], [], []))
    assert steps[0].stats.running == 1
    assert steps[0].stats.kv_blocks_used == 2
    last = steps[-1]
    assert last.chunks == []
    assert (last.stats.running, last.stats.waiting, last.stats.kv_blocks_used) == (0, 0, 0)
    assert (last.stats.steps, last.stats.prompt_tokens, last.stats.generation_tokens) == (2, 20, 2)
    assert last.stats.kv_blocks_total == 32


def test_prompts_longer_than_the_budget_come_in_chunks() -> None:
    prompt = list(range(100))
    steps = play(Tape([submit(1, prompt, 2)], *[[]] * 7), budget=16)
    assert [len(step.chunks) for step in steps] == [0] * 6 + [1, 1]
    assert tokens_of(gather(steps, 1)) == expected(prompt, 2)


@pytest.mark.parametrize("phase", ["waiting", "mid-prompt", "generating", "same turn", "finished", "unknown"])
def test_cancel_leaves_nothing_behind_within_one_turn(phase: str) -> None:
    first = submit(1, list(range(40)), 1 if phase == "finished" else 50)
    turns: dict[str, list[Sequence[ToEngine]]] = {
        "waiting": [[submit(7, [1], 2), first], [Cancel(1)]],
        "mid-prompt": [[first], [Cancel(1)]],
        "generating": [[first], [], [], [], [Cancel(1)]],
        "same turn": [[first, Cancel(1)]],
        "finished": [[first], [], [], [], [Cancel(1)]],
        "unknown": [[Cancel(1)]],
    }
    steps = play(Tape(*turns[phase]), budget=16, seqs=1)
    stats = steps[-1].stats
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert len(gather(steps, 1)) == {"generating": 2, "finished": 1}.get(phase, 0)
    assert gather(steps[-1:], 1) == []


def test_a_request_that_can_never_fit_is_answered_at_once_with_the_field() -> None:
    steps = play(Tape([submit(1, [5] * 600, 1), submit(2, [5], 1)]), num_blocks=4)
    (refused,) = gather(steps, 1)
    assert refused.finish is Finish.ERROR
    assert refused.param == "prompt"
    assert "600" in (refused.error or "")
    assert "64" in (refused.error or "")
    assert tokens_of(gather(steps, 2)) == expected([5], 1)


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([5, VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([2**40], {}, "prompt"),
        ([5], {"stop_ids": (VOCAB,)}, "stop_token_ids"),
        ([5], {"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ([5], {"logprobs": VOCAB + 1}, "logprobs"),
    ],
)
def test_ids_outside_the_vocabulary_never_reach_the_backend(
    prompt: list[int], sampling: dict[str, object], field: str
) -> None:
    steps = play(Tape([submit(1, prompt, 3, **sampling), submit(2, [5], 1)]))
    (refused,) = gather(steps, 1)
    assert (refused.finish, refused.param) == (Finish.ERROR, field)
    assert str(VOCAB) in (refused.error or "") or str(VOCAB - 1) in (refused.error or "")
    assert tokens_of(gather(steps, 2)) == expected([5], 1)


def test_a_failed_row_fails_its_request_alone() -> None:
    backend = ScriptedBackend(
        remember_all, vocab_size=VOCAB, block_size=BLOCK, fails=lambda h: h[0] == 13 and len(h) == 3
    )
    steps = play(Tape([submit(1, [13], 9), submit(2, [12], 4)], *[[]] * 4), backend)
    chunks = gather(steps, 1)
    assert tokens_of(chunks) == expected([13], 2)
    assert chunks[-1].finish is Finish.ERROR
    assert "not finite" in (chunks[-1].error or "")
    assert chunks[-1].param is None
    assert tokens_of(gather(steps, 2)) == expected([12], 4)
    assert steps[-1].stats.kv_blocks_used == 0


def test_stop_ids_end_a_request_but_not_before_min_tokens() -> None:
    # The script always wants 2. While 2 is impossible the backend takes the next id, 3.
    backend = ScriptedBackend(lambda history: 2, vocab_size=VOCAB, block_size=BLOCK)
    tape = Tape([submit(1, [5], 9, stop_ids=(2, 0)), submit(2, [5], 9, stop_ids=(2, 0), min_tokens=5)], *[[]] * 6)
    steps = play(tape, backend)
    assert [(c.tokens, c.finish) for c in gather(steps, 1)] == [([2], Finish.STOP)]
    assert tokens_of(gather(steps, 2)) == [3, 3, 3, 3, 3, 2]
    assert gather(steps, 2)[-1].finish is Finish.STOP


def test_log_probabilities_and_hashes_come_only_when_asked_for() -> None:
    tape = Tape(
        [
            submit(1, [5], 1),
            submit(2, [5], 1, logprobs=0),
            submit(3, [5], 1, logprobs=3),
            submit(4, [6], 1, logit_hash=True),
        ]
    )
    steps = play(tape)
    plain, chosen_only, top, hashed = (gather(steps, id)[0] for id in (1, 2, 3, 4))
    assert plain.logprobs is None and plain.logit_hashes is None
    assert chosen_only.logprobs is not None and top.logprobs is not None
    assert chosen_only.logprobs[0].top_ids == []
    assert chosen_only.logprobs[0].chosen == top.logprobs[0].chosen == -0.5
    assert top.logprobs[0].top_ids == [(top.tokens[0] + i) % VOCAB for i in range(3)]
    assert top.logprobs[0].top == [-0.5, -1.5, -2.5]
    assert hashed.logit_hashes is not None and hashed.logit_hashes[0] > 0


def test_preemption_does_not_show_in_the_answers() -> None:
    prompts = {id: [id] * (5 * id) for id in range(1, 7)}
    steps = play(Tape([submit(id, prompt, 40) for id, prompt in prompts.items()], *[[]] * 400), budget=24, num_blocks=8)
    assert steps[-1].stats.preemptions > 0
    for id, prompt in prompts.items():
        assert tokens_of(gather(steps, id)) == expected(prompt, 40)
    assert steps[-1].stats.kv_blocks_used == 0


def whole(id: int, prompt: list[int], max_tokens: int, **sampling: object) -> Submit:
    return msgspec.structs.replace(submit(id, prompt, max_tokens, **sampling), whole=True)


@pytest.mark.parametrize("padding", [False, True])
def test_the_last_token_of_a_whole_answer_comes_with_the_end_of_its_batch(padding: bool) -> None:
    """Only with its end can a token be spelt: an end id has no text."""
    backend = ScriptedBackend(lambda history: 2 if len(history) == 3 and history[0] == 5 else 7, vocab_size=VOCAB)
    messages = [whole(1, [5], 9, stop_ids=(2,), logprobs=1), submit(2, [6], 5), whole(3, [6], 3), whole(4, [6], 5)]
    steps = play(Tape(messages, *[[]] * 8), backend, gate=Gathered(8, padding=padding))
    ends = {c.id: (turn, c) for turn, step in enumerate(steps) for c in step.chunks if c.finish is not None}
    assert {id: turn for id, (turn, _) in ends.items()} == dict.fromkeys((1, 2, 3, 4), ends[2][0])
    last = ends[1][1]
    assert last.tokens == [2] and last.finish is Finish.STOP and last.logprobs is not None
    assert ends[3][1].tokens == [7] and ends[3][1].finish is Finish.LENGTH
    assert [len(tokens_of(gather(steps, id))) for id in (1, 2, 3, 4)] == [3, 5, 3, 5]
    assert steps[-1].stats.padding_rows == (4 if padding else 0)


def test_a_cancelled_member_of_a_batch_says_no_more() -> None:
    messages = [whole(1, [5], 1), submit(2, [6], 6)]
    steps = play(Tape(messages, [], [Cancel(1)], *[[]] * 6), gate=Gathered(8, padding=True))
    assert gather(steps, 1) == [] and len(tokens_of(gather(steps, 2))) == 6


@pytest.mark.parametrize(
    ("first_by", "ends_by", "produced", "param", "allowed"),
    [
        (3_000_000, 0, 0, "ttft_timeout_ms", 2000),
        (3_000_000, 9_000_000, 0, "ttft_timeout_ms", 2000),
        (3_000_000, 2_500_000, 0, "timeout_ms", 1500),
        (0, 2_500_000, 0, "timeout_ms", 1500),
        (3_000_000, 9_000_000, 1, "timeout_ms", 8000),
    ],
)
def test_the_deadline_that_ended_a_request_is_named(
    first_by: int, ends_by: int, produced: int, param: str, allowed: int
) -> None:
    tokens = array("i", [1] * (4 + produced))
    request = Request(1, tokens, 4, 9, arrived_us=1_000_000, first_by_us=first_by, ends_by_us=ends_by)
    late = lateness(request, 2_600_500)
    assert late.param == param
    assert late.message.startswith(f"{param} is {allowed}, ") and "after 1600 ms" in late.message


def test_a_request_past_its_deadline_ends_without_a_step() -> None:
    message = msgspec.structs.replace(submit(1, [5], 9), arrived_us=1, ends_by_us=1001)
    steps = play(Tape([message]))
    [chunk] = gather(steps, 1)
    assert chunk.finish is Finish.TIMEOUT and chunk.tokens == [] and chunk.param == "timeout_ms"
    assert chunk.error is not None and chunk.error.startswith("timeout_ms is 1, ")
    assert (steps[-1].stats.steps, steps[-1].stats.timeouts, steps[-1].stats.submits) == (0, 1, 1)
