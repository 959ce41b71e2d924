"""What a load test sends, and when: a function of the seed and of the request's index, and of nothing else."""

from __future__ import annotations

import random

_VOCABULARY = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information
back parent face others level office door health person art war history party result change reason research girl
moment air teacher force education foot boy age policy music market sense nation plan college interest death
experience effect use class control field development role rate heart drug show leader light voice wife mind price
report decision son view relationship town road arm difference value building action model season tax director
position player record paper space ground form event official matter center site project activity star table need
court oil cost industry figure street image phone data picture practice piece land product doctor wall patient
worker news test movie north love support technology step baby computer type attention film tree source hair window
evidence culture brother energy period course summer plant term letter condition choice rule south floor material
population medical hospital church risk fire future bank west board subject rest behavior performance top goal
second bed order author blood
"""

#: Each word, with its leading space, is one token in the usual byte-pair vocabularies, so that words count tokens.
WORDS = tuple(_VOCABULARY.split())

#: Words that spell the request's index; len(WORDS) ** 4 requests differ before any random word.
INDEX_WORDS = 4


def prompt(seed: int, index: int, num_words: int, shared_words: int = 0) -> str:
    """Text of `num_words` words for request number `index`.

    The first `shared_words` are the same in every prompt of this seed. The words after them spell the index, lowest
    digit first: no two prompts go on alike, so a server's prefix reuse gains nothing that was not asked for.
    """
    shared = random.Random(f"{seed} shared").choices(WORDS, k=shared_words)
    own = random.Random(f"{seed} {index}")
    offset = random.Random(f"{seed} offset").randrange(len(WORDS))  # another seed opens with other words
    digits = [(index // len(WORDS) ** i + offset) % len(WORDS) for i in range(INDEX_WORDS)]
    words = shared + [WORDS[d] for d in digits]
    words += own.choices(WORDS, k=max(0, num_words - len(words)))
    return " ".join(words[: max(num_words, shared_words + 1)])


def poisson_arrivals(seed: int, rate: float, duration_s: float) -> list[float]:
    """Seconds, ascending in [0, duration_s), at which requests arrive: `rate` a second on average, independent."""
    source = random.Random(f"{seed} arrivals {rate}")
    times: list[float] = []
    now = source.expovariate(rate)
    while now < duration_s:
        times.append(now)
        now += source.expovariate(rate)
    return times
