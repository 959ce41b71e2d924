"""The second tier through the scheduler: what is written, what is read, what a bad device costs, in small numbers."""

from __future__ import annotations

import random
from array import array

import pytest
from kv_oracle import Disk, Executor, answer, request

from potok.core.batch import Batch
from potok.core.invariants import check
from potok.core.prefix import Miss
from potok.core.radix import BYTES, Root, digest_of
from potok.core.request import Phase, Request
from potok.core.scheduler import Limits, Scheduler
from potok.core.tier import Done, Kind, Tier, Transfer
from potok.core.transfers import FAILURES, LEAST_PATIENCE_US, PAUSE_US
from potok.finish import Finish

B = 16
STEP_US = 10_000


class Server:
    """A scheduler, the executor that checks every slot it reads, and a disk; `disk` is kept over a restart."""

    def __init__(
        self,
        disk: Disk | None = None,
        *,
        num_blocks: int = 256,
        num_slots: int = 256,
        budget: int = 512,
        read_us: float = 10.0,
        token_us: float = 100.0,
    ) -> None:
        self.disk = disk or Disk(random.Random(1))
        self.tier = Tier(num_slots, B, self.disk.found(), read_us=read_us, token_us=token_us)
        self.scheduler = Scheduler(Limits(8, budget, 8192, B), num_blocks, tier=self.tier, checked=True)
        self.executor = Executor(B)
        self.now_us = 0
        self.computed = 0
        self._ids = 0

    def submit(self, prompt: list[int], max_new: int = 2) -> Request:
        new = request(self._ids, prompt, max_new)
        self._ids += 1
        assert self.scheduler.submit(new) is None
        return new

    def step(self) -> Batch | None:
        s = self.scheduler
        s.transferred(self.disk.end(self.executor))
        self.now_us += STEP_US
        batch = s.schedule(self.now_us)
        self.disk.begin(self.executor, s.take_transfers())
        check(s)
        if batch is not None:
            self.computed += batch.num_tokens
            s.commit(batch, self.executor.run(batch), 100 * batch.num_tokens)
        return batch

    def run(self) -> None:
        while self.step() is not None or (self.disk.speed > 0 and self.disk.under_way):
            pass

    def ask(self, prompt: list[int], max_new: int = 2) -> Request:
        new = self.submit(prompt, max_new)
        self.run()
        self.check(new)
        return new

    def check(self, r: Request) -> None:
        want = answer(r.tokens[: r.prompt_len], r.max_new, r.stop_ids, 8192)
        assert r.phase is Phase.FINISHED and list(r.tokens[r.prompt_len :]) == want

    def forget(self) -> None:
        """Drops all that is in memory."""
        self.scheduler.cache.clear()


def text(seed: int, n: int) -> list[int]:
    return [(seed * 7919 + i * i) % 1000 for i in range(n)]


@pytest.mark.parametrize("length", [B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 10 * B])
def test_a_prompt_comes_back_from_the_tier_but_for_its_last_token(length: int) -> None:
    server = Server()
    server.ask(text(1, length))
    written = length // B  # the answer's first token may fill one more
    assert server.tier.counters.written == (length + 1) // B
    server.forget()
    before = server.computed
    again = server.ask(text(1, length))
    assert again.cached == min(written * B, length - 1)
    assert server.computed - before == length - again.cached + 1
    assert server.tier.counters.read == written


def test_a_restart_finds_what_was_written() -> None:
    first = Server()
    first.ask(text(1, 100))
    second = Server(first.disk)
    assert second.ask(text(1, 70) + [-1 % 1009] * 9).cached == 64
    assert second.ask(text(1, 70)).cached == 69, "the rest of the block is copied from what is in memory by now"
    counters = second.scheduler.cache.counters
    assert (counters.hits, counters.hit_tokens, second.tier.counters.hit_tokens) == (2, 133, 64)


def test_what_is_in_memory_is_not_read() -> None:
    server = Server()
    server.ask(text(1, 100))
    assert server.ask(text(1, 100)).cached == 96
    assert server.tier.counters.read == 0


def test_blocks_after_those_in_memory_are_read() -> None:
    server = Server(num_blocks=24)
    server.ask(text(1, 320))
    server.ask(text(2, 200))  # drops the tail of the first
    before = server.tier.counters.read
    assert server.ask(text(1, 320)).cached == 319
    assert 0 < server.tier.counters.read - before < 20


def test_a_preempted_request_comes_back_from_the_tier() -> None:
    server = Server(num_blocks=64, budget=64)
    old, young = server.submit(text(1, 480), 300), server.submit(text(2, 480), 300)
    server.run()
    server.check(old)
    server.check(young)
    assert young.preemptions >= 1 and server.tier.counters.hit_tokens > 200
    assert server.computed < 2 * 780 + 40


