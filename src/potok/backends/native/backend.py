"""The CPU executor: the plan replayed in C++ with the GIL released, one call a step."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence

import numpy as np

from potok._native import Replay, supported_isas
from potok.backends.api import I32, BackendInfo, Sampled, SampleRows, StepInputs
from potok.backends.native.lower import lower
from potok.backends.native.rope import cos_sin_table
from potok.backends.native.weights import WeightLoader
from potok.errors import LoadError
from potok.model.config import ModelConfig
from potok.model.families import FAMILIES
from potok.model.plan import RopeKind
from potok.model.precision import Activation, ActivationRule, activation_of, kv_bytes_per_token
from potok.sampling.rows import F32, NO_HASHES, NO_IDS, NO_LOGPROBS
from potok.weights.formats import dequantize
from potok.weights.gguf import GGUFFile

_HEAD_MULTIPLE = 16  # lanes of the attention kernels
_MAX_HEAD_DIM = 256
_GROUP = 32  # elements that share one activation scale
_MAX_VOCAB = 2**19  # csrc/kernels/sampling.h: sums over more ids could round


#: KvType of csrc/kernels/table.h
_KV_TYPES = {"f16": 0, "f32": 1, "int8": 2}


class NativeBackend:
    """Packs the file's tensors at construction; `allocate` gives it KV memory before the first step.

    The file may be closed once constructed. Not thread-safe: one step at a time.
    computing_ns: time that all steps have taken, without what it takes to get there from Python and back.
    """

    info: BackendInfo

    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        *,
        threads: int,
        activation_bits: int,
        block_size: int,
        kv_dtype: str = "f16",
        nodes: Sequence[int] = (),
        rule: ActivationRule = activation_of,
    ) -> None:
        """nodes: memory nodes (NUMA) over which weights and KV are spread, when there are several. rule: in which
        precision each linear takes its activations, where it is not what is served. Raises LoadError.
        """
        _check(config)
        isa = _choose_isa(os.environ.get("POTOK_ISA"))
        self._config = config
        self._block_size = block_size
        self._kv_dtype = kv_dtype
        self._replay = Replay(isa, threads, _huge_pages(os.environ.get("POTOK_HUGE_PAGES")), list(nodes))
        loader = WeightLoader(self._replay, file, activation_bits, rule)
        plan = FAMILIES[config.architecture](config)
        lowered = lower(plan, loader.activation, loader.weight, loader.vector)
        places = [
            (p.cols, *(form in p.forms for form in (Activation.F32, Activation.A8, Activation.A16)))
            for p in lowered.places
        ]
        ops = [(o.kind, o.input, o.residual, o.output, o.sampled, o.layer, o.weights, o.biases) for o in lowered.ops]
        c = config
        sizes = (c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.rope_dim, c.vocab_size)
        self._replay.set_plan(sizes, plan.rope is RopeKind.HALVES, c.norm_eps, places, ops, lowered.logits)
        factors = file.tensors.get("rope_freqs.weight")
        self._factors = None if factors is None else dequantize(factors.type, factors.data).reshape(-1)
        self._notes = loader.notes()
        self.computing_ns = 0
        self._describe(num_blocks=0)

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self._config, self._kv_dtype)

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed weights."""
        return self._replay.packed_bytes

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """KV memory for `num_blocks` blocks (touched as it is used), and tables for `max_model_len` positions."""
        table = cos_sin_table(self._config, self._factors, max_model_len)
        self._replay.allocate(num_blocks, self._block_size, _KV_TYPES[self._kv_dtype], table)
        self._describe(num_blocks)

    def step(self, inputs: StepInputs, rows: SampleRows) -> Sampled:
        num, width = len(rows.position), rows.width
        out = Sampled(  # all of it is written by the call
            ids=array("i", bytes(4 * num)),
            logprob=array("f", bytes(4 * num)),
            top_ids=np.empty((num, width), np.int32) if width else NO_IDS,
            top_logprobs=np.empty((num, width), np.float32) if width else NO_LOGPROBS,
            hashes=np.empty(num, np.uint64) if rows.want_hashes else NO_HASHES,
        )
        self.computing_ns += self._replay.step(inputs.buffers, rows, out)
        return out

    def logits(self, rows: int) -> F32:
        """[rows, vocab]: of the first sampled rows of the last step, raw where they have no penalties or biases."""
        return self._replay.logits(np.empty((rows, self._config.vocab_size), np.float32))

    def kv_block(self, block: int) -> memoryview:
        """The KV of one block, all layers, as it lies in memory. Not while a step that uses the block is running."""
        return self._replay.kv_block(block).data

    def poison(self, blocks: I32) -> None:
        """Writes NaN over the KV of these blocks; a test's way to show that freed slots are never read."""
        self._replay.poison(blocks)

    def close(self) -> None:
        """Nothing outlives the object: threads and memory go with it."""

    def _describe(self, num_blocks: int) -> None:
        self.info = BackendInfo(
            vocab_size=self._config.vocab_size,
            context_length=self._config.context_length,
            block_size=self._block_size,
            num_blocks=num_blocks,
            kv_bytes_per_token=self.kv_bytes_per_token,
            threads=self._replay.threads,
            isa=self._replay.isa,
            notes=self._notes,
        )


def _choose_isa(wanted: str | None) -> str:
    supported = supported_isas()
    if not wanted:
        return supported[0]
    if wanted not in supported:
        raise LoadError(f"POTOK_ISA is {wanted!r}; this CPU and build support {', '.join(supported)}.")
    return wanted


def _huge_pages(wanted: str | None) -> bool:
    """Weights are streamed faster from them on every machine that was measured: see docs/adr/0010."""
    if wanted not in (None, "", "0", "1"):
        raise LoadError(f"POTOK_HUGE_PAGES is {wanted!r}; it must be 1, as without it, or 0.")
    return wanted != "0"


def _check(config: ModelConfig) -> None:
    c = config
    if c.vocab_size > _MAX_VOCAB:
        raise LoadError(f"a vocabulary of {c.vocab_size} ids is not supported: at most {_MAX_VOCAB}.")
    if c.head_dim % _HEAD_MULTIPLE or c.head_dim > _MAX_HEAD_DIM or c.num_heads // c.num_kv_heads * c.head_dim % _GROUP:
        raise LoadError(
            f"heads of {c.head_dim} elements are not supported: a head must be a multiple of {_HEAD_MULTIPLE} up to "
            f"{_MAX_HEAD_DIM}, and the heads that share a KV head a multiple of {_GROUP}."
        )
