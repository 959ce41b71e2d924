"""docs/numerics.md says what the code does: its Python is run, its C++ stands in the source."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import numpy as np

from potok.backends.native.weights import PACKED
from potok.backends.reference.linear import load_weight
from potok.model.precision import INTEGER_FORMATS, chain_group
from potok.weights.formats import FORMATS
from potok.weights.gguf import Tensor

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/numerics.md").read_text()
Q4_1 = 3


def code(language: str) -> str:
    [found] = re.findall(rf"```{language}\n(.*?)```", TEXT, re.S)
    return found


def random_qblocks(n: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows of a Q4_1 tensor as bytes, and the levels [n, groups, 32], scales and minimums [n, groups] in them."""
    rng = np.random.default_rng(7)
    levels = rng.integers(0, 16, (n, groups, 32), dtype=np.uint8)
    scales = (0.01 * rng.standard_normal((2, n, groups))).astype(np.float16)
    packed = levels[..., :16] | levels[..., 16:] << 4
    halves = np.moveaxis(scales, 0, -1).copy().view(np.uint8)
    data = np.concatenate([halves, packed], axis=-1).reshape(n, -1)
    return data, levels, *scales.astype(np.float32)


def test_the_python_is_the_reference_bit_by_bit() -> None:
    names: dict[str, object] = {}
    exec(code("python"), names)
    n, groups = 48, 18
    data, levels, d_w, m = random_qblocks(n, groups)
    x = np.random.default_rng(8).standard_normal((5, 32 * groups), dtype=np.float32)
    x[1, 32:64] = 0
    weight = load_weight(Tensor("blk.0.ffn_up.weight", FORMATS[Q4_1], (n, 32 * groups), data, 0), 8)
    expected = weight.product(x)
    for row, want in zip(x, expected, strict=True):
        assert names["q4_1_linear"](levels, d_w, m, row).tobytes() == want.tobytes()
    exact = x.astype(np.float64) @ (levels * d_w[..., None].astype(np.float64) + m[..., None]).reshape(n, -1).T
    assert np.abs(expected - exact).max() < 0.015 * np.abs(exact).max()


def test_the_table_of_formats_is_that_of_the_code() -> None:
    listed = {}
    for row in (line.strip("| ").split("|") for line in TEXT.splitlines() if "| P" in line or "| F32 |" in line):
        names, _, in_file, in_memory = ([part.strip() for part in column.split(",")] for column in row[:4])
        for i, name in enumerate(names):
            memory = in_memory[i] if len(in_memory) > 1 else in_memory[0]
            listed[name] = (float(in_file[i]), float(memory), int(row[4] if name in INTEGER_FORMATS else 32))
    for name, (in_file, in_memory, group) in listed.items():
        format = next(f for f in FORMATS.values() if f.name == name)
        assert in_file == 8 * format.qblock_bytes / format.qblock_elements
        assert (in_memory, group) == (PACKED[name], chain_group(name))
    assert listed.keys() == PACKED.keys() - {"F32", "F16", "BF16"}


def test_the_cpp_stands_in_the_source() -> None:
    source = (ROOT / "csrc/kernels/linear_scalar.inl").read_text()
    lines = [line for line in source.splitlines() if line.strip()]
    quoted = code("cpp").splitlines()
    starts = [i for i, line in enumerate(lines) if line.strip() == quoted[0]]
    assert any(textwrap.dedent("\n".join(lines[i : i + len(quoted)])) == "\n".join(quoted) for i in starts)
