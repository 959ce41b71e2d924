"""What this machine lets us use: read from the kernel, decided by `engine.resolve`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Machine:
    """cores: in the affinity mask. cpu_quota: cores' worth of time that the container may use; None: no quota.

    memory: bytes that can be allocated without swapping. memory_limit: bytes left to the container; None: no limit.
    nodes: memory nodes (NUMA) that these cores belong to, ascending; empty where the kernel does not tell.
    """

    cores: int
    cpu_quota: float | None
    memory: int
    memory_limit: int | None
    nodes: tuple[int, ...] = ()

    @property
    def available(self) -> int:
        """Bytes."""
        return self.memory if self.memory_limit is None else min(self.memory, self.memory_limit)


def read_machine(proc: Path = PROC, cgroups: Path = CGROUPS, nodes: Path = NODES) -> Machine:
    groups = list(_own_groups(proc, cgroups))
    return Machine(
        cores=_cores(),
        cpu_quota=min((quota for group in groups if (quota := _cpu_quota(group)) is not None), default=None),
        memory=_memory(proc),
        memory_limit=min((left for group in groups if (left := _memory_left(group)) is not None), default=None),
        nodes=_nodes(nodes),
    )


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _nodes(folder: Path) -> tuple[int, ...]:
    """Each node has a folder, in it a link to each of its cores."""
    if sys.platform != "linux":
        return ()
    cores = [f"cpu{core}" for core in os.sched_getaffinity(0)]
    found = {int(node.name.removeprefix("node")): node for node in folder.glob("node[0-9]*")}
    return tuple(number for number, node in sorted(found.items()) if any((node / core).exists() for core in cores))


def _memory(proc: Path) -> int:
    """MemAvailable; where there is no such file, three quarters of what the machine has."""
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4


def _own_groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Folders of the control groups that hold this process, and of all their ancestors, version 2 and 1.

    Inside a container the path may be the host's, which is not there; its ancestors up to the mount are tried all the
    same, and the mount's own folder is the container's group then.
    """
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        # Version 2 has no controllers in the line; its tree may be mounted beside version 1 as "unified".
        mounts = [cgroups, cgroups / "unified"] if not controllers else [cgroups / c for c in controllers.split(",")]
        for mount in mounts:
            folder = mount / path.lstrip("/")
            while folder != mount:
                yield folder
                folder = folder.parent
            yield mount


def _cpu_quota(group: Path) -> float | None:
    """Cores: time per period, from cpu.max (version 2) or the cfs files (version 1)."""
    fields = " ".join(_lines(group / "cpu.max")).split()
    if not fields:
        fields = _lines(group / "cpu.cfs_quota_us") + _lines(group / "cpu.cfs_period_us")
    if len(fields) != 2 or fields[0] in ("max", "-1"):
        return None
    return int(fields[0]) / int(fields[1])


def _memory_left(group: Path) -> int | None:
    """Bytes: limit less use, where file pages that the kernel may drop at any time do not count as use."""
    for limit_name, usage_name, droppable_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _lines(group / limit_name), _lines(group / usage_name)
        if limit and usage and limit[0] != "max":
            stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
            return max(0, int(limit[0]) - int(usage[0]) + int(stat.get(droppable_name, 0)))
    return None


def _lines(file: Path) -> list[str]:
    """Lines of a small file of the kernel; none when it is not there, or is not ours to read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
