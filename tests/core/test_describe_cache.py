"""Which prefixes of the cache are named, and in which order."""

from __future__ import annotations

import time
from array import array

import pytest

from potok.core.describe import HEAD_TOKENS, Prefix, tokens_of, top_prefixes
from potok.core.radix import BYTES, Domain, RadixNode, RadixTree, key_of
from potok.core.request import Request
from potok.core.scheduler import Limits, Scheduler

B = 4
COMMON, ALICE = Domain(), Domain(namespace="alice", salt="s")


class Tree:
    """A tree that is filled as if requests had come; blocks are numbered as they are added."""

    def __init__(self) -> None:
        self.tree = RadixTree(B)
        self.blocks = 0

    def put(self, tokens: list[int], domain: Domain = COMMON) -> None:
        """A request that comes: a hit for all that is there, and the rest is added."""
        key = key_of(array("i", tokens))
        node: RadixNode = self.tree.descend(self.tree.link_root(domain), key)
        for above in node.path():
            above.hits += 1
        for at in range(node.end * BYTES, len(key) // (B * BYTES) * B * BYTES, B * BYTES):
            node = self.tree.add(node, key[at : at + B * BYTES], self.blocks)
            self.blocks += 1


@pytest.fixture
def busy() -> Tree:
    """Two blocks that five share, a third that two of them go on with, and one of another domain."""
    tree = Tree()
    for i in range(3):
        tree.put([1, 1, 1, 1, 2, 2, 2, 2, 10 + i, 0, 0, 0])
    for i in range(2):
        tree.put([1, 1, 1, 1, 2, 2, 2, 2, 7, 7, 7, 7, 20 + i, 0, 0, 0])
    tree.put([1, 1, 1, 1], ALICE)
    return tree


def test_a_prefix_is_named_where_its_use_ends(busy: Tree) -> None:
    shared = [1, 1, 1, 1, 2, 2, 2, 2]
    found = top_prefixes(busy.tree, 100)
    assert found[0] == Prefix(COMMON, shared, 8, 2, 4)
    assert found[1] == Prefix(COMMON, [*shared, 7, 7, 7, 7], 12, 3, 1)
    assert [(p.num_tokens, p.hits) for p in found[2:]] == [(16, 0), (16, 0), (12, 0), (12, 0), (12, 0), (4, 0)]
    assert found[-1].domain == ALICE
    assert top_prefixes(busy.tree, 2) == found[:2]


def test_long_ones_count_for_more() -> None:
    tree = Tree()
    for tokens in ([1] * 4, [2] * 12):
        tree.put(tokens)
        tree.put(tokens)
    tree.put([1] * 4)
    assert [(p.num_tokens, p.hits) for p in top_prefixes(tree.tree, 2)] == [(12, 1), (4, 2)]


def test_one_namespace_alone(busy: Tree) -> None:
    assert top_prefixes(busy.tree, 100, "alice") == [Prefix(ALICE, [1, 1, 1, 1], 4, 1, 0)]
    assert len(top_prefixes(busy.tree, 100, "")) == 7
    assert top_prefixes(busy.tree, 100, "bob") == []


def test_a_long_prefix_shows_its_head() -> None:
    tree = Tree()
    tokens = [2**31 - 1 - i for i in range(100)]
    tree.put(tokens)
    assert top_prefixes(tree.tree, 1) == [Prefix(COMMON, tokens[:HEAD_TOKENS], 100, 25, 0)]
    assert top_prefixes(RadixTree(B), 5) == []


def test_keys_are_read_back() -> None:
    tokens = array("i", [0, 1, 255, 256, 65536, 2**31 - 1])
    assert tokens_of(key_of(tokens)) == tokens


def test_a_large_tree_costs_no_long_pause() -> None:
    """The engine does nothing else meanwhile. 40,000 nodes in prompts of 8 blocks: 33 ms of CPU time were measured."""
    tree = Tree()
    for i in range(5000):
        tree.put([i // 50, 0, 0, 0, *[i] * (7 * B)])
    assert len(tree.tree) > 35_000
    started = time.thread_time()
    top_prefixes(tree.tree, 1000)
    assert time.thread_time() - started < 0.5


def test_a_scheduler_tells_of_its_own_cache() -> None:
    scheduler = Scheduler(Limits(4, 64, 64, B), 16)
    for id, domain in enumerate((COMMON, ALICE)):
        scheduler.submit(Request(id, array("i", [id + 1] * 9), 9, 1, domain=domain))
    while (batch := scheduler.schedule(0)) is not None:
        scheduler.commit(batch, [7] * batch.num_sampled, 1)
    assert scheduler.top_prefixes(1, "") == [Prefix(COMMON, [1] * 8, 8, 2, 0)]
    assert {p.domain for p in scheduler.top_prefixes(5)} == {COMMON, ALICE}
    assert len(scheduler.top_prefixes(1)) == 1
