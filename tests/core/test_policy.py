"""Who comes first under each policy, who makes way, and that nobody starves."""

from __future__ import annotations

import random

import pytest
from kv_oracle import Executor, answer, request, step

from potok.core.batch import Segment
from potok.core.blocks import BlockPool
from potok.core.policy import Fair, LongestPrefix, Policy, Priority, Shortest
from potok.core.prefix import PrefixCache
from potok.core.radix import Domain
from potok.core.request import Phase, Request
from potok.core.scheduler import Limits, Scheduler


def scheduler(policy: Policy, *, seqs: int = 1, num_blocks: int = 64, no_evict: bool = False) -> Scheduler:
    return Scheduler(Limits(seqs, 64, 1000, 4, no_evict), num_blocks, policy=policy, checked=True)


def submit(
    s: Scheduler, id: int, *, prompt: int = 4, new: int = 3, key: str = "", at: int = 0, priority: int = 0
) -> Request:
    r = request(id, [id % 6] * prompt, new)
    r.domain, r.arrived_us, r.priority = Domain(namespace=key), at, priority
    assert s.submit(r) is None
    return r


def ends(s: Scheduler, executor: Executor) -> list[int]:
    """Ids in the order in which they end."""
    order = []
    while (batch := s.schedule(0)) is not None:
        order += [d.id for d in s.commit(batch, executor.run(batch), 1) if d.finish is not None]
        assert s.counters.steps < 10_000
    return order


def test_first_come_first_served() -> None:
    s = scheduler(Policy())
    for id in range(4):
        submit(s, id, key="ab"[id % 2], priority=-id)
    assert ends(s, Executor(4)) == [0, 1, 2, 3]


def test_lower_numbers_first_and_among_equals_the_older() -> None:
    s = scheduler(Priority())
    for id, priority in enumerate([0, 2, -1, 0, 2]):
        submit(s, id, priority=priority)
    assert ends(s, Executor(4)) == [2, 0, 3, 1, 4]


def test_running_request_makes_way_for_a_more_urgent_one_and_for_no_other() -> None:
    s, executor = scheduler(Priority(), seqs=2), Executor(4)
    low, middle = submit(s, 0, new=30, priority=5), submit(s, 1, new=30, priority=3)
    for _ in range(6):
        step(s, executor)
    equal = submit(s, 2, priority=3)
    step(s, executor)
    assert equal.phase is Phase.RUNNING and low.phase is Phase.WAITING, "the lowest makes way first"
    high = submit(s, 3, priority=0)
    step(s, executor)
    assert high.phase is Phase.RUNNING and equal.phase is Phase.WAITING and middle.phase is Phase.RUNNING
    submit(s, 4, priority=4)
    step(s, executor)
    assert s.running == [high, middle]
    while step(s, executor) is not None:
        pass
    assert (high.preemptions, middle.preemptions) == (0, 0)
    for r in (low, middle, equal, high):
        assert list(r.tokens[4:]) == answer(r.tokens[:4], r.max_new, frozenset(), 1000)


def test_equal_or_a_higher_one_never_makes_way_and_the_lowest_does_first() -> None:
    policy = Priority()

    def ranked(id: int, priority: int, at: int) -> Request:
        r = request(id, [1], 1)
        r.order, r.priority, r.arrived_us = id, priority, at
        r.rank = policy.rank(r)
        return r

    running = [ranked(1, 6, 2), ranked(2, 7, 3), ranked(3, 5, 1), ranked(4, 5, 10**9), ranked(5, 0, 10**9)]
    running.sort(key=lambda r: r.rank)
    assert [r.id for r in policy.yields(ranked(0, 5, 0), running, 8)] == [2, 1]


def test_nobody_makes_way_for_one_that_there_is_no_room_for() -> None:
    s, executor = scheduler(Priority(), seqs=2, num_blocks=200), Executor(4)
    low = submit(s, 0, new=50, priority=9)
    step(s, executor)
    submit(s, 1, prompt=500)
    step(s, executor)
    middle = submit(s, 2, prompt=100, priority=3)
    step(s, executor)
    assert low.phase is Phase.RUNNING and middle.phase is Phase.WAITING, "the long prompt comes before it"


