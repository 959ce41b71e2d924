"""Tables of the rotary position embedding (RoFormer, Su et al. 2021), in float64, rounded once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from potok.model.config import ModelConfig


def cos_sin_table(
    config: ModelConfig, factors: npt.NDArray[np.float32] | None, num_positions: int
) -> npt.NDArray[np.float32]:
    """[num_positions, rope_dim]: cosines of the rope_dim / 2 frequencies, then their sines.

    Frequency i is theta^(-2 i / rope_dim), divided by factors[i] where the file has them; positions are divided by
    rope_scale.
    """
    half = config.rope_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half, dtype=np.float64) * 2 / config.rope_dim)
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    angles = np.arange(num_positions, dtype=np.float64)[:, None] / config.rope_scale * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
