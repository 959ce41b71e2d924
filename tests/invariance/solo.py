"""Drives the real loop, scheduler and a real backend turn by turn, and keeps the hash of every sampled row's logits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from potok.backends.native.backend import NativeBackend
from potok.core.radix import BYTES
from potok.core.scheduler import Limits, Scheduler
from potok.core.tier import Tier
from potok.engine.loop import EngineLoop
from potok.engine.tier_store import NoStore, Store, TierStore
from potok.finish import Finish
from potok.protocol import Cancel, Chunk, FromEngine, Sampling, Shutdown, Stats, Step, Submit, ToEngine, TokenLogprobs
from potok.weights.gguf import GGUFFile
from potok.weights.model_config import read_config


@dataclass(frozen=True)
class Setting:
    """One way to serve: none of it may show in the answers."""

    max_num_seqs: int = 128
    budget: int = 512
    num_blocks: int = 2000
    block_size: int = 32
    threads: int = 2
    kv_dtype: str = "f16"
    prefix_caching: bool = True
    tier_folder: str = ""  # of the second tier; "": there is none
    tier_bytes: int = 2**30


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        self.hashes += chunk.logit_hashes or []
        self.logprobs += [p.chosen for p in chunk.logprobs or []]
        self.prompt_logprobs += chunk.prompt_logprobs or []
        self.finish = chunk.finish


class Turns:
    """The engine's connection: `arrivals[t]` is handed over at turn t; freed blocks are poisoned after every step.

    Turns stand still while blocks are read or written, so that no test depends on how long that takes.
    """

    def __init__(
        self,
        arrivals: Mapping[int, Sequence[Submit | Cancel]],
        poison: Callable[[], None],
        is_settled: Callable[[], bool],
    ) -> None:
        self._arrivals = arrivals
        self._poison = poison
        self._is_settled = is_settled
        self._turn = -1
        self._open = {m.id for batch in arrivals.values() for m in batch if isinstance(m, Submit)}
        self.answers: dict[int, Answer] = defaultdict(Answer)
        self.stats: list[Stats] = []  # turn by turn; running and waiting are those of the turn, all else as told last

    def receive(self, timeout: float) -> Sequence[ToEngine]:
        if not self._is_settled():
            return []
        if not self._open:
            return [Shutdown()]
        self._turn += 1
        arriving = self._arrivals.get(self._turn, [])
        self._open -= {m.id for m in arriving if isinstance(m, Cancel)}
        return arriving

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, Step)
        self.stats.append(message.stats or self.stats[-1])
        for chunk in message.chunks:
            self.answers[chunk.id].take(chunk)
            if chunk.finish is not None:
                self._open.discard(chunk.id)
        self._poison()


class Model:
    def __init__(self, file: GGUFFile, activation_bits: int = 8) -> None:
        self._file = file
        self._config = read_config(file)
        self._activation_bits = activation_bits
        self._backends: dict[tuple[int, int, str], NativeBackend] = {}

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def _backend(self, setting: Setting) -> NativeBackend:
        key = (setting.threads, setting.block_size, setting.kv_dtype)
        if key not in self._backends:
            self._backends[key] = NativeBackend(
                self._file,
                self._config,
                threads=setting.threads,
                activation_bits=self._activation_bits,
                block_size=setting.block_size,
                kv_dtype=setting.kv_dtype,
            )
        return self._backends[key]

    def serve(
        self, arrivals: Mapping[int, Sequence[Submit | Cancel]], setting: Setting
    ) -> tuple[dict[int, Answer], Stats]:
        """Answers by request id, and the last statistics."""
        turns = self.serve_turns(arrivals, setting)
        return turns.answers, turns.stats[-1]

    def serve_turns(self, arrivals: Mapping[int, Sequence[Submit | Cancel]], setting: Setting) -> Turns:
        backend = self._backend(setting)
        limits = Limits(setting.max_num_seqs, setting.budget, self._config.context_length, setting.block_size)
        caching = setting.prefix_caching
        backend.allocate(setting.num_blocks, self._config.context_length)
        tier, store = open_tier(setting, backend)
        scheduler = Scheduler(limits, setting.num_blocks, prefix_caching=caching, tier=tier, checked=True)

        def poison() -> None:
            free = [b for b in range(setting.num_blocks) if scheduler.pool.refs(b) == 0]
            backend.poison(np.array(free, np.int32))

        poison()
        turns = Turns(arrivals, poison, lambda: scheduler.wake_at() is None)
        EngineLoop(scheduler, backend, turns, store).run()
        store.close()
        return turns


def open_tier(setting: Setting, backend: NativeBackend) -> tuple[Tier, Store]:
    """Always cheaper to read than to compute, whatever this machine is like."""
    size = setting.block_size
    if not setting.tier_folder:
        return Tier(0, size), NoStore()
    store = TierStore(
        setting.tier_folder,
        f"{size}-{setting.kv_dtype}",
        num_bytes=setting.tier_bytes,
        key_bytes=size * BYTES,
        kv_block=backend.kv_block,
    )
    return Tier(store.num_slots, size, store.found, read_us=1.0, token_us=1e9), store


def submit(id: int, prompt: list[int], count: int, **sampling: object) -> Submit:
    return Submit(id, prompt, count, Sampling(logit_hash=True, logprobs=2, **sampling))  # type: ignore[arg-type]


def random_prompt(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    return rng.integers(0, vocab, length).tolist()
