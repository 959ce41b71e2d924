"""What `potok bench prefix` asks: functions of the seed alone, in token ids. Every answer goes to its last token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from potok.protocol import Sampling, Submit

#: Length of an answer: from, to, out of a hundred answers.
MIX = ((16, 64, 30), (64, 256, 50), (256, 1024, 20))
MIXED_PROMPT = (20, 200)
LONGEST_MIXED = MIXED_PROMPT[1] + MIX[-1][1]


class Lengths(NamedTuple):
    """Of one request, in tokens."""

    prompt: int
    output: int


def behind_one_prompt(
    vocab_size: int, requests: int, system_tokens: int, question_tokens: int, answer_tokens: int, seed: int
) -> list[Submit]:
    """Requests that begin with the same `system_tokens` and go on with a question that nobody else asks."""
    rng, vocab = random.Random(f"{seed} system"), range(vocab_size)
    system = rng.choices(vocab, k=system_tokens)
    return [
        Submit(id, system + rng.choices(vocab, k=question_tokens), answer_tokens, Sampling()) for id in range(requests)
    ]


class Dialogues:
    """Users who resend their whole history with each turn, and speak again some time after they were answered.

    The turns come in a shuffled order, in which a turn is passed over while its user waits for an answer.
    """

    def __init__(
        self, vocab_size: int, users: int, turns: int, turn_tokens: int, answer_tokens: int, seed: int
    ) -> None:
        rng, vocab = random.Random(f"{seed} dialogues"), range(vocab_size)
        self._says = [[rng.choices(vocab, k=turn_tokens) for _ in range(turns)] for _ in range(users)]
        self._order = [user for user in range(users) for _ in range(turns)]
        rng.shuffle(self._order)
        self._histories: list[list[int]] = [[] for _ in range(users)]
        self._turn = [0] * users
        self._answer_tokens = answer_tokens
        self._turns = turns
        self._waiting: set[int] = set()  # users who have not been answered yet

    def next(self) -> Submit | None:
        for place, user in enumerate(self._order):
            if user not in self._waiting:
                del self._order[place]
                self._waiting.add(user)
                turn = self._turn[user]
                self._turn[user] += 1
                self._histories[user] += self._says[user][turn]
                return Submit(user * self._turns + turn, list(self._histories[user]), self._answer_tokens, Sampling())
        return None

    def take(self, id: int, answer: Sequence[int]) -> None:
        user = id // self._turns
        self._histories[user] += answer
        self._waiting.remove(user)


def mixed_lengths(requests: int, seed: int) -> list[Lengths]:
    """Short, middling and long answers as in MIX, to prompts of any length in MIXED_PROMPT."""
    rng = random.Random(f"{seed} mixed")
    kinds = rng.choices(MIX, weights=[kind[2] for kind in MIX], k=requests)
    return [Lengths(rng.randint(*MIXED_PROMPT), rng.randint(low, high)) for low, high, _ in kinds]


def mixed_requests(vocab_size: int, lengths: Sequence[Lengths], seed: int) -> list[Submit]:
    """Requests of these lengths that have nothing in common."""
    rng, ids = random.Random(f"{seed} mixed tokens"), count()
    return [Submit(next(ids), rng.choices(range(vocab_size), k=n.prompt), n.output, Sampling()) for n in lengths]
