"""The tree alone: which prefix is found, against a search of everything that was put in."""

from __future__ import annotations

import random
from array import array
from itertools import takewhile

import pytest

from potok.core.radix import BYTES, Domain, RadixNode, RadixTree, common_tokens, key_of


def key(*tokens: int) -> bytes:
    return key_of(array("i", tokens))


def shared(a: list[int], b: list[int]) -> list[int]:
    return [x for x, y in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]


def put(tree: RadixTree, domain: Domain, tokens: list[int], first_block: int) -> RadixNode:
    """Adds the whole blocks of `tokens` that are missing, with block numbers from `first_block` on."""
    whole = key(*tokens)
    node = tree.descend(tree.link_root(domain), whole)
    width = 4 * BYTES
    for at in range(node.end * BYTES, len(whole) // width * width, width):
        node = tree.add(node, whole[at : at + width], first_block)
        first_block += 1
    return node


def test_keys_sort_as_tokens_do() -> None:
    rng = random.Random(0)
    lists = [
        [rng.choice([0, 1, 255, 256, 257, 65536, 2**31 - 1]) for _ in range(rng.randint(0, 5))] for _ in range(300)
    ]
    assert sorted(lists) == sorted(lists, key=lambda tokens: key(*tokens))


def test_tokens_in_common() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        a, b = ([rng.choice([0, 1, 256, 2**30]) for _ in range(rng.randint(0, 6))] for _ in range(2))
        assert common_tokens(key(*a), key(*b)) == len(shared(a, b))


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_prefix_is_found_among_all(seed: int) -> None:
    rng, tree, domain = random.Random(seed), RadixTree(4), Domain()
    known: list[list[int]] = []
    for i in range(300):
        stem = rng.choice(known)[: rng.randint(0, 12)] if known and rng.random() < 0.7 else []
        tokens = stem + [rng.randrange(3) for _ in range(rng.randint(0, 12))]
        best = max((len(shared(tokens, k)) for k in known), default=0)
        node = tree.descend(tree.find_root(domain), key(*tokens))
        rest = key(*tokens[node.end :])
        neighbour = tree.best_neighbour(node, rest)
        assert node.end + (neighbour[1] if neighbour else 0) == best
        assert [t for n in list(node.path())[::-1] for t in array_of(n.key)] == tokens[: node.end]
        put(tree, domain, tokens, 100 * i)
        known.append(tokens[: len(tokens) // 4 * 4])
    assert len(tree) > 100


def array_of(key: bytes) -> list[int]:
    return [int.from_bytes(key[i : i + BYTES]) for i in range(0, len(key), BYTES)]


def test_tokens_that_look_alike_do_not_meet() -> None:
    """Equal modulo 256; digits that could be joined otherwise; the same block under another parent."""
    tree, domain = RadixTree(4), Domain()
    put(tree, domain, [65] * 4, 0)
    put(tree, domain, [1, 23, 4, 5, 9, 9, 9, 9], 10)
    root = tree.find_root(domain)
    for tokens in ([321] * 4, [12, 3, 4, 5], [1, 2, 34, 5], [9, 9, 9, 9]):
        assert tree.descend(root, key(*tokens)) is root
        assert tree.best_neighbour(root, key(*tokens)) is None or tokens[0] == 1


def test_domains_do_not_meet_and_their_fields_are_not_joined() -> None:
    domains = [
        Domain(),
        Domain(salt="x"),
        Domain(adapter="x"),
        Domain(namespace="x"),
        Domain(salt="a", adapter="bc"),
        Domain(salt="ab", adapter="c"),
        Domain(salt="ab, 'c'"),
        Domain(epoch=1),
    ]
    tree = RadixTree(4)
    nodes = [put(tree, domain, [7] * 8, 10 * i) for i, domain in enumerate(domains)]
    for domain, node in zip(domains, nodes, strict=True):
        assert tree.descend(tree.find_root(domain), key(*[7] * 8)) is node
    assert len({node.block for node in nodes}) == len({node.digest for node in nodes}) == len(domains)


def test_a_removed_leaf_is_gone_and_its_siblings_are_not() -> None:
    tree, domain = RadixTree(4), Domain()
    leaves = [put(tree, domain, [1, 2, 3, 4, 5, 6, 7, i], 10 * i + 1) for i in range(1, 6)]
    parent = leaves[0].parent
    assert parent is not None and len(parent.children) == 5
    with pytest.raises(AssertionError, match="only leaves"):
        tree.remove(parent)
    tree.remove(leaves[2])
    root = tree.find_root(domain)
    assert tree.descend(root, key(1, 2, 3, 4, 5, 6, 7, 3)) is parent
    assert tree.node_of(leaves[2].block) is None
    assert tree.descend(root, key(1, 2, 3, 4, 5, 6, 7, 4)) is leaves[3]
    assert tree.best_neighbour(parent, key(5, 6, 7, 3)) in ((leaves[1], 3), (leaves[3], 3))
