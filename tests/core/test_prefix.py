"""The prefix cache through the scheduler: what is computed, what is shared, what is dropped, in small numbers."""

from __future__ import annotations

import random
from array import array

import pytest
from kv_oracle import Executor, answer, request, step

from potok.core import prefix, radix
from potok.core.invariants import check
from potok.core.prefix import REMEMBERED, Miss
from potok.core.radix import COMMON
from potok.core.request import Request
from potok.core.scheduler import Limits, Scheduler

B = 16


class Server:
    """A scheduler over the executor that checks every slot it reads."""

    def __init__(self, *, seqs: int = 64, budget: int = 512, context: int = 8192, num_blocks: int = 256) -> None:
        self.scheduler = Scheduler(Limits(seqs, budget, context, B), num_blocks, checked=True)
        self.executor = Executor(B)
        self.computed = 0
        self._ids = 0

    def submit(self, prompt: list[int], max_new: int = 4, salt: str = "", rate: bool = False) -> Request:
        new = request(self._ids, prompt, max_new, salt=salt)
        new.rate_until = len(prompt) if rate else 0
        self.executor.salts[self._ids] = salt
        self._ids += 1
        assert self.scheduler.submit(new) is None
        return new

    def step(self) -> bool:
        batch = step(self.scheduler, self.executor)
        self.computed += 0 if batch is None else batch.num_tokens
        return batch is not None

    def run(self) -> None:
        while self.step():
            pass

    def ask(self, prompt: list[int], max_new: int = 4, salt: str = "", rate: bool = False) -> Request:
        """Runs one request to its end and checks its answer."""
        new = self.submit(prompt, max_new, salt, rate)
        self.run()
        self.check(new)
        return new

    def check(self, r: Request) -> None:
        prompt = r.tokens[: r.prompt_len]
        want = answer(prompt, r.max_new, r.stop_ids, self.scheduler.limits.max_model_len, r.domain.salt)
        assert list(r.tokens[r.prompt_len :]) == want


def text(seed: int, n: int) -> list[int]:
    return [(seed * 7919 + i * i) % 1000 for i in range(n)]


@pytest.mark.parametrize("hit", [0, 1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B])
def test_a_hit_is_exact_to_the_token(hit: int) -> None:
    server = Server()
    server.ask(text(1, 3 * B + 5))
    before = server.computed
    warm = server.ask(text(1, hit) + [-1 % 1009] * 10)
    assert warm.cached == hit
    assert server.computed - before == 10 + 3, "only what differs is computed, and all but the last token of the answer"


@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_the_last_token_of_a_prompt_is_always_computed(length: int) -> None:
    server = Server()
    server.ask(text(1, 4 * B))
    again = server.ask(text(1, length))
    assert again.cached == length - 1


def test_a_copy_costs_a_block_more_only_where_its_source_could_be_dropped() -> None:
    server = Server()
    cache = server.scheduler.cache
    first = server.submit(text(1, 3 * B), 40)
    server.step()
    match = cache.match(request(99, text(1, 40), 4))
    assert (match.head, match.cost) == (7, 1), "two blocks are shared with who runs"
    assert cache.without_copy(match).cost == 1
    server.run()
    server.check(first)
    match = cache.match(request(99, text(1, 40), 4))
    assert (match.head, match.cost) == (7, 4), "two idle blocks and the source are no longer to be had"
    without = cache.without_copy(match)
    assert (without.head, without.source, without.cost, without.num_tokens) == (0, -1, 3, 2 * B)
    assert cache.without_copy(without) == without


def test_an_answer_is_a_prefix_of_the_next_turn() -> None:
    server = Server()
    first = server.ask(text(1, 40), 30)
    second = server.ask([*first.tokens, 5, 6, 7])
    assert second.cached == (40 + 30 - 1) // B * B, "whole blocks only: who filled the last one is gone"


def test_a_running_request_shares_what_it_has_so_far_also_in_the_block_it_is_filling() -> None:
    server = Server()
    first = server.submit(text(1, 40), 50)
    for _ in range(5):
        server.step()
    assert first.computed == 44
    second = server.submit(text(1, 40))
    server.step()
    assert second.cached == 39
    server.run()
    server.check(first)
    server.check(second)


