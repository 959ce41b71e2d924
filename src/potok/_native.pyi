"""The compiled executor (csrc/bind)."""

from typing import Any

import numpy as np
import numpy.typing as npt

def supported_isas() -> list[str]: ...

class Replay:
    def __init__(self, isa: str, threads: int, huge_pages: bool = True, nodes: list[int] = ...) -> None: ...
    def add_weight(self, source: int, act: int, n: int, k: int) -> int: ...
    def pack_rows(self, weight: int, source: int, first: int, rows: npt.NDArray[np.uint8]) -> None: ...
    def add_vector(self, values: npt.NDArray[np.float32]) -> int: ...
    def set_plan(
        self,
        sizes: tuple[int, int, int, int, int, int],
        rope_halves: bool,
        norm_eps: float,
        places: list[Any],
        ops: list[Any],
        logits: int,
    ) -> None: ...
    def allocate(self, num_blocks: int, block_size: int, kv_type: int, cos_sin: npt.NDArray[np.float32]) -> None: ...
    def step(self, inputs: tuple[Any, ...], rows: tuple[Any, ...], out: tuple[Any, ...]) -> int: ...
    def logits(self, out: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...
    def unpack(self, weight: int, out: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...
    def poison(self, blocks: npt.NDArray[np.int32]) -> None: ...
    def kv_block(self, block: int) -> npt.NDArray[np.uint8]: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def packed_bytes(self) -> int: ...

class kernels:
    @staticmethod
    def linear(
        isa: str,
        source: int,
        act: int,
        weight: npt.NDArray[np.uint8],
        x: npt.NDArray[np.float32],
        out: npt.NDArray[np.float32],
    ) -> None: ...

    class Linear:
        def __init__(self, isa: str, source: int, act: int, weight: npt.NDArray[np.uint8], k: int) -> None: ...
        def run(self, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32], repeat: int = 1) -> None: ...

    @staticmethod
    def quantize_a8(isa: str, x: Any, q: Any, d: Any, s: Any, sum: Any) -> None: ...
    @staticmethod
    def quantize_a16(isa: str, x: Any, q: Any, d: Any, s: Any, sum: Any) -> None: ...
    @staticmethod
    def rms_norm(isa: str, x: Any, weight: Any, eps: float, out: Any) -> None: ...
    @staticmethod
    def swiglu(isa: str, gate: Any, up: Any, out: Any) -> None: ...
    @staticmethod
    def rope_kv(
        isa: str,
        qkv: Any,
        cos_sin: Any,
        heads: int,
        kv_heads: int,
        block_size: int,
        slot: int,
        halves: bool,
        q: Any,
        kv: Any,
        kv_type: int = 0,
    ) -> None: ...
    @staticmethod
    def attention(
        isa: str,
        q: Any,
        kv: Any,
        blocks: Any,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        position: int,
        out: Any,
        rows_per_task: int,
        kv_type: int = 0,
        repeat: int = 1,
    ) -> None: ...
    @staticmethod
    def sample_row(
        isa: str,
        logits: npt.NDArray[np.float32],
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        choice: int,
        position: int,
        presence: float,
        frequency: float,
        repetition: float,
        seen_ids: npt.NDArray[np.int32],
        seen_counts: npt.NDArray[np.int32],
        bias_ids: npt.NDArray[np.int32],
        bias_values: npt.NDArray[np.float32],
        num_logprobs: int,
        want_hash: bool,
        repeat: int = 1,
    ) -> tuple[int, float, int, list[int], list[float]]: ...

class ceiling:
    @staticmethod
    def fma_widths() -> list[str]: ...
    @staticmethod
    def fma_macs_per_second(threads: int, width: str) -> float: ...
    @staticmethod
    def stream_bytes_per_second(threads: int, bytes: int, huge_pages: bool = True) -> float: ...
    @staticmethod
    def clock_hz() -> float: ...
