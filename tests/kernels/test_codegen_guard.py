"""What the compiler made of the kernels: instructions are counted, so that no clock and no busy machine is trusted.

A compiler that spills registers or loads a weight again for every row can halve a kernel, and every other test passes.
Floors are work (multiply-adds, or elements where there are none) per instruction of the AVX2 table, 15 % below what
GCC 12 gave when they were written. A kernel that needs fewer instructions raises its floor here:

    python tests/kernels/test_codegen_guard.py     prints the floors that the build of this checkout would set
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from potok._native import supported_isas

FLOORS = {
    "linear-q4_0-a8-4": 5.74,
    "linear-q4_0-a16-4": 3.62,
    "linear-q4_1-a8-4": 5.67,
    "linear-q4_1-a16-4": 3.59,
    "linear-q5_0-a8-4": 4.41,
    "linear-q5_0-a16-4": 3.13,
    "linear-q5_1-a8-4": 4.34,
    "linear-q5_1-a16-4": 3.12,
    "linear-q4_k-a8-4": 5.18,
    "linear-q4_k-a16-4": 3.4,
    "linear-q5_k-a8-4": 4.07,
    "linear-q5_k-a16-4": 2.93,
    "linear-q4_1-a8-1": 3.76,
    "linear-q2_k-a8-4": 3.88,
    "linear-q2_k-a8-32": 5.06,
    "linear-q2_k-a16-4": 2.81,
    "linear-q2_k-a16-32": 3.4,
    "linear-iq4_nl-a16-4": 3.5,
    "linear-iq4_nl-a16-32": 3.96,
    "linear-iq4_xs-a16-4": 2.98,
    "linear-iq4_xs-a16-32": 3.55,
    "linear-listed-a16-4": 3.13,
    "linear-listed-a16-32": 3.57,
    "linear-q8_0-a16-4": 3.95,
    "linear-q8_0-a16-32": 4.01,
    "linear-q6_k-a16-4": 3.41,
    "linear-q6_k-a16-32": 3.82,
    "linear-f16-f32-4": 2.54,
    "linear-bf16-f32-4": 2.32,
    "linear-f32-f32-4": 2.54,
    "linear-q4_1-a8-32": 5.94,
    "linear-q5_0-a8-32": 5.93,
    "linear-q5_k-a8-32": 5.48,
    "linear-q4_1-a16-32": 3.75,
    "linear-q5_0-a16-32": 3.9,
    "linear-q5_k-a16-32": 3.67,
    "linear-bf16-f32-32": 2.79,
    "linear-f32-f32-32": 2.94,
    "decode-f16": 2.13,
    "decode-f32": 2.02,
    "decode-i8": 1.73,
    "prompt-f16": 2.4,
    "prompt-i8": 2.27,
    "rms-norm": 0.807,
    "quantize-a8": 0.294,
    "quantize-a16": 0.298,
    "swiglu": 0.173,
    "sample-greedy": 1.47,
    "sample-temperature": 0.0851,
    "sample-top-k": 0.316,
    "sample-top-p": 0.0206,
}


MARGIN = 0.85


def program() -> Path | None:
    """The newest count_kernels of the builds in this checkout."""
    built = list(Path(__file__).parents[2].glob("build/*/count_kernels"))
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


def count(valgrind: str, counted: Path, folder: Path) -> dict[str, float]:
    """Work per instruction of every case. folder: for callgrind's files."""
    out = folder / "callgrind"
    command = [valgrind, "--tool=callgrind", "--dump-before=potok_mark", f"--callgrind-out-file={out}", counted, "avx2"]
    run = subprocess.run(command, env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    cases = [line.split() for line in run.stdout.splitlines()]
    # Dump 2 i + 1 ends where the counted part of case i begins, dump 2 i + 2 where it ends.
    return {name: int(work) / instructions(Path(f"{out}.{2 * i + 2}")) for i, (name, work) in enumerate(cases)}


def instructions(dump: Path) -> int:
    found = re.search(r"^totals: (\d+)$", dump.read_text(), re.MULTILINE)
    assert found is not None, f"{dump} holds no total"
    return int(found[1])


@pytest.fixture(scope="module")
def work_per_instruction(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    if "avx2" not in supported_isas():
        pytest.skip("this CPU or build has no AVX2 table")
    valgrind, counted = shutil.which("valgrind"), program()
    if valgrind is None:
        pytest.skip("valgrind is not installed (Debian: apt install valgrind)")
    assert counted is not None, "count_kernels is not built: `make setup` builds it"
    return count(valgrind, counted, tmp_path_factory.mktemp("callgrind"))


def test_every_kernel_has_a_floor(work_per_instruction: dict[str, float]) -> None:
    assert work_per_instruction.keys() == FLOORS.keys()


@pytest.mark.parametrize("kernel", FLOORS)
def test_a_kernel_needs_no_more_instructions_than_it_did(kernel: str, work_per_instruction: dict[str, float]) -> None:
    assert work_per_instruction[kernel] >= FLOORS[kernel]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        for kernel, rate in count("valgrind", program() or Path("count_kernels"), Path(folder)).items():
            print(f'    "{kernel}": {MARGIN * rate:.3g},')
