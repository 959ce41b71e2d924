"""How far the served model is from the float64 evaluation of its weights, teacher-forced on the goldens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from golden_data import load_goldens
from make_model import fixed, write_gguf

from potok.backends.api import StepInputs
from potok.backends.native.backend import NativeBackend
from potok.protocol import Sampling
from potok.sampling.state import RowState, build_rows
from potok.weights.default_model import find_default_model
from potok.weights.formats import dequantize
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config

F64 = npt.NDArray[np.float64]
BLOCK_SIZE = 32
MAX_LEN = 512
#: Enough of the best ids that the goldens' 16 are among them.
REPORTED = 2048
GOLDENS = load_goldens()


@dataclass(frozen=True)
class Distance:
    """kl: nats, float64 model against served one, over the 16 best ids and the rest as one bucket.

    same_top, certain: [N, P], whether the best ids agree, and whether float64's best leads by more than 0.5.
    logit_error: of the 16 best ids, both logsumexp-normalised.
    """

    kl: F64
    same_top: npt.NDArray[np.bool_]
    certain: npt.NDArray[np.bool_]
    logit_error: F64


def log_probabilities(backend: NativeBackend, ids: list[int], positions: npt.NDArray[np.int64], wanted: F64) -> F64:
    """[P, T]: the served model's log-probabilities of `wanted` [P, T] at `positions`, all in one step."""
    count, num = len(ids) - 1, len(positions)
    inputs = StepInputs(
        tokens=np.array(ids[:-1], np.int32),
        positions=np.arange(count, dtype=np.int32),
        q_indptr=np.array([0, count], np.int32),
        kv_indptr=np.array([0, -(-count // BLOCK_SIZE)], np.int32),
        kv_blocks=np.arange(-(-count // BLOCK_SIZE), dtype=np.int32),
        out_rows=positions.astype(np.int32),
        copies=np.empty((0, 2), np.int32),
    )
    state = RowState(Sampling(logprobs=REPORTED), ids)
    sampled = backend.step(inputs, build_rows([state] * num, array("i", positions + 1), want_hashes=False))
    out = np.empty(wanted.shape)
    for p in range(num):
        known = dict(zip(sampled.top_ids[p].tolist(), sampled.top_logprobs[p].tolist(), strict=True))
        out[p] = [known[int(id)] for id in wanted[p]]
    return out


def distance(backend: NativeBackend, sequences: range) -> Distance:
    parts = []
    for n in sequences:
        wanted = GOLDENS.top_ids[n]
        exact = GOLDENS.top_logits[n] - GOLDENS.logsumexp[n][:, None]
        served = log_probabilities(backend, GOLDENS.ids[n], GOLDENS.positions[n], wanted)
        p, q = np.exp(exact), np.exp(served)
        rest_p, rest_q = 1 - p.sum(axis=1), np.maximum(1 - q.sum(axis=1), 1e-12)
        rest = np.where(rest_p > 1e-9, rest_p * np.log(np.maximum(rest_p, 1e-12) / rest_q), 0)
        lead = GOLDENS.top_logits[n][:, 0] - GOLDENS.top_logits[n][:, 1]
        parts.append(
            (
                (p * (exact - served)).sum(axis=1) + rest,
                served[:, 0] >= served.max(axis=1),
                lead > 0.5,
                served - exact,
            )
        )
    kl, same_top, certain, error = (np.stack(part) for part in zip(*parts, strict=True))
    return Distance(kl, same_top, certain, error)


def rms(x: npt.NDArray[np.floating]) -> float:
    return float(np.sqrt((x.astype(np.float64) ** 2).mean()))


def backend_of(file: GGUFFile, activation_bits: int, kv_dtype: str = "f16") -> NativeBackend:
    backend = NativeBackend(
        file,
        read_config(file),
        threads=2,
        activation_bits=activation_bits,
        block_size=BLOCK_SIZE,
        kv_dtype=kv_dtype,
    )
    backend.allocate(MAX_LEN // BLOCK_SIZE, MAX_LEN)
    return backend


@pytest.mark.parametrize(
    ("activation_bits", "most_kl", "least_same"), [(8, 2e-3, 0.975), (16, 1e-5, 0.998)], ids=["default", "16 bits"]
)
def test_near_the_float64_model(activation_bits: int, most_kl: float, least_same: float) -> None:
    backend = backend_of(GGUFFile.open(find_default_model()), activation_bits)
    d = distance(backend, range(len(GOLDENS.ids)))
    print(f"mean KL {d.kl.mean():.2e}, p99 {np.quantile(d.kl, 0.99):.2e}, same top id {d.same_top.mean():.2%}")
    assert d.kl.mean() <= most_kl
    assert d.same_top.mean() >= least_same
    assert d.same_top[d.certain].all()


def test_keys_and_values_in_bytes() -> None:
    """Against the same model with 16-bit storage: the price of half the memory."""
    d = distance(backend_of(GGUFFile.open(find_default_model()), 16, "int8"), range(len(GOLDENS.ids)))
    print(f"int8 K and V: mean KL {d.kl.mean():.2e}, same top id {d.same_top.mean():.2%}")
    assert d.kl.mean() <= 2e-3
    assert d.same_top[d.certain].all()


def test_expanded_to_float32(tmp_path: Path) -> None:
    """The same weights as float32. With K and V in float32 only roundings of the order of additions are left.

    K and V in 16 bits alone move a logit by about 2e-3, a ten-thousandth of its size, whatever the arithmetic: a change
    of 1e-6 before they are rounded does the same to float64.
    """
    file = GGUFFile.open(find_default_model())
    tensors = [fixed(t.name, dequantize(t.type, t.data).reshape(t.shape)) for t in file.tensors.values()]
    wide = tmp_path / "wide.gguf"
    write_gguf(wide, file.metadata, tensors)
    some = range(0, len(GOLDENS.ids), 4)
    for kv_dtype, bound in [("f32", 1e-3), ("f16", 1e-3 * rms(GOLDENS.top_logits))]:
        error = rms(distance(backend_of(GGUFFile.open(wide), 8, kv_dtype), some).logit_error)
        print(f"RMS {error:.2e} with K and V in {kv_dtype}")
        assert error <= bound
