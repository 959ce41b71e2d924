"""Bounds on what waits and on what one key may ask, without HTTP: an engine of three numbers, and a clock by hand."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potok.config import ServerConfig
from potok.errors import ClientError, Crowded
from potok.protocol import EngineInfo, Stats
from potok.server.admission import Admission, Allowance, Ticket

INFO = EngineInfo(
    vocab_size=100, max_model_len=64, block_size=16, num_blocks=9, max_num_seqs=2, max_num_batched_tokens=64, threads=1,
    isa="none", kv_cache_bytes=0, notes=[],
)  # fmt: skip


@dataclass
class Engine:
    """What an Admission sees of one, and a clock."""

    info: EngineInfo = INFO
    stats: Stats = field(default_factory=Stats)
    unseen: int = 0
    now_s: float = 100.0

    def clock(self) -> float:
        return self.now_s


def admission(engine: Engine, **bounds: int) -> Admission:
    return Admission(ServerConfig(**bounds), engine, engine.clock)


class Calls:
    """Calls that stay open until they are told to leave."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.stack: list[tuple[contextlib.ExitStack, Ticket]] = []

    def come(self, num_requests: int = 1, namespace: str = "", prompt_tokens: int = 0) -> Ticket:
        with contextlib.ExitStack() as stack:
            ticket = stack.enter_context(self.admission.ticket(namespace))
            ticket.ask(num_requests)
            ticket.weigh([prompt_tokens] * num_requests)
            self.stack.append((stack.pop_all(), ticket))
            return ticket

    def leave(self, index: int = 0) -> None:
        self.stack.pop(index)[0].close()


def refused(calls: Calls, code: str, num_requests: int = 1, namespace: str = "", prompt_tokens: int = 0) -> Crowded:
    before = calls.admission.num_open
    with pytest.raises(Crowded) as caught:
        calls.come(num_requests, namespace, prompt_tokens)
    assert caught.value.code == code
    assert calls.admission.num_open == before
    return caught.value


def test_as_many_wait_as_may_and_no_more() -> None:
    """Before the engine has said a word, too."""
    calls = Calls(admission(Engine(), max_waiting=4))
    for _ in range(6):
        calls.come()
    refused(calls, "queue_full")
    with calls.admission.ticket("") as ticket, pytest.raises(Crowded):
        ticket.knock()
    calls.leave()
    calls.come()
    refused(calls, "queue_full")


def test_each_choice_counts_and_its_end_makes_room() -> None:
    calls = Calls(admission(Engine(), max_waiting=4))
    ticket = calls.come(5)
    refused(calls, "queue_full", 2)
    calls.come(1)
    refused(calls, "queue_full")
    ticket.begin(0)
    ticket.gained(3, 7, ended=False)
    refused(calls, "queue_full")
    ticket.gained(3, 1, ended=True)
    calls.come()
    refused(calls, "queue_full")
    calls.leave()
    assert calls.admission.num_open == 2


def test_what_the_engine_says_counts_where_it_runs_fewer_than_it_could() -> None:
    engine = Engine(info=msgspec.structs.replace(INFO, max_num_seqs=100))
    calls = Calls(admission(engine, max_waiting=4))
    for _ in range(5):
        calls.come().begin(0)
    engine.stats = Stats(running=1, waiting=3)
    engine.unseen = 1
    refused(calls, "queue_full")  # three, one on its way, and this one
    engine.stats, engine.unseen = Stats(running=1, waiting=3), 0
    calls.come()
    refused(calls, "queue_full")  # the last one is still being tokenised
    engine.stats = Stats(running=6)
    for _ in range(20):
        calls.come()


def test_the_engine_need_not_have_heard_yet_that_all_have_left() -> None:
    engine = Engine()
    calls = Calls(admission(engine, max_waiting=1))
    for _ in range(3):
        calls.come().begin(0)
    engine.stats = Stats(running=2, waiting=1)
    refused(calls, "queue_full")
    for _ in range(3):
        calls.leave()
    calls.come()


def test_nobody_may_wait() -> None:
    calls = Calls(admission(Engine(), max_waiting=0))
    calls.come(2)
    refused(calls, "queue_full")


def test_a_call_that_can_never_be_taken_is_no_matter_of_waiting() -> None:
    engine = Engine()
    for bounds, num_requests in (({"max_waiting": 4}, 7), ({"key_requests": 3}, 4)):
        with pytest.raises(ClientError) as caught:
            Calls(admission(engine, **bounds)).come(num_requests)
        assert not isinstance(caught.value, Crowded) and caught.value.param == "n"
        Calls(admission(engine, **bounds)).come(num_requests - 1)
    with pytest.raises(ClientError) as caught:
        Calls(admission(engine, max_waiting_tokens=100)).come(5, prompt_tokens=40)
    assert not isinstance(caught.value, Crowded) and "100 tokens" in str(caught.value)