def test_two_that_arrive_together_compute_their_prefix_once() -> None:
    server = Server(budget=100)
    requests = [server.submit(text(1, 200) + text(i, 9)) for i in range(2, 12)]
    server.run()
    assert server.computed == 200 + 10 * 9 + 10 * 3
    for r in requests:
        server.check(r)
    assert [r.cached for r in requests] == [0] + [200] * 9


def test_choices_of_one_call_share_their_prompt() -> None:
    server = Server()
    choices = [server.submit(text(1, 40), 20) for _ in range(4)]
    server.step()
    server.step()
    tables = [r.blocks for r in choices]
    assert [t[:2] for t in tables] == [tables[0][:2]] * 4 and len({t[2] for t in tables}) == 4
    server.run()
    assert server.computed == 40 + 3 + 4 * 19
    for r in choices:
        server.check(r)


def test_who_waits_for_another_does_not_wait_when_that_one_leaves() -> None:
    server = Server(budget=16)
    first, second = server.submit(text(1, 100)), server.submit(text(1, 100))
    server.step()
    server.step()
    assert [r.id for r in server.scheduler.running] == [first.id]
    server.scheduler.cancel(first.id)
    server.run()
    assert second.cached == 32
    server.check(second)


def test_nobody_waits_for_what_is_soon_computed_as_well() -> None:
    server = Server(budget=90)
    server.submit(text(1, 100))
    server.step()
    second = server.submit(text(1, 100))
    server.step()
    assert second.cached == 90, "ten tokens are not worth a step"
    server.run()
    server.check(second)


def test_younger_requests_are_not_held_up_by_one_that_waits_for_its_prefix() -> None:
    server = Server(budget=90)
    server.submit(text(1, 200))
    held, other = server.submit(text(1, 200)), server.submit(text(2, 5))
    for _ in range(3):
        server.step()
    assert other in server.scheduler.running
    assert held in server.scheduler.waiting and held.overtaken == 0
    server.run()
    server.check(held)


def test_the_same_tokens_computed_twice_are_kept_once() -> None:
    server = Server(budget=4)
    # Together from the start, since what they have in common is too short to wait for.
    requests = [server.submit(text(1, 12) + text(i, 1), 60) for i in (1, 1)]
    server.run()
    used = {n.block for n in server.scheduler.cache.tree.nodes()}
    assert len(used) == (13 + 60 - 1) // B
    for r in requests:
        server.check(r)


def test_domains_share_nothing() -> None:
    server = Server()
    assert server.ask(text(1, 100)).cached == 0
    assert server.ask(text(1, 100), salt="x").cached == 0
    assert server.ask(text(1, 100), salt="x").cached == 96


def test_salts_that_come_once_leave_nothing_behind() -> None:
    server = Server(num_blocks=16)
    for i in range(200):
        server.ask(text(i, 20), 2, salt=str(i))
    assert server.scheduler.cache.tree.num_roots <= 16
    assert len(server.scheduler.cache._dropped) <= REMEMBERED * 16 and len(server.scheduler.cache._order) <= 64
    for i in range(200, 220):
        server.ask(text(i, 5), 2, salt=str(i))  # too short to be cached
    assert server.scheduler.cache.tree.num_roots <= 16
    server.scheduler.cache.clear()
    check(server.scheduler)
    assert server.scheduler.cache.tree.num_roots == 0 and server.scheduler.pool.free == 16


