"""Writes seeded synthetic models as GGUF files: tiny ones for tests, full shapes for benchmarks.

    python tools/make_model.py --shape tiny-llama --format Q4_1 tiny.gguf
    python tools/make_model.py --shape llama-3.2-1b llama.gguf

Weights are random blocks whose scales give every matrix the standard deviation of a usual initialisation, so that
activations stay sane and logits finite. The same shape, format and seed give the same bytes.
"""

from __future__ import annotations

import argparse
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_letters, digits
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from potok.weights.formats import FORMATS, Format

U8 = npt.NDArray[np.uint8]
ALIGNMENT = 32
CHUNK_BYTES = 1 << 24  # of tensor data made at once
BY_NAME = {format.name: format for format in FORMATS.values()}


# --- shapes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    architecture: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    tied: bool
    rope_theta: float
    tokenizer: str  # smollm, qwen2 or llama-bpe
    format: str = "Q4_K_M"  # when none is asked for
    rope_factors: bool = False


#: The tiny ones differ where models differ: 501 tokens fill no whole panel, heads * head_dim is not always dim,
#: embeddings are tied or not; tiny-llama-256 has rows that K formats need.
SHAPES = {
    "tiny-llama": Shape("llama", 2, 128, 4, 2, 32, 192, 501, 2048, False, 1e4, "smollm", "Q4_1"),
    "tiny-llama-64": Shape("llama", 2, 128, 4, 2, 64, 192, 501, 2048, True, 5e5, "smollm", "Q4_1", rope_factors=True),
    "tiny-llama-256": Shape("llama", 2, 256, 8, 2, 32, 256, 501, 2048, True, 1e4, "smollm"),
    "tiny-qwen2": Shape("qwen2", 2, 128, 4, 2, 32, 192, 501, 2048, True, 1e6, "qwen2", "Q4_1"),
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 14, 2, 64, 4864, 151936, 32768, True, 1e6, "qwen2"),
    "llama-3.2-1b": Shape(
        "llama", 16, 2048, 32, 8, 64, 8192, 128256, 131072, True, 5e5, "llama-bpe", rope_factors=True
    ),
}


# --- random tensors -----------------------------------------------------------------------------------------------


def _signed_6bit_rms() -> float:
    return math.sqrt(sum((s - 32) ** 2 for s in range(64)) / 64)


#: Standard deviation of a random qblock per unit of d; uniform levels 0..n-1 have sqrt((n*n - 1) / 12).
_SPREAD = {
    "Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9.2, "Q5_1": 9.2, "Q8_0": 74.0, "IQ4_NL": 70.0,
    "Q2_K": 8.8 * 1.12, "Q3_K": _signed_6bit_rms() * 2.3, "Q4_K": 38 * 4.6, "Q5_K": 38 * 9.2,
    "Q6_K": 74 * 18.5, "IQ4_XS": _signed_6bit_rms() * 70, "Q8_1": 74.0, "Q8_K": 74.0, "Q1_0": 1.0, "TQ1_0": 0.82,
    "TQ2_0": 0.82, "IQ1_S": 7.2, "IQ1_M": 7.2, "IQ2_XXS": 53.4, "IQ2_XS": 55.9, "IQ2_S": 56.3, "IQ3_XXS": 142.4,
    "IQ3_S": 140.3, "MXFP4": 5.84, "NVFP4": 5.84,
}  # fmt: skip
#: Byte of d in a qblock, and of the minimum with its ratio to d where there is one.
_D_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}
_MINIMUM = {"Q4_1": (2, -7.5), "Q5_1": (2, -15.5), "Q2_K": (82, 1.5), "Q4_K": (2, 7.5), "Q5_K": (2, 15.5)}


def random_rows(format: Format, rows: int, k: int, sigma: float, rng: np.random.Generator) -> U8:
    """Rows of a matrix [rows, k] with standard deviation about sigma and mean about 0: uint8 [rows, row bytes]."""
    if format.qblock_elements == 1:
        return _float_rows(format, rng.standard_normal((rows, k), np.float32) * np.float32(sigma))
    num_qblocks = rows * k // format.qblock_elements
    qblocks = np.frombuffer(rng.bytes(num_qblocks * format.qblock_bytes), np.uint8).reshape(num_qblocks, -1).copy()
    d = rng.uniform(0.6, 1.4, num_qblocks) * (sigma / _SPREAD[format.name])
    if format.name in _OTHER_SCALES:
        _OTHER_SCALES[format.name](qblocks, d, rng)
    else:
        _put_half(qblocks, _D_AT.get(format.name, 0), d)
    if format.name in _MINIMUM:
        at, ratio = _MINIMUM[format.name]
        _put_half(qblocks, at, d * ratio)
    if format.name == "Q2_K":
        qblocks[:, :16] = (qblocks[:, :16] & 15) * 17  # each minimum belongs to its scale
    if format.name == "TQ2_0":  # without the fourth level, which is none of -1, 0, 1
        qblocks[:, :64] = rng.integers(0, 3, (num_qblocks, 64, 4), np.uint8) @ np.array([1, 4, 16, 64], np.uint8)
    if format.name in ("Q4_K", "Q5_K"):
        scales = rng.integers(16, 60, (num_qblocks, 8), np.uint8)
        qblocks[:, 4:16] = _pack_scales(scales, scales + rng.integers(0, 4, scales.shape, np.uint8) - 2)
    return qblocks.reshape(rows, -1)


