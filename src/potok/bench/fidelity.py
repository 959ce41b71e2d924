"""How far the engine is from the float model of the same file over a text, and what each precision costs in speed.

The float model is the file with every weight expanded to float32, float32 activations and float32 K and V, run by the
same engine; tests/fidelity shows that its logits are within 1.2e-5 of float64. All others run as they serve: the
scheduler cuts the passages into chunks within the budget and puts several into one step. The only difference is that
every row is sampled, so that every position's distribution is seen.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from potok.backends.inputs import pack
from potok.backends.native.backend import NativeBackend
from potok.bench.engine import EngineBench, EngineBenchOptions, load_figures, prompt_rate
from potok.bench.steps import Bound
from potok.config import EngineConfig
from potok.core.request import Request
from potok.core.scheduler import Scheduler
from potok.engine.build import build_engine
from potok.engine.serve import Engine
from potok.model.precision import Activation, ActivationRule, activation_of
from potok.protocol import Sampling
from potok.sampling.rows import F32, F64
from potok.sampling.state import RowState, build_rows

PASSAGE = 512  # tokens
#: Requests at the same time. The float model's distributions of so many passages are kept: 400 MB for 49,152 ids.
AT_ONCE = 4
#: Requests at once whose decoding is timed.
LOADS = (1, 32)
TIMED = EngineBenchOptions(requests=LOADS)


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine is built. rule: other than what `activation_bits` gives, where no option asks for it."""

    name: str
    activation_bits: int = 8
    kv_cache_dtype: str = "f16"
    rule: ActivationRule = activation_of

    def build(self, model: str, budget: int = 0) -> Engine:
        """budget: max_num_batched_tokens, 0 for the default. The KV memory is for passages and timed loads.

        No prefix is shared, so that every position is computed, also of a text that comes again.
        """
        config = EngineConfig(
            model=model,
            max_num_seqs=max(LOADS),
            max_num_batched_tokens=budget,
            max_model_len=max(PASSAGE, TIMED.long_prompt_tokens) + 1,
            kv_cache_dtype=self.kv_cache_dtype,
            activation_bits=self.activation_bits,
        )
        engine = build_engine(config, rule=self.rule)
        scheduler = Scheduler(engine.scheduler.limits, engine.info.num_blocks, prefix_caching=False)
        return replace(engine, scheduler=scheduler)


def _float_everywhere(tensor: str, format_name: str, activation_bits: int) -> Activation:
    return Activation.F32


def _a8_everywhere(tensor: str, format_name: str, activation_bits: int) -> Activation:
    """A8 for q, k and v too; weights of 8 bits have no kernel for it."""
    return activation_of("", format_name, activation_bits)


FLOAT = Setting("float32", kv_cache_dtype="f32", rule=_float_everywhere)
DEFAULT = Setting("default: A8, and A16 for q, k, v and 8-bit weights")
A8 = Setting("A8 for all 4- and 5-bit weights", rule=_a8_everywhere)
A16 = Setting("A16 everywhere (--activation-bits 16)", activation_bits=16)
INT8_KV = Setting("default, int8 K and V (--kv-cache-dtype int8)", kv_cache_dtype="int8")
SERVED = (A8, DEFAULT, A16, INT8_KV)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Over all positions. mean_kl, p99_kl: nats, of this model's distribution from the float model's.

    same_top: part of the positions where the most probable id is the same. perplexity: of the text's next token;
    of_float: divided by the float model's.
    """

    mean_kl: float
    p99_kl: float
    same_top: float
    perplexity: float
    of_float: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """positions: at how many a distribution was compared. fidelity: of each engine."""

    positions: int
    float_perplexity: float
    fidelity: list[Fidelity]


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second, the best of the rounds. decode: of each of LOADS."""

    prompt: float
    decode: list[float]


def passages(ids: Sequence[int]) -> list[Sequence[int]]:
    """The whole passages of a text, without what is left over."""
    return [ids[at : at + PASSAGE] for at in range(0, len(ids) - PASSAGE + 1, PASSAGE)]


