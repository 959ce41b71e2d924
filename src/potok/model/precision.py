"""In which precision a linear takes its activations, and K and V are stored: fixed, never by what else is in the step.

Chosen from the curve of fidelity against speed in docs/numerics.md: over English prose, 8-bit activations for all
4-bit weights cost the default model 2.2e-3 nats of mean KL; 16 bits for q, k and v, 16 % of the work in its layers,
bring it to 1.4e-3.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from potok.model.config import ModelConfig


class Activation(IntEnum):
    F32 = 0
    A8 = 1  # |q| <= 127, one scale per 32
    A16 = 2  # |q| <= 32767, one scale per 32


#: Of the formats whose levels are whole numbers, those that have a scale for each 16 elements once they are packed.
#: The others have one for each 32. Levels are given in bits, also where fewer bits choose from a list of them.
_BY_16 = {
    "Q2_K": 2,
    **dict.fromkeys(("Q6_K", "Q3_K", "IQ4_XS", "IQ3_S"), 8),
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "MXFP4", "NVFP4"), 8),
}
#: All of them: by the bits of their levels. Every other format is computed in float32.
INTEGER_FORMATS = {
    **_BY_16,
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "Q1_0", "TQ1_0", "TQ2_0"), 4),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), 5),
    **dict.fromkeys(("Q8_0", "Q8_1", "IQ4_NL"), 8),
}


def chain_group(format_name: str) -> int:
    """Elements whose whole sum is one link of a linear's chain: 16 or 32."""
    return 16 if format_name in _BY_16 else 32


#: Of a tensor, by its name, the name of its format, and activation_bits. F32 has an integer format expanded to floats.
ActivationRule = Callable[[str, str, int], Activation]


def activation_of(tensor: str, format_name: str, activation_bits: int) -> Activation:
    """activation_bits: 8 (16 where fidelity asks for it) or 16 (everywhere)."""
    bits = INTEGER_FORMATS.get(format_name)
    if bits is None:
        return Activation.F32
    if bits > 5 or activation_bits == 16 or tensor.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")):
        return Activation.A16
    return Activation.A8


#: Element types of K and V, and the bytes of an element. int8 adds a float scale for each token and head.
KV_DTYPES = {"f16": 2, "f32": 4, "int8": 1}


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Of all layers, K and V together."""
    head_bytes = config.head_dim * KV_DTYPES[dtype] + (4 if dtype == "int8" else 0)
    return 2 * config.num_layers * config.num_kv_heads * head_bytes


#: KV in files is used again only under the same number. Raise it with every change of the bits that kernels compute, or
#: of how a block lies in memory: tests/goldens notice the former.
NUMERICS_VERSION = 3
