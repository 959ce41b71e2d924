"""Machine facts, read from made-up trees in the layout of /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from potok.engine.machine import Machine, read_machine


class Tree:
    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"

    def write(self, files: dict[str, str]) -> Tree:
        for name, text in files.items():
            path = self.proc.parent / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return self

    def read(self) -> Machine:
        return read_machine(self.proc, self.cgroups)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path).write({"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    4096 kB\n"})


def test_no_control_groups(tree: Tree) -> None:
    machine = tree.read()
    assert (machine.cpu_quota, machine.memory_limit) == (None, None)
    assert machine.memory == machine.available == 4096 * 1024
    assert machine.cores == len(os.sched_getaffinity(0))


def test_version_2_takes_the_tightest_of_all_ancestors(tree: Tree) -> None:
    tree.write(
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "cgroup/outer/cpu.max": "150000 100000\n",
            "cgroup/outer/inner/cpu.max": "max 100000\n",
            "cgroup/outer/memory.max": "max\n",
            "cgroup/outer/memory.current": "5\n",
            "cgroup/outer/inner/memory.max": "1000000\n",
            "cgroup/outer/inner/memory.current": "700000\n",
            "cgroup/outer/inner/memory.stat": "anon 600000\ninactive_file 50000\n",
        }
    )
    machine = tree.read()
    assert machine.cpu_quota == 1.5
    assert machine.memory_limit == machine.available == 350_000


def test_version_1(tree: Tree) -> None:
    tree.write(
        {
            "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box\n0::/\n",
            "cgroup/cpu/box/cpu.cfs_quota_us": "250000\n",
            "cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "cgroup/memory/box/memory.limit_in_bytes": "2000\n",
            "cgroup/memory/box/memory.usage_in_bytes": "1500\n",
            "cgroup/memory/box/memory.stat": "inactive_file 7\ntotal_inactive_file 100\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cgroup/memory/memory.usage_in_bytes": "1\n",
        }
    )
    machine = tree.read()
    assert machine.cpu_quota == 2.5
    assert machine.memory_limit == 600


def test_a_container_that_sees_the_hosts_path_uses_the_mount_itself(tree: Tree) -> None:
    tree.write({"proc/self/cgroup": "0::/docker/abc\n", "cgroup/cpu.max": "50000 100000\n"})
    assert tree.read().cpu_quota == 0.5


def test_used_up_memory_is_zero_not_negative(tree: Tree) -> None:
    tree.write({"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "10\n", "cgroup/memory.current": "20\n"})
    assert tree.read().available == 0


def test_this_machine() -> None:
    machine = read_machine()
    assert machine.cores >= 1
    assert machine.available > 0


def test_nodes_are_those_of_our_cores(tmp_path: Path) -> None:
    """Node 1 has cores that nobody has; node 10 has ours too, and sorts after 2."""
    core = min(os.sched_getaffinity(0))
    for node, cpu in ((0, core), (1, 100_000), (10, core), (2, core)):
        (tmp_path / f"node{node}" / f"cpu{cpu}").mkdir(parents=True)
    (tmp_path / "has_cpu").touch()
    assert read_machine(nodes=tmp_path).nodes == (0, 2, 10)
    assert read_machine(nodes=tmp_path / "nowhere").nodes == ()
