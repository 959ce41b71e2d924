"""Where weights lie, as the kernel tells: on huge or small pages, spread over memory nodes or not."""

from __future__ import annotations

import ctypes
import platform
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from potok._native import Replay
from potok.backends.native.backend import NativeBackend
from potok.errors import LoadError
from potok.weights.default_model import find_default_model
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config

MAPS = Path("/proc/self/numa_maps")
SMAPS = Path("/proc/self/smaps")
PREFERRED = 1  # of linux/mempolicy.h
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}.get(platform.machine())

needs_nodes = pytest.mark.skipif(not MAPS.exists(), reason="this kernel does not know memory nodes")


def spread_mappings() -> int:
    return len(re.findall(r"interleave:0", MAPS.read_text()))


def replay(nodes: list[int], huge_pages: bool = True) -> Replay:
    """With some memory in its arena."""
    made = Replay("scalar", 1, huge_pages, nodes)
    made.add_vector(np.ones(1 << 20, np.float32))
    return made


@needs_nodes
def test_memory_is_spread_over_several_nodes() -> None:
    before = spread_mappings()
    # The one node that every machine has, twice: what the kernel is asked for is the same as for two.
    held = replay([0, 0])
    assert spread_mappings() > before
    del held
    assert spread_mappings() == before


@needs_nodes
@pytest.mark.parametrize("nodes", [[], [0]])
def test_one_node_is_left_alone(nodes: list[int]) -> None:
    before = spread_mappings()
    held = replay(nodes)
    assert spread_mappings() == before
    del held


@needs_nodes
def test_a_policy_that_somebody_chose_stands() -> None:
    """As under numactl; here it is one thread's."""
    before = spread_mappings()
    found: list[int] = []

    def thread() -> None:
        assert ctypes.CDLL(None).syscall(SET_MEMPOLICY, PREFERRED, None, 0) == 0
        # MPOL_PREFERRED without a node is "local", a policy of its own.
        held = replay([0, 0])
        found.append(spread_mappings())
        del held

    worker = threading.Thread(target=thread)
    worker.start()
    worker.join()
    assert found == [before]


@pytest.mark.skipif(not SMAPS.exists(), reason="this system does not tell how memory is mapped")
@pytest.mark.parametrize(("huge_pages", "flag"), [(True, "hg"), (False, "nh")])
def test_huge_pages_are_asked_for_or_declined(huge_pages: bool, flag: str) -> None:
    def mappings() -> int:
        return len(re.findall(rf"^VmFlags:.* {flag}\b", SMAPS.read_text(), re.MULTILINE))

    before = mappings()
    held = replay([], huge_pages)
    assert mappings() > before
    del held


def test_the_environment_decides_about_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTOK_HUGE_PAGES", "perhaps")
    file = GGUFFile.open(find_default_model())
    with pytest.raises(LoadError, match="POTOK_HUGE_PAGES"):
        NativeBackend(file, read_config(file), threads=1, activation_bits=8, block_size=32)
