"""Which prefixes the cache holds, for people who want to know what it is good for."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from heapq import nlargest
from typing import NamedTuple

from potok.core.radix import Domain, RadixNode, RadixTree, Root

#: Tokens of a prefix that are named.
HEAD_TOKENS = 64


class Prefix(NamedTuple):
    """head: its first tokens. num_blocks: whole blocks from the root on. hits: of its last block."""

    domain: Domain
    head: list[int]
    num_tokens: int
    num_blocks: int
    hits: int


def top_prefixes(tree: RadixTree, top: int, namespace: str | None = None) -> list[Prefix]:
    """The `top` prefixes that have saved most: by hits times tokens, then by length, then by block number.

    A prefix is named where its use ends: at a block that was hit more often than every block after it, or that has
    none. So a system prompt with a thousand different questions is one entry, and each question behind it another.
    namespace: of which API key; None: of all. Reads every node once.
    """
    ends = (node for node in _ends(tree) if namespace is None or _root(node).domain.namespace == namespace)
    best = nlargest(top, ends, key=lambda node: (node.hits * node.end, node.end, -node.block))
    return [_prefix(node) for node in best]


def _ends(tree: RadixTree) -> Iterator[RadixNode]:
    for node in tree.nodes():
        if all(child.hits < node.hits for child in node.children.values()):
            yield node


def _root(node: RadixNode) -> Root:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node


def _prefix(node: RadixNode) -> Prefix:
    path = list(node.path())
    head: list[int] = []
    for above in reversed(path):
        if len(head) >= HEAD_TOKENS:
            break
        head += tokens_of(above.key)
    return Prefix(_root(node).domain, head[:HEAD_TOKENS], node.end, len(path), node.hits)


def tokens_of(key: bytes) -> array[int]:
    """The tokens of a key: undoes radix.key_of."""
    tokens = array("i", key)
    if sys.byteorder == "little":
        tokens.byteswap()
    return tokens