def test_full_pool_makes_way_only_when_that_helps() -> None:
    s, executor = scheduler(Priority(), seqs=8, num_blocks=20), Executor(4)
    high, low = submit(s, 0, prompt=40, new=20, priority=0), submit(s, 1, prompt=20, new=8, priority=5)
    step(s, executor)
    assert len(s.running) == 2
    big = submit(s, 2, prompt=60, new=4, priority=1)  # it needs more than the low one has
    step(s, executor)
    assert s.running == [high, low] and low.preemptions == 0
    fitting = submit(s, 3, prompt=24, new=4, priority=0)
    step(s, executor)
    assert s.running == [high, fitting] and low.preemptions == 1
    while step(s, executor) is not None:
        pass
    assert high.preemptions == 0 and big.phase is Phase.FINISHED and low.phase is Phase.FINISHED


def test_blocks_that_the_newcomer_shares_are_not_counted_as_gained() -> None:
    s, executor = scheduler(Priority(), seqs=8, num_blocks=20), Executor(4)
    high, low = submit(s, 1, prompt=27, new=5), submit(s, 0, prompt=39, new=9, priority=5)
    for _ in range(3):
        step(s, executor)
    head = request(2, [*low.tokens[:40], *range(11)], 5)
    assert s.submit(head) is None
    step(s, executor)
    assert s.running == [high, low] and head.phase is Phase.WAITING
    while step(s, executor) is not None:
        pass
    assert s.counters.preemptions == 0


def test_blocks_that_several_share_are_gained_when_all_of_them_make_way() -> None:
    s, executor = scheduler(Priority(), seqs=8, num_blocks=20), Executor(4)
    low = [request(id, [3] * 40, 20) for id in range(2)]
    for r in low:
        r.priority = 5
        assert s.submit(r) is None
        step(s, executor)
    step(s, executor)
    assert s.running == low
    urgent = submit(s, 2, prompt=50, new=5)
    step(s, executor)
    assert s.running == [urgent] and [r.preemptions for r in low] == [1, 1]


