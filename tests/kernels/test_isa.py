"""Which tables this machine is said to run."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from potok._native import kernels, supported_isas

BEST_FIRST = ["amx", "avx512vnni", "avxvnni", "avx2", "scalar"]
GET_PERMISSIONS, ARCH_PRCTL, TILE_DATA = 0x1022, 158, 18
EMULATED = "POTOK_NATIVE" in os.environ

#: Linux refuses the tiles to a process with a signal stack that could not hold them: theirs are 8 KiB.
WITH_A_SMALL_SIGNAL_STACK = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
if ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None):
    raise SystemExit("sigaltstack")
from potok._native import supported_isas
print(*supported_isas())
"""


def cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    if not info.exists() or platform.machine() != "x86_64":
        pytest.skip("the flags of the CPU are read from Linux on x86")
    for line in info.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()


def test_tables_are_listed_best_first_and_scalar_always() -> None:
    found = supported_isas()
    assert found == [isa for isa in BEST_FIRST if isa in found]
    assert found[-1] == "scalar"


def test_a_table_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="instruction set 'mmx' is not supported"):
        kernels.Linear("mmx", 0, 0, np.zeros((16, 128), np.uint8), 32)


@pytest.mark.skipif(EMULATED, reason="emulated tables are listed on every CPU")
def test_no_table_asks_for_more_than_the_cpu_has() -> None:
    flags = cpu_flags()
    needs = {
        "amx": {"amx_tile", "amx_int8"},
        "avx512vnni": {"avx512f", "avx512_vnni"},
        "avxvnni": {"avx2", "avx_vnni"},
        "avx2": {"avx2", "fma", "f16c"},
    }
    for isa in supported_isas():
        assert needs.get(isa, set()) <= flags


@pytest.mark.skipif(EMULATED or "amx" not in supported_isas(), reason="no tiles of a real CPU here")
def test_tiles_are_listed_once_linux_has_permitted_them() -> None:
    permissions = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(ARCH_PRCTL, GET_PERMISSIONS, ctypes.byref(permissions)) == 0
    assert permissions.value >> TILE_DATA & 1


@pytest.mark.skipif(EMULATED or "amx" not in supported_isas(), reason="no tiles of a real CPU here")
def test_tiles_are_not_listed_where_linux_refuses_them() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITH_A_SMALL_SIGNAL_STACK], capture_output=True, text=True, check=True, timeout=240
    )
    assert run.stdout.split() == [isa for isa in supported_isas() if isa != "amx"]
