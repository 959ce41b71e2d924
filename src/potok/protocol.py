"""Messages between the API process and the engine process.

Tagged, frozen, msgpack. Fields are only ever appended, each with a default. Token ids only: no text crosses.
"""

from __future__ import annotations

import msgspec

from potok.finish import Finish
from potok.params import Terms


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one request's tokens are chosen. All values are resolved: nothing is None, nothing means "default"."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits, as unsigned
    choice: int = 0  # index among the n choices of one call
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: tuple[int, ...] = ()  # ids that end the request: the model's end ids (unless ignored) and the caller's
    min_tokens: int = 0  # stop_ids are impossible before this many output tokens
    logprobs: int = -1  # -1: none; k: the chosen token's and the k best
    prompt_logprobs: int = -1  # as logprobs, for each token of the prompt but the first
    logit_hash: bool = False  # report a 64-bit hash of the row's raw logits (tests of the numerics contract)


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """API -> engine: start a request. `id` is unique for the life of the engine and is never the client's.

    namespace (of the API key) and salt (the caller's own): requests share KV only where both are equal.
    Times are of the machine's monotonic clock, which both processes read, in microseconds; 0: not given.
    """

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    namespace: str = ""
    salt: str = ""
    priority: int = 0  # lower comes earlier; of use under the policy of that name
    arrived_us: int = 0
    first_by_us: int = 0  # worth nothing to the caller when its first token comes later
    ends_by_us: int = 0  # when it ends at the latest, complete or not
    whole: bool = False  # the caller reads the answer when it is complete, and not token by token

    @classmethod
    def on(cls, terms: Terms, id: int, prompt: list[int], max_tokens: int, sampling: Sampling) -> Submit:
        return cls(
            id,
            prompt,
            max_tokens,
            sampling,
            namespace=terms.sharing.namespace,
            salt=terms.sharing.salt,
            priority=terms.priority,
            arrived_us=terms.arrived_us,
            first_by_us=terms.first_by_us,
            ends_by_us=terms.ends_by_us,
            whole=terms.whole,
        )


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """API -> engine: forget this request. Legal in every phase; unknown ids are ignored."""

    id: int


class DescribeCache(msgspec.Struct, frozen=True, tag="describe_cache", array_like=True):
    """API -> engine: name the `top` prefixes of the prefix cache. namespace: of which; None: of all."""

    id: int
    top: int
    namespace: str | None = None


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """API -> engine: end the process."""


class Measure(msgspec.Struct, frozen=True, tag="measure", array_like=True):
    """API -> engine, in answer to Loaded: the API process has started and leaves the cores alone; measure them now."""


class EngineInfo(msgspec.Struct, frozen=True):
    """What the engine resolved at start, for the API process and for the start log."""

    vocab_size: int
    max_model_len: int  # tokens, prompt + output, of one request
    block_size: int  # tokens
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    threads: int
    isa: str
    kv_cache_bytes: int
    notes: list[str]  # one line per derived setting: "threads 2: 2 cores in the affinity mask"
    schedule_policy: str = "fcfs"


class Loaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    """engine -> API: weights are in memory; the first steps wait for Measure."""


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """engine -> API: weights are loaded and a probe step has run."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """engine -> API: the engine could not start, or met a bug and is about to end. One sentence."""

    message: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, from raw logits) at one output position."""

    chosen: float
    top_ids: list[int]  # descending by logit, ties by id
    top: list[float]


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave one request."""

    id: int
    tokens: list[int]
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] | None = None  # one per token, when asked for
    error: str | None = None  # with Finish.ERROR and Finish.TIMEOUT
    param: str | None = None  # with these: the field to blame when it is the caller's fault, else None
    logit_hashes: list[int] | None = None  # one per token, when asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the next tokens of the prompt, when asked for
    cached_tokens: int = 0  # with `tokens`: tokens of the prompt that came from the prefix cache


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """State of the engine after a step. Counters are totals since the start."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0  # by requests; what the prefix cache alone holds is not in use
    kv_blocks_total: int = 0
    prompt_tokens: int = 0  # prompt tokens computed (recomputed ones counted again)
    generation_tokens: int = 0  # tokens sampled
    preemptions: int = 0
    steps: int = 0
    busy_us: int = 0  # time inside backend steps
    kv_blocks_idle: int = 0  # that the prefix cache alone holds
    prefix_queries: int = 0  # requests that joined
    prefix_hits: int = 0  # of them, those that found something in the prefix cache
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_misses: dict[str, int] = {}  # by reason
    evicted_blocks: int = 0
    evicted_reused_blocks: int = 0  # of them, those that had been hit
    tier_blocks: int = 0  # in the second tier
    tier_slots: int = 0  # blocks that it may hold; 0: there is none
    tier_read_blocks: int = 0
    tier_written_blocks: int = 0
    tier_read_bytes: int = 0
    tier_written_bytes: int = 0
    tier_failures: int = 0  # reads and writes
    tier_hit_tokens: int = 0  # of prompts, and of answers that were preempted, that were read and not computed
    tier_given_up: int = 0  # requests that computed what took too long to read
    tier_pauses: int = 0  # of writing, each after failures in a row
    waiting_tokens: int = 0  # of the prompts that wait
    padding_rows: int = 0  # rows computed for finished members of a static or dynamic batch
    timeouts: int = 0  # requests that were ended by their deadline
    slow_steps: int = 0  # steps whose decoding alone was expected to take longer than target_itl_ms
    place_us: int = 0  # expected time until one more of those who wait can join
    submits: int = 0  # Submit messages taken: who has sent more knows that these numbers do not count them yet


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """engine -> API: one message per step, or per heartbeat when nothing runs (chunks empty)."""

    chunks: list[Chunk]
    stats: Stats | None  # None: much like those told last


class CachedPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A prefix that the cache holds."""

    tokens: list[int]  # its first ones; none where the caller had salted it
    num_tokens: int
    num_blocks: int
    hits: int  # as many as are counted: see potok.core.eviction
    namespace: str
    salted: bool


class CacheContents(msgspec.Struct, frozen=True, tag="cache", array_like=True):
    """engine -> API, in answer to DescribeCache: prefixes, the most useful first."""

    id: int
    prefixes: list[CachedPrefix]


ToEngine = Submit | Cancel | Measure | DescribeCache | Shutdown
FromEngine = Loaded | Ready | Failed | Step | CacheContents
