"""One choice of one answer: ids from the engine in, text with its end and its log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from potok.finish import Finish
from potok.params import SamplingParams
from potok.protocol import Chunk, TokenLogprobs
from potok.text.detokenizer import Detokenizer
from potok.text.stops import StopMatcher, StopStrings
from potok.text.tokenizer import Tokenizer

#: Stands for minus infinity, which JSON cannot say.
LOWEST_LOGPROB = -9999.0


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token at one position and the natural log of its probability.

    text: U+FFFD stands for parts of a character; bytes: exact. top: the most probable tokens there, best first.
    Hidden from the garbage collector: an answer may have a million of them, and no cycle goes through one.
    """

    token_id: int
    text: str
    bytes: bytes
    logprob: float
    top: list[TokenLogprob] = []


class Part(msgspec.Struct, frozen=True):
    """What one chunk added to a choice.

    text: may be empty, while a character or a possible stop string is incomplete. token_ids: all ids taken, those
    without visible text included. logprobs: one per id when asked for. finish_reason: "stop" or "length" on the last
    part.
    stop_reason: the caller's stop string or stop id that ended it, or the name of the deadline that cut it short; None
    for the model's own end.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None


_NOTHING = Part("", [])


class ChoiceAssembler:
    """Feeds one choice's chunks through detokenizer and stop strings.

    When a part is `done` although its chunk had no finish, a stop string matched: the engine does not know, and the
    request has to be cancelled. The rest of the chunk, and any later one, is dropped.
    """

    __slots__ = ("_count", "_detokenizer", "_done", "_params", "_stops", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stops: StopStrings | None = None) -> None:
        """stops: params.stop compiled, to share among the choices of one call."""
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops: StopMatcher | None = None
        if params.stop:
            self._stops = StopMatcher(stops or params.stop, params.include_stop_str_in_output)
        self._count = 0  # output tokens so far
        self._done = False

    def push(self, chunk: Chunk) -> Part:
        """chunk.finish: None, STOP, LENGTH or TIMEOUT; other ends have no text, and are the caller's to handle."""
        if self._done:
            return _NOTHING
        finish, tokens = chunk.finish, chunk.tokens
        last = len(tokens) - 1
        text = ""
        for i, token in enumerate(tokens):
            self._count += 1
            if finish is Finish.STOP and i == last and not self._shows_end(token):
                break
            text += self._pass(self._detokenizer.push(token))
            if self._stops is not None and self._stops.matched is not None:
                return self._end(chunk, i + 1, text, "stop", self._stops.matched)
        if finish is None:
            return Part(text, tokens, self._logprobs(chunk, len(tokens)))
        text += self._pass(self._detokenizer.finish())
        if self._stops is not None:
            if self._stops.matched is not None:
                return self._end(chunk, len(tokens), text, "stop", self._stops.matched)
            text += self._stops.finish()
        if finish is Finish.LENGTH:
            return self._end(chunk, len(tokens), text, "length", None)
        if finish is Finish.TIMEOUT:
            return self._end(chunk, len(tokens), text, "length", chunk.param)
        return self._end(chunk, len(tokens), text, "stop", self._stop_id(tokens))

    def _pass(self, text: str) -> str:
        """Stop strings count from the token after min_tokens: a stop string has to begin there."""
        if self._stops is None or self._count <= self._params.min_tokens:
            return text
        return self._stops.push(text)

    def _end(self, chunk: Chunk, count: int, text: str, reason: str, stop_reason: str | int | None) -> Part:
        self._done = True
        return Part(text, chunk.tokens[:count], self._logprobs(chunk, count), reason, stop_reason)

    def _shows_end(self, token: int) -> bool:
        """The token that ended the request is text only when it is the caller's own, and stops are to be shown."""
        return self._params.include_stop_str_in_output and token not in self._tokenizer.end_ids

    def _stop_id(self, tokens: Sequence[int]) -> int | None:
        """The caller's stop id that ended the request; None when the model's own end id did."""
        if not tokens or tokens[-1] not in self._params.stop_token_ids:
            return None
        own_end = tokens[-1] in self._tokenizer.end_ids and not self._params.ignore_eos
        return None if own_end else tokens[-1]

    def _logprobs(self, chunk: Chunk, count: int) -> list[TokenLogprob] | None:
        if chunk.logprobs is None or self._params.logprobs is None:
            return None
        return spelt(self._tokenizer, chunk.tokens[:count], chunk.logprobs[:count])


class PromptAssembler:
    """What is told about the prompt of one call: by the chunks of its first choice, up to the first token of that.

    cached_tokens: of the prompt, those that this choice found in the prefix cache; None until it is told.
    """

    __slots__ = ("_ids", "_rated", "_ratings", "_spelt", "_tokenizer", "cached_tokens")

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._rated = params.prompt_logprobs is not None
        self._ratings: list[TokenLogprobs] = []
        self._spelt: list[TokenLogprob | None] | None = None
        self.cached_tokens: int | None = None

    @property
    def told(self) -> bool:
        """Nothing more will come."""
        return self.cached_tokens is not None

    def push(self, chunk: Chunk) -> None:
        if chunk.prompt_logprobs is not None:
            self._ratings += chunk.prompt_logprobs
        if chunk.tokens:
            self.cached_tokens = chunk.cached_tokens

    def logprobs(self) -> list[TokenLogprob | None] | None:
        """One per token of the prompt, when asked for and told; the first has none: nothing stands before it."""
        if self._rated and self.told and self._spelt is None:
            self._spelt = [None, *spelt(self._tokenizer, self._ids[1:], self._ratings)]
            self._ratings = []
        return self._spelt


def spelt(tokenizer: Tokenizer, tokens: Sequence[int], at: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
    """The same with texts."""

    def one(token: int, logprob: float, top: list[TokenLogprob]) -> TokenLogprob:
        data = tokenizer.token_bytes(token)
        return TokenLogprob(token, tokenizer.token_text(token), data, max(logprob, LOWEST_LOGPROB), top)

    return [
        one(token, here.chosen, [one(*pair, []) for pair in zip(here.top_ids, here.top, strict=True)])
        for token, here in zip(tokens, at, strict=True)
    ]