def _float_rows(format: Format, values: npt.NDArray[np.float32]) -> U8:
    if format.name == "F16":
        return values.astype("<f2").view(np.uint8)
    if format.name == "BF16":
        return (values.view(np.uint32) >> np.uint32(16)).astype("<u2").view(np.uint8)
    return values.astype("<f4").view(np.uint8)


def _put_half(qblocks: U8, at: int, values: npt.NDArray[np.float64]) -> None:
    qblocks[:, at : at + 2] = values.astype("<f2")[:, None].view(np.uint8)


def _put_float(qblocks: U8, d: npt.NDArray[np.float64], rng: np.random.Generator) -> None:
    qblocks[:, :4] = d.astype("<f4")[:, None].view(np.uint8)


def _scatter_half(qblocks: U8, d: npt.NDArray[np.float64], rng: np.random.Generator) -> None:
    """IQ1_M: four bits of d at the top of each of the last four words."""
    words = qblocks[:, 48:56].view("<u2")
    digits = d.astype("<f2").view("<u2")[:, None] >> np.array([0, 4, 8, 12], np.uint16) & 15
    words[:] = words & 0xFFF | digits << 12


def _put_power(qblocks: U8, d: npt.NDArray[np.float64], rng: np.random.Generator) -> None:
    """MXFP4: 2^(byte - 128), of the powers around d in such shares that their mean square is that of d."""
    low = np.floor(np.log2(d))
    share = ((d / 2**low) ** 2 - 1) / 3
    qblocks[:, 0] = low + 128 + (rng.random(len(d)) < share)