def test_two_that_arrive_together_read_once() -> None:
    server = Server()
    server.ask(text(1, 160))
    server.forget()
    requests = [server.submit(text(1, 160) + text(i, 5)) for i in range(2, 5)]
    server.run()
    assert server.tier.counters.read == 10
    assert [r.cached for r in requests] == [160] * 3
    for r in requests:
        server.check(r)


def test_others_run_while_one_waits_for_its_reads() -> None:
    server = Server()
    server.ask(text(1, 160))
    server.forget()
    server.disk.speed = 0.0
    waits, runs = server.submit(text(1, 160)), server.submit(text(2, 20), 30)
    for _ in range(8):
        assert server.step() is not None
    assert waits.loading and waits.computed == 0 and len(runs.tokens) > 25
    assert server.scheduler.wake_at() == server.now_us + 1000
    server.disk.speed = 1.0
    server.run()
    assert waits.cached == 159
    server.check(waits)
    server.check(runs)


def test_full_slots_go_to_what_was_used_last_and_a_prefix_loses_its_tail_first() -> None:
    server = Server(num_slots=12)
    server.ask(text(1, 100), 1)  # 6 blocks
    server.ask(text(2, 100), 1)  # 6 blocks
    server.ask(text(1, 100), 1)  # used again
    server.ask(text(3, 50), 1)  # 3 blocks
    server.forget()
    assert len(server.tier) == 12
    assert server.ask(text(1, 100), 1).cached == 96
    server.forget()
    assert server.ask(text(2, 100), 1).cached == 48


def test_reading_is_chosen_only_where_it_is_faster_and_gets_another_chance() -> None:
    server = Server(read_us=2000.0)  # a block takes 1600 us to compute
    server.ask(text(1, 100))
    server.forget()
    assert server.ask(text(1, 100)).cached == 0
    server.forget()
    assert server.ask(text(1, 100)).cached == 0
    server.forget()
    assert server.ask(text(1, 100)).cached == 96, "2000 * (7/8)^2 < 1600"
    server.disk.us = 10**7
    for i in range(2, 6):
        server.ask(text(i, 200))
        server.forget()
        server.ask(text(i, 200))
    assert server.tier.counters.read <= 6 + 12, "one slow read is enough"


def test_steps_that_only_decode_do_not_make_reading_look_cheap() -> None:
    tier = Tier(8, B, token_us=100.0)
    for _ in range(100):
        tier.note_step(20_000, 1)
    assert tier.token_us == 100.0
    for _ in range(100):
        tier.note_step(20_000, 100)
    assert tier.token_us == pytest.approx(200.0, rel=0.01)


def test_a_request_gives_up_on_reads_that_take_too_long() -> None:
    server = Server()
    server.ask(text(1, 160))
    server.forget()
    server.disk.speed = 0.0
    r = server.submit(text(1, 160))
    steps = 0
    while server.step() is None:
        steps += 1
    assert steps * STEP_US <= LEAST_PATIENCE_US + STEP_US
    held = [t.block for t, _ in server.disk.under_way]
    assert len(held) == 10 and not set(held) & set(r.blocks)
    server.run()
    server.check(r)
    assert r.cached == 0 and server.scheduler.cache.counters.misses[Miss.EVICTED] == 1
    assert all(server.scheduler.pool.refs(b) == 1 for b in held)
    server.forget()
    assert server.ask(text(1, 160)).cached == 0, "nobody else waits for that device"
    server.disk.speed = 1.0
    server.run()
    assert server.scheduler.pool.used == 0
    assert server.tier.counters.given_up == 1


def test_what_was_read_before_giving_up_is_kept() -> None:
    server = Server()
    server.ask(text(1, 160))
    server.forget()
    r = server.submit(text(1, 160))
    server.step()
    server.disk.under_way.sort()
    late = server.disk.under_way[4:]
    del server.disk.under_way[4:]
    server.step()
    while server.step() is None:
        pass
    assert r.computed >= 64
    server.run()
    server.check(r)
    assert r.cached == 64
    server.disk.under_way += late
    server.run()
    assert server.scheduler.pool.used == 0


def test_a_read_that_fails_ends_the_prefix_and_its_entry() -> None:
    server = Server()
    server.ask(text(1, 160))
    server.forget()
    third = digest(text(1, 160), 3)
    slot = next(s for s, (d, _, _) in server.disk.stored.items() if d == third)
    server.disk.stored[slot] = (b"", b"", [])
    assert server.ask(text(1, 160)).cached == 32
    assert server.tier.counters.failed == 1
    server.forget()
    assert server.ask(text(1, 160)).cached == 159, "it has been written again"


def digest(tokens: list[int], blocks: int) -> bytes:
    server = Server()
    server.ask(tokens)
    r = server.submit(tokens)
    node = server.scheduler.cache.match(r).node
    return next(n.digest for n in node.path() if n.end == blocks * B)


