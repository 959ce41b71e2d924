"""Drives the real loop, scheduler and a real backend turn by turn, and keeps the hash of every sampled row's logits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from potok.backends.native.backend import NativeBackend
from potok.core.scheduler import Limits, Scheduler
from potok.engine.loop import EngineLoop
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
    """The engine's connection: `arrivals[t]` is handed over at turn t; freed blocks are poisoned after every step."""

    def __init__(self, arrivals: Mapping[int, Sequence[Submit | Cancel]], poison: Callable[[], None]) -> None:
        self._arrivals = arrivals
        self._poison = poison
        self._turn = -1
        self._open = {m.id for batch in arrivals.values() for m in batch if isinstance(m, Submit)}
        self.answers: dict[int, Answer] = defaultdict(Answer)
        self.stats: list[Stats] = []  # turn by turn

    def receive(self, timeout: float) -> Sequence[ToEngine]:
        if not self._open:
            return [Shutdown()]
        self._turn += 1
        arriving = self._arrivals.get(self._turn, [])
        self._open -= {m.id for m in arriving if isinstance(m, Cancel)}
        return arriving

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, Step)
        self.stats.append(message.stats)
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
        scheduler = Scheduler(limits, setting.num_blocks, prefix_caching=caching, checked=True)
        backend.allocate(setting.num_blocks, self._config.context_length)

        def poison() -> None:
            free = [b for b in range(setting.num_blocks) if scheduler.pool.refs(b) == 0]
            backend.poison(np.array(free, np.int32))

        poison()
        turns = Turns(arrivals, poison)
        EngineLoop(scheduler, backend, turns).run()
        return turns


def submit(id: int, prompt: list[int], count: int, **sampling: object) -> Submit:
    return Submit(id, prompt, count, Sampling(logit_hash=True, logprobs=2, **sampling))  # type: ignore[arg-type]


def random_prompt(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    return rng.integers(0, vocab, length).tolist()