def _put_small_floats(qblocks: U8, d: npt.NDArray[np.float64], rng: np.random.Generator) -> None:
    """NVFP4: for each 16, the float of 4 and 3 bits next to 2 d."""
    codes = np.arange(0x7F)
    floats = np.where(codes < 8, codes / 512, (8 + codes % 8) * 2.0 ** (codes // 8 - 10))
    qblocks[:, :4] = np.searchsorted((floats[1:] + floats[:-1]) / 2, 2 * d)[:, None]


#: Where d is not one half. (qblocks, d of each, for what is drawn.)
_OTHER_SCALES = {"Q8_K": _put_float, "IQ1_M": _scatter_half, "MXFP4": _put_power, "NVFP4": _put_small_floats}


def _pack_scales(scales: U8, minimums: U8) -> U8:
    """Two times 8 six-bit numbers in the 12 bytes of Q4_K and Q5_K."""
    low, high = slice(0, 4), slice(4, 8)
    return np.concatenate(
        [
            scales[:, low] | scales[:, high] >> 4 << 6,
            minimums[:, low] | minimums[:, high] >> 4 << 6,
            scales[:, high] & 15 | (minimums[:, high] & 15) << 4,
        ],
        axis=1,
    )


class TensorSource(NamedTuple):
    """A tensor to be written; shape in numpy order. rows(begin, end) makes its bytes."""

    name: str
    format: Format
    shape: tuple[int, ...]
    rows: Callable[[int, int], U8]

    def chunks(self) -> Iterator[U8]:
        row_bytes = self.format.nbytes(self.shape[-1])
        num_rows = math.prod(self.shape[:-1])
        step = max(1, CHUNK_BYTES // row_bytes)
        for begin in range(0, num_rows, step):
            yield self.rows(begin, min(begin + step, num_rows))


def fixed(name: str, values: Sequence[float] | npt.NDArray[Any], format: str = "F32") -> TensorSource:
    """A tensor with given values in a float format."""
    array = np.asarray(values, np.float32)
    rows = _float_rows(BY_NAME[format], array.reshape(-1, array.shape[-1]))
    return TensorSource(name, BY_NAME[format], array.shape, lambda begin, end: rows[begin:end])


# --- models -------------------------------------------------------------------------------------------------------


def _fallback(name: str, k: int) -> Format:
    """The format that llama-quantize takes instead where rows are no whole qblocks."""
    instead = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
    if k % BY_NAME[name].qblock_elements == 0:
        return BY_NAME[name]
    return BY_NAME[instead.get(name, "IQ4_NL" if name.startswith("IQ") else "Q4_0")]


def _more_bits(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _format(requested: str, name: str, k: int, layer: int, shape: Shape) -> Format:
    """Of one matrix. Q4_K_M is llama-quantize's mix: more bits for the output and for part of v and down."""
    if requested != "Q4_K_M":
        return _fallback(requested, k)
    is_output = name == "output.weight" or (shape.tied and name == "token_embd.weight")
    is_eased = ("attn_v" in name or "ffn_down" in name) and _more_bits(layer, shape.layers)
    return _fallback("Q6_K" if is_output or is_eased else "Q4_K", k)


def _tensors(shape: Shape, requested: str, rng: np.random.Generator) -> Iterator[TensorSource]:
    s = shape

    def matrix(name: str, n: int, k: int, gain: float, layer: int = 0) -> TensorSource:
        format = _format(requested, name, k, layer, s)
        sigma = gain / math.sqrt(k)
        return TensorSource(name, format, (n, k), lambda b, e: random_rows(format, e - b, k, sigma, rng))

    def vector(name: str, n: int, mean: float) -> TensorSource:
        return fixed(name, mean + 0.1 * rng.standard_normal(n))

    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    # With tied embeddings a weak sum over layers would make the last token its own best successor.
    residual = 4.0
    yield matrix("token_embd.weight", s.vocab, s.dim, 2.5)
    if s.rope_factors:
        yield fixed("rope_freqs.weight", llama3_rope_factors(s.head_dim, s.rope_theta))
    for i in range(s.layers):
        p = f"blk.{i}."
        yield vector(p + "attn_norm.weight", s.dim, 1)
        yield matrix(p + "attn_q.weight", q, s.dim, 1.5, i)
        yield matrix(p + "attn_k.weight", kv, s.dim, 1.5, i)
        yield matrix(p + "attn_v.weight", kv, s.dim, 1, i)
        if s.architecture == "qwen2":
            yield vector(p + "attn_q.bias", q, 0)
            yield vector(p + "attn_k.bias", kv, 0)
            yield vector(p + "attn_v.bias", kv, 0)
        yield matrix(p + "attn_output.weight", s.dim, q, residual, i)
        yield vector(p + "ffn_norm.weight", s.dim, 1)
        yield matrix(p + "ffn_gate.weight", s.ffn, s.dim, 1, i)
        yield matrix(p + "ffn_up.weight", s.ffn, s.dim, 1, i)
        yield matrix(p + "ffn_down.weight", s.dim, s.ffn, residual, i)
    yield vector("output_norm.weight", s.dim, 1)
    if not s.tied:
        yield matrix("output.weight", s.vocab, s.dim, 2.5)


def llama3_rope_factors(head_dim: int, theta: float) -> list[float]:
    """Divisors of rotation frequencies that stretch a context of 8192 by 32: 1 for the fast ones, 32 for the slow."""
    stretch, slowest, fastest, trained = 32.0, 1.0, 4.0, 8192.0
    factors = []
    for i in range(0, head_dim, 2):
        turns = trained / (2 * math.pi * theta ** (i / head_dim))  # within the trained context
        blend = min(1.0, max(0.0, (turns - slowest) / (fastest - slowest)))
        factors.append(1 / ((1 - blend) / stretch + blend))
    return factors


# --- tokenizer ----------------------------------------------------------------------------------------------------

WORDS = (
    "the of and to in is that it was for on are with as his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
)

NORMAL, CONTROL, UNUSED = 1, 3, 5

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3_CHAT = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs that build common words from the left, then all pairs and triples of letters and digits."""
    space = byte_characters()[ord(" ")]
    for word in WORDS.split():
        text = space + word
        for i in range(1, len(text)):
            yield text[:i], text[i]
    for a, b in product(ascii_letters + digits, repeat=2):
        yield a, b
    for a, b, c in product(ascii_letters + digits, repeat=3):
        yield a + b, c


def _learned(count: int) -> tuple[list[str], list[str]]:
    """At most `count` ordinary tokens (bytes first), and the merges that make them."""
    tokens = dict.fromkeys(byte_characters())
    merges = []
    for left, right in _merges():
        if len(tokens) == count:
            break
        if left + right not in tokens:
            tokens[left + right] = None
            merges.append(f"{left} {right}")
    return list(tokens), merges


def tokenizer_metadata(pre: str, vocab: int) -> dict[str, Any]:
    """A valid byte-level BPE vocabulary of `vocab` tokens with the control tokens of the real family."""
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if pre == "smollm":  # controls first
        ordinary, merges = _learned(vocab - len(chatml))
        tokens, bos, eos = chatml + ordinary, "<|im_start|>", "<|im_end|>"
        controls = chatml
    elif pre == "qwen2":  # controls after what was learned
        ordinary, merges = _learned(vocab - len(chatml) if vocab < 1000 else 151643)
        tokens, bos, eos = ordinary + chatml, "<|endoftext|>", "<|im_end|>"
        controls = chatml
    else:
        ordinary, merges = _learned(vocab - 256)
        controls = [f"<|reserved_special_token_{i}|>" for i in range(256)]
        named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
        for i, name in named.items():
            controls[i] = f"<|{name}|>"
        tokens, bos, eos = ordinary + controls, "<|begin_of_text|>", "<|eot_id|>"
    kinds = [CONTROL if token in set(controls) else NORMAL for token in tokens]
    for i in range(len(tokens), vocab):
        tokens.append(f"[PAD{i}]")
        kinds.append(UNUSED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index(bos),
        "tokenizer.ggml.eos_token_id": tokens.index(eos),
        "tokenizer.ggml.add_bos_token": pre == "llama-bpe",
        "tokenizer.chat_template": LLAMA3_CHAT if pre == "llama-bpe" else CHATML,
    }


# --- file ---------------------------------------------------------------------------------------------------------

_ARRAY_TYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed_value(value: Any) -> bytes:
    """bool, int (as uint32), float (as float32), str, list of str, numpy array or numpy scalar (of its own type)."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    if isinstance(value, np.generic):
        return struct.pack("<I", _ARRAY_TYPES[value.dtype.str[1:]]) + value.tobytes()
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, _ARRAY_TYPES[value.dtype.str[1:]], value.size) + value.tobytes()
    return struct.pack("<If", 6, value)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: Sequence[TensorSource]) -> None:
    """Writes a GGUF file of version 3; tensor data is made and written in chunks."""
    with path.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            out.write(_string(key) + _typed_value(value))
        offset = 0
        for t in tensors:
            dims = t.shape[::-1]
            out.write(_string(t.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, t.format.id, offset))
            offset += -(-t.format.nbytes(math.prod(t.shape)) // ALIGNMENT) * ALIGNMENT
        for t in tensors:
            out.write(b"\0" * (-out.tell() % ALIGNMENT))
            for chunk in t.chunks():
                out.write(chunk.tobytes())


#: What readers take the whole file for, as llama-quantize numbers its mixes.
_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 14,
    "Q4_K_M": 15, "Q5_K": 17, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25,
    "IQ3_S": 26, "IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38,
    "NVFP4": 39, "Q1_0": 40,
}  # fmt: skip
_NO_FILE_TYPE = 1024  # no mix is named after the format


def make_model(path: str | Path, shape: str, format: str | None = None, seed: int = 0) -> Path:
    """Writes the model `shape` (a key of SHAPES) and returns its path.

    format: a format name for all matrices, "Q4_K_M" for llama-quantize's mix, None for the shape's default. Rows that a
    K format does not divide fall back as llama-quantize does. Norms and biases are F32.
    """
    s = SHAPES[shape]
    requested = format or s.format
    arch = s.architecture
    metadata = {
        "general.architecture": arch,
        "general.name": f"synthetic {shape} {requested} seed {seed}",
        "general.quantization_version": 2,
        "general.file_type": _FILE_TYPES.get(requested, _NO_FILE_TYPE),
        f"{arch}.block_count": s.layers,
        f"{arch}.context_length": s.context,
        f"{arch}.embedding_length": s.dim,
        f"{arch}.feed_forward_length": s.ffn,
        f"{arch}.attention.head_count": s.heads,
        f"{arch}.attention.head_count_kv": s.kv_heads,
        f"{arch}.attention.key_length": s.head_dim,
        f"{arch}.attention.value_length": s.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": s.rope_theta,
        f"{arch}.rope.dimension_count": s.head_dim,
        **tokenizer_metadata(s.tokenizer, s.vocab),
    }
    path = Path(path)
    write_gguf(path, metadata, list(_tensors(s, requested, np.random.default_rng(seed))))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a seeded synthetic model as a GGUF file.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny-llama")
    parser.add_argument("--format", choices=["Q4_K_M", *(f.name for f in FORMATS.values() if f.has_values)])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path = make_model(args.path, args.shape, args.format, args.seed)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