def compare(
    reference: Engine,
    engines: Sequence[Engine],
    texts: Sequence[Sequence[int]],
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Runs `texts` through all engines, a few at a time; every id but the first of each text is predicted."""
    vocab = reference.info.vocab_size
    float_loss: list[F64] = []
    columns: list[list[tuple[F64, npt.NDArray[np.bool_], F64]]] = [[] for _ in engines]
    for first in range(0, len(texts), AT_ONCE):
        some = texts[first : first + AT_ONCE]
        say(f"passage {first + 1} of {len(texts)}")
        exact = [np.empty((len(ids) - 1, vocab), np.float32) for ids in some]
        for n, start, served in log_probabilities(reference, some):
            exact[n][start : start + len(served)] = served
            float_loss.append(_loss(served, some[n], start))
        for engine, column in zip(engines, columns, strict=True):
            for n, start, served in log_probabilities(engine, some):
                wanted = exact[n][start : start + len(served)]
                same = served.argmax(axis=1) == wanted.argmax(axis=1)
                column.append((_divergence(wanted, served), same, _loss(served, some[n], start)))
    float_perplexity = float(np.exp(np.concatenate(float_loss).mean()))
    fidelity = []
    for column in columns:
        kl, same, loss = (np.concatenate(part) for part in zip(*column, strict=True))
        perplexity = float(np.exp(loss.mean()))
        fidelity.append(
            Fidelity(
                mean_kl=float(kl.mean()),
                p99_kl=float(np.quantile(kl, 0.99)),
                same_top=float(same.mean()),
                perplexity=perplexity,
                of_float=perplexity / float_perplexity,
            )
        )
    return Comparison(sum(len(ids) - 1 for ids in texts), float_perplexity, fidelity)


def log_probabilities(engine: Engine, texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, F32]]:
    """All texts at once, as prompts.

    Gives (text, start, [rows, vocab]), a segment each: of the ids that may follow the positions start, start + 1, ...
    """
    scheduler, backend = engine.scheduler, engine.backend
    assert isinstance(backend, NativeBackend)
    greedy = RowState(Sampling(), ())
    for n, ids in enumerate(texts):
        rejected = scheduler.submit(Request(n, array("i", ids[:-1]), len(ids) - 1, max_new=1))
        assert rejected is None, rejected
    while (batch := scheduler.schedule(0)) is not None:
        inputs = pack(batch, scheduler.limits.block_size)
        wanted = inputs.out_rows
        every = inputs.with_out_rows(np.arange(batch.num_tokens, dtype=np.int32))
        positions = array("i", inputs.positions + 1)
        sampled = backend.step(every, build_rows([greedy] * len(positions), positions, want_hashes=False))
        rows = _log_softmax(backend.logits(batch.num_tokens))
        for segment, begin, end in zip(batch.segments, inputs.q_indptr, inputs.q_indptr[1:], strict=False):
            yield segment.id, segment.start, rows[begin:end]
        scheduler.commit(batch, np.asarray(sampled.ids)[wanted].tolist(), 0)


def _log_softmax(logits: F32) -> F32:
    """In place."""
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def _divergence(exact: F32, served: F32) -> F64:
    """Kullback-Leibler, of each row. Terms p (log p - log q) - p + q are never negative: no rounding of sums shows."""
    p, q = np.exp(exact), np.exp(served)
    kl: F64 = (p * (exact - served) - p + q).sum(axis=1, dtype=np.float64)
    return kl


def _loss(served: F32, ids: Sequence[int], start: int) -> F64:
    """Nats that the ids after the positions start, start + 1, ... cost."""
    follow = np.asarray(ids[start + 1 : start + 1 + len(served)])
    loss: F64 = -served[np.arange(len(served)), follow].astype(np.float64)
    return loss


def time_engines(
    model: str, engines: Sequence[Engine], rounds: int, say: Callable[[str], None] = lambda line: None
) -> list[Speed]:
    """Every round times each engine, and nobody always comes first."""
    bounds = [Bound.measure(engine, model) for engine in engines]
    benches = [EngineBench(engine, TIMED) for engine in engines]
    prompts: list[list[float]] = [[] for _ in engines]
    decodes: list[list[list[float]]] = [[[] for _ in LOADS] for _ in engines]
    order = list(range(len(engines)))
    for round in range(rounds):
        say(f"speed, round {round + 1} of {rounds}")
        for load, requests in enumerate(LOADS):
            for i in order:
                steps = benches[i].run(requests, TIMED.prompt_tokens, TIMED.output_tokens)
                figures = load_figures(requests, bounds[i].figures(steps), bounds[i].ceilings)
                decodes[i][load].append(figures.decode.tokens_per_s)
        for i in order:
            steps = benches[i].run(1, TIMED.long_prompt_tokens, 1)
            prompts[i].append(prompt_rate(bounds[i].figures(steps)).tokens_per_s)
        order.reverse()
    return [Speed(max(p), [max(load) for load in d]) for p, d in zip(prompts, decodes, strict=True)]
