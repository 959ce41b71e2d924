"""The generator gives the published numbers, and a number depends on its name alone."""

from __future__ import annotations

import numpy as np
import pytest

from potok.sampling.philox import philox, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # known answers of Random123 for philox4x32, 10 rounds: zeros, ones, digits of pi
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert philox(counter, key) == words


def test_uniform_is_the_first_two_words_as_53_bits() -> None:
    seed, choice, position = 0x299F31D0_A4093822, 3, 77
    low, high, _, _ = philox((position, choice, 0, 0), (0xA4093822, 0x299F31D0))
    assert uniform(seed, choice, position) == (high * 2**32 + low) // 2**11 / 2**53


def test_uniform_fills_the_unit_interval_evenly() -> None:
    u = np.array([uniform(7, 0, position) for position in range(20000)])
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, 64, (0, 1))[0]
    expected = len(u) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi-square of 63 degrees passes 120 once in 10^5
    # neighbours in position, and the two choices of a pair, know nothing of each other
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    other = np.array([uniform(7, 1, position) for position in range(20000)])
    assert abs(np.corrcoef(u, other)[0, 1]) < 0.03


def test_every_part_of_the_name_matters() -> None:
    names = [
        (seed, choice, position) for seed in (0, 1, 2**32, 2**64 - 1) for choice in range(4) for position in range(4)
    ]
    assert len({uniform(*name) for name in names}) == len(names)