def test_tokens_that_wait() -> None:
    """Those of the youngest; what runs, or could at once, does not wait, however long it is."""
    engine = Engine()
    calls = Calls(admission(engine, max_waiting_tokens=100))
    calls.come(prompt_tokens=5000)
    calls.come(prompt_tokens=5000)
    calls.come(prompt_tokens=60)
    refused(calls, "queue_full", prompt_tokens=41)
    calls.come(prompt_tokens=40)
    refused(calls, "queue_full", prompt_tokens=1)
    calls.leave()
    calls.come(prompt_tokens=60)
    engine.info = msgspec.structs.replace(INFO, max_num_seqs=100)
    calls.come(prompt_tokens=5000)
    engine.stats = Stats(running=1, waiting=2, waiting_tokens=90)
    for _, ticket in calls.stack:
        ticket.begin(0)
    refused(calls, "queue_full", prompt_tokens=11)
    calls.come(prompt_tokens=10)


def test_retry_after_is_when_a_place_becomes_free() -> None:
    engine = Engine()
    calls = Calls(admission(engine, max_waiting=0))
    calls.come(2)
    assert refused(calls, "queue_full").retry_after_s == 2  # nothing is known
    engine.stats = Stats(running=2, place_us=4_200_000)
    assert refused(calls, "queue_full").retry_after_s == 4.2


def test_requests_of_a_key() -> None:
    engine = Engine(info=msgspec.structs.replace(INFO, max_num_seqs=100))
    calls = Calls(admission(engine, key_requests=3))
    calls.come(2, "alice")
    refused(calls, "too_many_requests", 2, "alice")
    calls.come(1, "alice")
    refused(calls, "too_many_requests", 1, "alice")
    calls.come(3, "bob")
    calls.come(3)  # callers without a key are one
    refused(calls, "too_many_requests")
    calls.leave()
    calls.come(2, "alice")


def test_tokens_of_a_key() -> None:
    """A minute's tokens at once, then a steady rate: 600 a minute are 10 a second."""
    engine = Engine(info=msgspec.structs.replace(INFO, max_num_seqs=100))
    calls = Calls(admission(engine, key_tokens_per_minute=600))
    ticket = calls.come(1, "alice")
    ticket.begin(500)
    ticket.gained(0, 100, ended=False)
    calls.come(1, "alice")  # nothing left, and no debt
    ticket.gained(0, 35, ended=True)
    assert refused(calls, "rate_limited", 1, "alice").retry_after_s == pytest.approx(3.5)
    calls.come(1, "bob")
    engine.now_s += 3.4
    refused(calls, "rate_limited", 1, "alice")
    engine.now_s += 0.1
    calls.come(1, "alice")


def test_an_allowance_keeps_no_more_than_a_minute() -> None:
    allowance = Allowance(60, 0.0)
    allowance.charge(60, 1000.0)
    assert allowance.debt_s(1000.0) == 0
    allowance.charge(90, 1000.0)
    assert allowance.debt_s(1000.0) == pytest.approx(90)
    assert allowance.debt_s(1030.0) == pytest.approx(60)


MOVES = st.lists(st.tuples(st.sampled_from(["come", "leave", "send", "end", "told"]), st.integers(0, 5)), max_size=80)


@given(MOVES, st.integers(0, 5), st.integers(1, 4))
def test_never_too_many_and_never_too_few(moves: list[tuple[str, int]], max_waiting: int, at_once: int) -> None:
    """Against an engine that runs the oldest, and speaks when it likes: what waits is never over the bound, and when it
    has just spoken of all that is open, nobody is refused for whom there was room. At the end nothing is left."""
    engine = Engine(info=msgspec.structs.replace(INFO, max_num_seqs=at_once))
    calls = Calls(admission(engine, max_waiting=max_waiting))
    sent: list[Ticket] = []
    fresh = True
    for move, number in moves:
        num_open = calls.admission.num_open
        room = num_open + number <= at_once + max_waiting
        if move == "come" and number:
            try:
                calls.come(number)
            except ClientError:
                assert not (room and fresh)
            else:
                assert room
                fresh = False
        elif move == "leave" and number < len(calls.stack):
            ticket = calls.stack[number][1]
            sent = [one for one in sent if one is not ticket]
            calls.leave(number)
            fresh = False
        elif move == "send":
            for _, ticket in calls.stack:
                if ticket not in sent:
                    ticket.begin(0)
                    sent.append(ticket)
                    engine.unseen += len(ticket._entries)
        elif move == "told" and len(sent) == len(calls.stack):
            engine.unseen, fresh = 0, True
            engine.stats = Stats(running=min(num_open, at_once), waiting=max(0, num_open - at_once))
        elif move == "end" and number < len(sent):
            sent[number].gained(0, 1, ended=True)
            fresh = False
    while calls.stack:
        calls.leave()
    assert calls.admission.num_open == 0 == calls.admission._num_unsent