def test_a_hot_prefix_survives_prompts_that_come_once() -> None:
    server = Server(num_blocks=4096 // B)
    shared = text(0, 512)
    for _ in range(3):
        server.ask(shared, 8)
    for i in range(3):
        for j in range(10):
            server.ask(text(100 + 10 * i + j, 300), 8)
        assert server.ask(shared, 8).cached >= 496

    server = Server(num_blocks=4096 // B)
    for _ in range(3):
        server.ask(shared, 8)
    for i in range(30):
        server.ask(text(200 + i, 300), 8)
    assert server.ask(shared, 8).cached / 512 >= 0.95
    assert server.scheduler.cache.counters.evicted_blocks > 300
    assert server.scheduler.cache.counters.evicted_reused_blocks == 0


def test_a_hot_prefix_that_ends_inside_a_block_keeps_its_end() -> None:
    server = Server(num_blocks=4096 // B)
    for i in range(3):
        server.ask(text(0, 250) + text(500 + i, 10), 8)
    for i in range(30):
        server.ask(text(200 + i, 300), 8)
    assert server.ask(text(0, 250) + text(600, 10), 8).cached == 250


def test_blocks_that_were_reused_and_dropped_are_counted() -> None:
    server = Server(num_blocks=32)
    server.ask(text(0, 64), 2)
    server.ask(text(0, 40), 2)
    for i in range(1, 30):
        server.ask(text(i, 400), 2)
    c = server.scheduler.cache.counters
    assert server.ask(text(0, 64), 2).cached < B
    assert c.evicted_reused_blocks == 3, "of four blocks two were shared, and one was copied from"
    assert c.evicted_blocks > 29 * 20


def test_a_prefix_that_comes_back_has_the_merits_that_it_had() -> None:
    server = Server(num_blocks=32)
    for _ in range(3):
        server.ask(text(0, 70), 2)
    root = server.scheduler.cache.tree.find_root(COMMON)
    first = text(0, B)
    unlike = iter(range(1, 100))
    while radix.key_of(array("i", first)) in root.children:
        server.ask(text(next(unlike), 200), 2)
    server.ask(text(0, 70), 2)
    assert root.children[radix.key_of(array("i", first))].hits == 2


def test_a_prefix_that_was_hot_once_does_not_stay_for_ever() -> None:
    server = Server(num_blocks=64)
    for _ in range(30):
        server.ask(text(0, 256), 2)
    for i in range(64 * 80 // 12):
        server.ask(text(1 + i, 200), 2)
    assert server.ask(text(0, 256), 2).cached < 16
    assert server.scheduler.cache.counters.evicted_reused_blocks >= 15


def test_a_prefix_loses_its_tail_first() -> None:
    server = Server(num_blocks=32)
    server.ask(text(0, 256), 2)
    server.ask(text(1, 300), 2)
    left = server.ask(text(0, 256), 2).cached
    assert 0 < left < 255 and left % B == 0


def test_tokens_decide_where_all_digests_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest names what was dropped, for the counters; it never stands for tokens."""
    for module in (radix, prefix):
        monkeypatch.setattr(module, "digest_of", lambda parent, key: b"the same")
    server = Server(num_blocks=40, budget=64)
    rng = random.Random(0)
    requests = []
    for _ in range(60):
        stem, salt = rng.randrange(4), rng.choice(["", "a"])
        requests.append(server.submit(text(stem, rng.randint(1, 90)) + text(rng.randrange(9), 9), 6, salt))
        server.step()
    server.run()
    for r in requests:
        server.check(r)
    assert server.scheduler.cache.counters.hit_tokens > 1000
    assert server.scheduler.cache.counters.evicted_blocks > 50


def test_why_nothing_was_found_is_counted() -> None:
    server = Server(num_blocks=32)
    server.ask(text(0, 100))  # differs from nothing at all
    server.ask(text(0, 100))  # found
    server.ask(text(0, 100), rate=True)  # skipped
    server.ask([999, 999])  # too short
    server.ask(text(1, 500), 2)  # everything else is dropped
    server.ask(text(0, 100))  # evicted
    c = server.scheduler.cache.counters
    assert c.misses == {Miss.DIFFERS: 2, Miss.SKIPPED: 1, Miss.TOO_SHORT: 1, Miss.EVICTED: 1}
    assert (c.queries, c.hits, c.hit_tokens, c.queried_tokens) == (6, 1, 96, 902)


def test_preempted_requests_come_back_by_a_hit_and_are_not_counted_as_one() -> None:
    server = Server(num_blocks=64, budget=64)
    old, young = server.submit(text(1, 480), 300), server.submit(text(2, 480), 300)
    server.run()
    server.check(old)
    server.check(young)
    assert young.preemptions >= 1 and server.scheduler.cache.counters.queries == 2
    assert young.cached == 0
    assert not any(node.hits for node in server.scheduler.cache.tree.nodes()), "nobody else wanted what they computed"
    assert server.computed < 2 * 780 + 480, "resuming costs less than computing the prompt again"
