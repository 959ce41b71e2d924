"""The order in which cached blocks go, in values that can be followed by hand."""

from __future__ import annotations

from array import array

from potok.core.eviction import MOST_HITS, REUSE, EvictionOrder
from potok.core.radix import COMMON, RadixNode, RadixTree, key_of


def leaves(num: int) -> list[RadixNode]:
    """Computed once, one after the other."""
    tree = RadixTree(1)
    root = tree.link_root(COMMON)
    return [tree.add(root, key_of(array("i", [i])), block=i) for i in range(num)]


def anything(node: RadixNode) -> bool:
    return True


def test_the_least_worth_goes_first_by_what_it_is_worth_now() -> None:
    order, (a, b, c) = EvictionOrder(), leaves(3)
    for node in (a, b, c):
        order.touch(node, 0)
        order.offer(node)
    order.touch(a, 1)  # hit, and idle again: what it was worth before does not count
    order.offer(a)
    assert [node.value for node in (a, b, c)] == [1 + REUSE, 1, 1]
    assert [order.pop(anything) for _ in range(3)] == [b, c, a]
    assert order.clock == 1 + REUSE and len(order) == 0


def test_a_newcomer_is_worth_more_than_what_went_before_it() -> None:
    order, (a, b, c) = EvictionOrder(), leaves(3)
    for node, hits in ((a, 2), (b, 1)):
        order.touch(node, hits)
        order.offer(node)
    assert order.pop(anything) is b
    order.touch(c, 0)
    order.offer(c)
    assert (a.value, c.value) == (1 + 2 * REUSE, 1 + REUSE + 1)
    assert [order.pop(anything) for _ in range(2)] == [c, a]


def test_merit_is_bounded() -> None:
    order, (a,) = EvictionOrder(), leaves(1)
    for _ in range(3 * MOST_HITS):
        order.touch(a, 1)
    assert (a.hits, a.value) == (MOST_HITS, 1 + REUSE * MOST_HITS)


def test_what_is_needed_is_passed_over_and_stale_entries_do_not_pile_up() -> None:
    order, (a, b) = EvictionOrder(), leaves(2)
    for _ in range(50):
        for node in (a, b):
            order.touch(node, 0)
            order.offer(node)
    order.compact(anything, 100)
    assert len(order) == 100, "as many as allowed"
    order.compact(lambda node: node is b, 99)
    assert len(order) == 1 and order.holds(b) and not order.holds(a)
    order.offer(a)
    assert order.pop(lambda node: node is b) is b