def test_writing_pauses_after_failures_in_a_row() -> None:
    server = Server()
    server.disk.failing = 1.0
    server.ask(text(1, 160))
    counters = server.tier.counters
    assert counters.pauses >= 1
    failed = counters.failed
    assert failed < FAILURES + 16
    server.ask(text(2, 160))
    assert counters.failed == failed, "nothing is tried"
    server.disk.failing = 0.0
    server.now_us += PAUSE_US
    server.ask(text(3, 160))
    assert counters.written == 10


@pytest.mark.parametrize("when", ["cancelled", "preempted"])
def test_blocks_that_are_being_read_are_nobody_elses_until_that_is_over(when: str) -> None:
    server = Server(num_blocks=32)
    server.ask(text(1, 160))
    server.forget()
    server.disk.speed = 0.0
    other = server.submit(text(2, 16 * 21 - 1), 50)
    r = server.submit(text(1, 160))
    while not server.disk.under_way:
        server.step()
    held = {t.block for t, _ in server.disk.under_way if t.kind is Kind.READ}
    assert len(held) == 10 and r.loading
    if when == "cancelled":
        server.scheduler.cancel(r.id)
    else:
        while not r.preemptions:
            server.step()
        assert server.tier.counters.given_up == 0 and len(r.blocks) == 0
    assert all(server.scheduler.pool.refs(b) == 1 for b in held)
    server.disk.speed = 1.0
    server.run()
    server.check(other)
    assert server.scheduler.pool.used == 0
    counters = server.scheduler.cache.counters
    assert counters.queries == counters.hits + sum(counters.misses.values())


def test_writes_that_hang_do_not_keep_a_long_prompt_from_its_blocks() -> None:
    server = Server(num_blocks=64)
    server.disk.speed = 0.0
    server.ask(text(1, 500))
    stuck = len(server.disk.under_way)
    assert 0 < stuck <= 8
    r = server.ask(text(2, (64 - stuck - 1) * B))
    assert r.preemptions == 0


def test_the_index_survives_any_order_of_ends() -> None:
    tier = Tier(2, B)
    a, b = (tier.start_write(name, 0, b"") for name in (b"a", b"b"))
    assert a is not None and b is not None and tier.start_write(b"c", 0, b"") is None, "both slots are being written"
    tier.end_write(a, True)
    tier.end_write(b, False)
    reads = [tier.start_read(b"a", i, b"") for i in range(2)]
    c = tier.start_write(b"c", 0, b"")
    assert c is not None and c.slot == b.slot
    assert tier.start_write(b"d", 0, b"") is None, "one slot is being read, the other written"
    tier.end_read(reads[0], False, 1)
    tier.check()
    assert b"a" not in tier and tier.start_write(b"d", 0, b"") is None
    tier.end_read(reads[1], True, 1)
    d = tier.start_write(b"d", 0, b"")
    assert d is not None and d.slot == a.slot
    tier.end_write(c, True)
    tier.end_write(d, True)
    tier.check()
    assert len(tier) == 2


def test_a_digest_is_the_whole_prefix() -> None:
    root, other = Root(request(0, [1], 1).domain), Root(request(0, [1], 1, salt="x").domain)
    key = array("i", range(B)).tobytes()
    assert len(key) == B * BYTES
    assert len({digest_of(n.digest, key) for n in (root, other)}) == 2
    assert Transfer(1, Kind.READ, 2, 3, b"", b"") != Done(1, True, 2)


@pytest.mark.parametrize("slow", [False, True])
def test_prompt_that_is_read_in_time_misses_no_deadline(slow: bool) -> None:
    server = Server()
    prompt = [i % 7 for i in range(2000)]
    server.ask(prompt)
    server.forget()
    server.disk.speed = 0.0 if slow else 1.0
    soon = request(7, prompt, 2)
    soon.first_by_us = server.now_us + 100_000  # computing it takes 200 ms
    assert server.scheduler.submit(soon) is None
    for _ in range(5):
        server.step()
    assert soon.loading == slow and soon.finish is not Finish.TIMEOUT
    for _ in range(6):
        server.step()
    assert soon.finish is (Finish.TIMEOUT if slow else Finish.LENGTH)


def test_deadline_of_a_prompt_that_is_being_read_waits_for_what_it_brings() -> None:
    server = Server()
    s, prompt = server.scheduler, [i % 7 for i in range(2000)]
    server.ask([5] * 600)  # from which it learns what a token costs
    others = [server.submit([i], 200) for i in range(7)]
    first = server.submit(prompt, 1)
    next = server.submit([9], 200)
    soon = request(99, prompt, 2)
    soon.first_by_us = server.now_us + 400_000  # nothing of it is cached: its last chance to begin is at 240 ms
    assert s.submit(soon) is None
    while first.finish is None or server.disk.under_way or s.cache.transfers.wake_at() is not None:
        server.step()
    server.forget()
    server.disk.speed = 0.0
    s.cancel(next.id)
    while server.now_us < 300_000:
        server.step()
    assert soon.loading and len(s.running) == len(others) + 1
    server.disk.speed = 1.0
    for _ in range(4):
        server.step()
    assert soon.finish is Finish.LENGTH
