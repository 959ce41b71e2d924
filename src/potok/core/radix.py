"""The radix tree of computed prefixes: which tokens lead to which KV block.

An edge is one whole block: its tokens, as bytes that sort as the tokens do. So the way down a prefix is one dictionary
lookup for each block, and the sibling that shares most of a last, partial block is a neighbour in sorted order. Tokens
themselves are the keys and are compared on every hit: there is no hash that two prefixes could share.

Below a domain's root no two nodes stand for the same tokens, and different domains never meet.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

BYTES = 4  # of a token in a key
DIGEST_BYTES = 16


class Domain(NamedTuple):
    """Who may share KV with whom: all fields equal, compared one by one, never joined into one text.

    epoch: of the model that is loaded. adapter: its name, or empty. namespace: of the API key. salt: the caller's own.
    """

    epoch: int = 0
    adapter: str = ""
    namespace: str = ""
    salt: str = ""


#: Of requests that said nothing.
COMMON = Domain()


def key_of(tokens: array[int]) -> bytes:
    """Tokens as bytes whose order is the order of the tokens: big-endian, 4 bytes each."""
    assert tokens.itemsize == BYTES
    if sys.byteorder == "little":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """How many tokens two keys begin with alike."""
    n = min(len(a), len(b))
    differing = int.from_bytes(a[:n]) ^ int.from_bytes(b[:n])
    return (n - (differing.bit_length() + 7) // 8) // BYTES


def digest_of(parent: bytes, key: bytes) -> bytes:
    """Names the prefix that ends with `key`, in this process and in any other."""
    return blake2b(parent + key, digest_size=DIGEST_BYTES).digest()


class RadixNode:
    """One cached block. end: tokens of the prefix up to and with it. hits, value: see potok.core.eviction."""

    __slots__ = ("block", "children", "digest", "end", "hits", "key", "order", "parent", "value")

    def __init__(self, parent: RadixNode | None, key: bytes, block: int, digest: bytes) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.digest = digest
        self.end: int = 0 if parent is None else parent.end + len(key) // BYTES
        self.children: dict[bytes, RadixNode] = {}
        self.order: list[bytes] = []  # keys of the children, sorted
        self.hits = 0
        self.value = 0

    def path(self) -> Iterator[RadixNode]:
        """This node and those above it, without the root."""
        node: RadixNode | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


class Root(RadixNode):
    """The empty prefix of a domain. It has no block."""

    __slots__ = ("domain",)

    def __init__(self, domain: Domain) -> None:
        name = repr(tuple(domain)).encode()
        super().__init__(None, b"", -1, digest_of(b"", name))
        self.domain = domain


class RadixTree:
    """Roots by domain. Only reading and linking: which blocks are held, and what is dropped, is decided elsewhere."""

    def __init__(self, block_size: int) -> None:
        self._width = block_size * BYTES
        self._roots: dict[Domain, Root] = {}
        self._by_block: dict[int, RadixNode] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    @property
    def num_roots(self) -> int:
        return len(self._roots)

    def find_root(self, domain: Domain) -> Root:
        """The domain's root; one that is not part of the tree where nothing of the domain is cached."""
        return self._roots.get(domain) or Root(domain)

    def link_root(self, domain: Domain) -> Root:
        return self._roots.setdefault(domain, Root(domain))

    def forget_root(self, root: Root) -> None:
        """A domain that comes once leaves nothing behind."""
        assert not root.children, "a root with children is part of the tree"
        del self._roots[root.domain]

    def node_of(self, block: int) -> RadixNode | None:
        return self._by_block.get(block)

    def nodes(self) -> Iterator[RadixNode]:
        return iter(self._by_block.values())

    def descend(self, node: RadixNode, key: bytes) -> RadixNode:
        """The deepest node whose whole tokens `key` begins with; key: of all tokens from the root on."""
        width = self._width
        at = node.end * BYTES
        while at + width <= len(key):
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            node, at = child, at + width
        return node

    def best_neighbour(self, node: RadixNode, rest: bytes) -> tuple[RadixNode, int] | None:
        """The child that shares most tokens with `rest`, which is shorter than a block or no child's; and how many."""
        i = bisect_left(node.order, rest)
        best = None
        for key in node.order[max(0, i - 1) : i + 1]:
            n = common_tokens(key, rest)
            if n > 0 and (best is None or n > best[1]):
                best = (node.children[key], n)
        return best

    def add(self, parent: RadixNode, key: bytes, block: int) -> RadixNode:
        assert len(key) == self._width and key not in parent.children and block not in self._by_block
        node = RadixNode(parent, key, block, digest_of(parent.digest, key))
        parent.children[key] = node
        insort(parent.order, key)
        self._by_block[block] = node
        return node

    def remove(self, node: RadixNode) -> None:
        """Takes a leaf out."""
        parent = node.parent
        assert parent is not None and not node.children, "only leaves are taken out"
        del parent.children[node.key]
        del parent.order[bisect_left(parent.order, node.key)]
        del self._by_block[node.block]
