"""What the default model means: logits of a float64 evaluation by transformers, made by tools/make_goldens.py."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

GOLDENS = Path(__file__).parent.parent / "goldens" / "default_model.npz"
QUESTION = "What is the capital of Japan?"  # the first chat of prompts.json
ANSWER = "The capital of Japan is Tokyo."  # its greedy answer


@dataclass(frozen=True, eq=False)
class Goldens:
    """N sequences; P = 64 positions of each, T = 16 best ids of each position.

    ids: N lists of token ids, the last P of which are followed. positions: int64 [N, P], the absolute position whose
    logits predict the next id, so ids[n][positions[n, p] + 1] is the p-th followed id. top_ids: int64 [N, P, T], best
    first; top_logits: float32 [N, P, T]; logsumexp: float64 [N, P], over the whole vocabulary.
    """

    model_sha256: str
    ids: list[list[int]]
    positions: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int64]
    top_logits: npt.NDArray[np.float32]
    logsumexp: npt.NDArray[np.float64]


def load_goldens() -> Goldens:
    with np.load(GOLDENS) as stored:
        lengths, logsumexp = stored["lengths"], stored["logsumexp"]
        flat = stored["ids"].astype(np.int64)
        return Goldens(
            model_sha256=str(stored["model_sha256"]),
            ids=[part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])],
            positions=lengths[:, None].astype(np.int64) - 1 - np.arange(logsumexp.shape[1], 0, -1),
            top_ids=stored["top_ids"].astype(np.int64),
            top_logits=stored["top_logits"],
            logsumexp=logsumexp,
        )
