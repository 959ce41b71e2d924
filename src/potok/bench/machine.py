"""The machine and the software that a measurement was made with: a figure without them says nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

#: Instruction sets that decide the speed of matrix products, as /proc/cpuinfo spells them.
TELLING_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimd", "asimddp", "i8mm", "sve")

#: Load of the machine before we start, in parts of its cores, above which figures are not trusted.
BUSY = 0.25


@dataclass(frozen=True, slots=True)
class Machine:
    """cores: that this process may use; logical_cpus: that the machine has. commit: "" outside a git checkout."""

    cpu: str
    cores: int
    logical_cpus: int
    memory_gib: float
    instruction_sets: list[str]
    system: str
    python: str
    potok: str
    commit: str

    @staticmethod
    def read() -> Machine:
        info = _cpu_info()
        flags = set((info.get("flags") or info.get("Features") or "").split())
        return Machine(
            cpu=info.get("model name") or platform.processor() or platform.machine(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            logical_cpus=os.cpu_count() or 1,
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            instruction_sets=[f for f in TELLING_FLAGS if f in flags],
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            potok=_version(),
            commit=_commit(Path(__file__).resolve().parent),
        )

    def line(self) -> str:
        """One line for a table's caption."""
        commit = f", commit {self.commit}" if self.commit else ""
        sets = " ".join(self.instruction_sets)
        cores = f"{self.cores} core{'s' * (self.cores != 1)}"
        return f"{self.cpu}, {cores} ({sets}), {self.memory_gib:g} GiB; potok {self.potok}{commit}"


def disturbances() -> list[str]:
    """What makes a measurement that starts now doubtful, a sentence each."""
    load = os.getloadavg()[0]
    if load <= BUSY * (os.cpu_count() or 1):
        return []
    return [f"Other programs were running before the start (load {load:.1f}): these figures are too low."]


def _cpu_info() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n", maxsplit=1)[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _version() -> str:
    try:
        return metadata.version("potok")
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit(folder: Path) -> str:
    """Short hash of the checkout that `folder` is tracked in, "+" when files differ from it."""
    git = ["git", "-C", str(folder)]
    try:
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", "."], capture_output=True, timeout=5, check=False
        )
        if tracked.returncode != 0:
            return ""  # an installed copy inside somebody else's checkout
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, timeout=5, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.stdout.decode().strip() + ("+" if changes.stdout.strip() else "")