@pytest.mark.parametrize("seqs", [1, 4])
@pytest.mark.parametrize("length", [20, 100])
def test_urgent_prompt_does_not_wait_for_the_long_one_of_a_low_request(seqs: int, length: int) -> None:
    s, executor = scheduler(Priority(), seqs=seqs, num_blocks=200), Executor(4)
    low = submit(s, 0, prompt=500, priority=5)
    step(s, executor)
    high = submit(s, 1, prompt=length)
    for _ in range(1 + length // 64):
        step(s, executor)
    assert high.phase is Phase.RUNNING and len(high.tokens) == length + 1, "nothing came before it"
    assert low.preemptions == (seqs == 1)


def test_who_comes_next_is_passed_by_count_and_not_by_right() -> None:
    s, executor = scheduler(Priority(), seqs=8, num_blocks=20), Executor(4)
    submit(s, 0, prompt=40, new=20)
    step(s, executor)
    big, small = submit(s, 1, prompt=50), submit(s, 2)
    step(s, executor)
    assert small.phase is Phase.RUNNING and big.overtaken == 1


def test_nobody_is_preempted_when_that_was_ruled_out() -> None:
    s, executor = scheduler(Priority(), no_evict=True), Executor(4)
    low = submit(s, 0, new=9, priority=5)
    step(s, executor)
    submit(s, 1, priority=0)
    while step(s, executor) is not None:
        pass
    assert low.preemptions == 0 and s.counters.preemptions == 0


def test_endless_stream_of_urgent_requests_does_not_starve_a_low_one() -> None:
    s, executor = scheduler(Priority()), Executor(4)
    low = submit(s, 0, new=20, at=0, priority=3)
    second = 1_000_000
    for i in range(1, 200):
        if low.phase is Phase.FINISHED:
            break
        submit(s, i, new=4, at=i * second, priority=0)
        for _ in range(4):
            step(s, executor)
    # Three numbers above the others it counts as 30 s younger: those after that come after it.
    assert low.phase is Phase.FINISHED and 30 <= i <= 40


def test_few_tokens_first_but_waiting_counts() -> None:
    s = scheduler(Shortest())
    submit(s, 0, prompt=40, new=60)  # 100 tokens: as if it arrived a second later
    submit(s, 1, prompt=4, new=6, at=500_000)
    submit(s, 2, prompt=4, new=6, at=1_500_000)
    submit(s, 3, prompt=4, new=5, at=500_000)
    assert ends(s, Executor(4)) == [3, 1, 0, 2]


@pytest.mark.parametrize(("policy", "place"), [(Policy, 20), (Fair, 2)])
def test_one_request_of_another_key_waits_for_its_turn_only(policy: type[Policy], place: int) -> None:
    s = scheduler(policy())
    for id in range(20):
        submit(s, id, key="a")
    executor = Executor(4)
    step(s, executor)
    submit(s, 20, key="b")
    found = ends(s, executor).index(20)
    assert found <= place if policy is Fair else found == place


def test_key_with_less_than_its_seats_takes_one_from_the_key_with_the_most() -> None:
    s, executor = scheduler(Fair(), seqs=4, num_blocks=200), Executor(4)
    mine = [submit(s, id, new=60, key="a") for id in range(6)]
    step(s, executor)
    assert len(s.running) == 4
    one = submit(s, 6, new=5, key="b")
    step(s, executor)
    assert one.phase is Phase.RUNNING and [r.preemptions for r in mine] == [0, 0, 0, 1, 0, 0]
    others = [submit(s, 7 + i, new=5, key="b") for i in range(4)]
    for _ in range(3):
        step(s, executor)
    running = [r.domain.namespace for r in s.running]
    assert running.count("a") == running.count("b") == 2, "half of the seats each"
    while step(s, executor) is not None:
        pass
    for r in (*mine, one, *others):
        assert list(r.tokens[4:]) == answer(r.tokens[:4], r.max_new, frozenset(), 1000)
    assert s.counters.preemptions <= 3


def test_prompt_under_way_is_not_held_up_by_an_older_one_of_a_key_that_has_had_more() -> None:
    s, executor = scheduler(Fair(), seqs=4, num_blocks=400), Executor(4)
    for id in range(4):
        submit(s, id, new=6 + 40 * (id > 1), key="a")
    older = submit(s, 4, prompt=300, key="a")
    step(s, executor)
    mine = submit(s, 5, prompt=500, key="b")
    while len(mine.tokens) == 500:
        assert older.phase is Phase.WAITING
        step(s, executor)
        assert s.counters.steps < 20
    assert older.phase is Phase.RUNNING, "there was a seat for it, and the last step had room"


def test_seats_that_are_free_are_not_given_to_be_taken_away_again() -> None:
    s, executor = scheduler(Fair(), seqs=4, num_blocks=200), Executor(4)
    submit(s, 0, prompt=40, new=9, key="a")
    for id in range(1, 6):
        submit(s, id, key="b", new=9)
    submit(s, 6, key="a", new=9)
    step(s, executor)
    assert [r.id for r in s.running] == [0, 1, 2, 6] and s.counters.preemptions == 0
    while step(s, executor) is not None:
        pass
    assert s.counters.preemptions == 0


SAME = ((30, 20),) * 3
LONG_SHORT_AND_BOTH = ((40, 2), (2, 30), (20, 15))


@pytest.mark.parametrize(("seqs", "most"), [(3, SAME), (1, LONG_SHORT_AND_BOTH)])
def test_keys_get_equal_service_whatever_they_send(seqs: int, most: tuple[tuple[int, int], ...]) -> None:
    """most: tokens of prompts and answers, for each key."""
    rng, s, executor = random.Random(1), scheduler(Fair(), seqs=seqs, num_blocks=300), Executor(4)
    served = {"a": 0, "b": 0, "c": 0}
    requests: dict[int, Request] = {}
    id = 0
    for _ in range(2000):
        for (key, waiting), (prompt, new) in zip({"a": 40, "b": 6, "c": 3}.items(), most, strict=True):
            while sum(r.domain.namespace == key for r in s.waiting) < waiting:
                requests[id] = submit(s, id, prompt=rng.randint(1, prompt), new=rng.randint(1, new), key=key)
                id += 1
        batch = s.schedule(0)
        assert batch is not None
        for x in batch.segments:
            served[requests[x.id].domain.namespace] += len(x.tokens) + x.sample
        s.commit(batch, executor.run(batch), 1)
    assert max(served.values()) <= 1.03 * min(served.values()), served


def order_of(fair: Fair, *waiting: tuple[str, int], seats: int = 1) -> str:
    """Keys in the order in which their requests of so many tokens, the oldest first, would join when nobody runs."""
    queue = []
    for i, (key, tokens) in enumerate(waiting):
        r = request(i, [1] * tokens, 1)
        r.domain, r.rank = Domain(namespace=key), (i, 0)
        queue.append(r)
    cache = PrefixCache(BlockPool(1), 4)
    return "".join(r.domain.namespace for r in fair.order(queue, [], seats, cache))


def of(key: str) -> Request:
    r = request(0, [1], 1)
    r.domain = Domain(namespace=key)
    return r


def charge(fair: Fair, key: str, tokens: int) -> None:
    fair.account([Segment(0, 0, [1] * tokens, [], False)], [of(key)])


def test_keys_take_turns_as_if_charged_for_the_prompts_that_join() -> None:
    fair = Fair()
    for key in "ab":
        fair.arrive(of(key))
    assert order_of(fair, ("a", 9), ("a", 9), ("a", 9), ("b", 12), ("b", 1), seats=8) == "ababa"


def test_key_that_leaves_for_a_moment_still_owes_what_it_had() -> None:
    fair = Fair()
    for key in "ab":
        fair.arrive(of(key))
    charge(fair, "a", 100)
    fair.leave(of("a"))
    fair.arrive(of("a"))
    assert order_of(fair, ("a", 5), ("b", 5)) == "ba"


def test_key_that_has_had_less_does_not_lose_that_by_sending_more() -> None:
    fair = Fair()
    for key in "ab":
        fair.arrive(of(key))
    charge(fair, "b", 100)
    fair.arrive(of("a"))
    assert order_of(fair, ("b", 5), ("a", 5)) == "ab"


def test_nobody_owes_anything_once_all_have_left() -> None:
    fair = Fair()
    fair.arrive(of("a"))
    charge(fair, "a", 100)
    fair.leave(of("a"))
    for key in "ba":
        fair.arrive(of(key))
    assert order_of(fair, ("b", 5), ("b", 5), ("a", 5), seats=8) == "bab"


def test_with_more_keys_than_seats_each_has_one_at_most() -> None:
    s, executor = scheduler(Fair(), seqs=2, num_blocks=200), Executor(4)
    for id, key in enumerate("aabc"):
        submit(s, id, new=50, key=key)
        if key == "a":
            step(s, executor)
    for _ in range(3):
        step(s, executor)
    assert [r.domain.namespace for r in s.running] == ["a", "b"]


@pytest.mark.parametrize("cancelled", [True, False])
def test_key_that_has_left_has_no_part_of_the_seats(cancelled: bool) -> None:
    s, executor = scheduler(Fair(), seqs=4, num_blocks=200), Executor(4)
    submit(s, 0, new=90 if cancelled else 1, key="a")
    step(s, executor)
    s.cancel(0)
    for id, key in enumerate("bbbbcc", 1):
        submit(s, id, new=50, key=key)
        step(s, executor)
    assert [r.domain.namespace for r in s.running] == list("bbcc")


def test_key_that_comes_back_has_saved_nothing_up() -> None:
    s, executor = scheduler(Fair()), Executor(4)
    submit(s, 0, key="late")
    ends(s, executor)
    for id in range(1, 30):
        submit(s, id, key="busy")
    for _ in range(60):
        step(s, executor)
    for id in range(100, 110):
        submit(s, id, key="late")
    order = ends(s, executor)
    first = ["late" if id >= 100 else "busy" for id in order[:8]]
    assert first.count("late") <= 5, first


@pytest.mark.parametrize("policy", [Policy, LongestPrefix, Priority, Shortest, Fair])
def test_big_request_passes_small_ones_that_came_much_later(policy: type[Policy]) -> None:
    """A nearly full pool, a big request at the head, and small ones without end behind it."""
    s, executor = scheduler(policy(), seqs=8, num_blocks=40), Executor(4)
    submit(s, 0, prompt=100, new=40)
    step(s, executor)
    step(s, executor)
    big = submit(s, 1, prompt=120, new=5, at=1)
    id, small = 2, []
    while big.phase is Phase.WAITING:
        if len(s.waiting) < 5:
            small.append(submit(s, id, prompt=24, new=2, at=2 + id * 1_000_000))
            id += 1
        step(s, executor)
        assert s.counters.steps < 400, "the big one starves"
    assert any(r.phase is Phase.FINISHED for r in small), "nobody small went past"
