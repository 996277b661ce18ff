"""Draws from the operating system's entropy: nothing that was drawn helps to guess another draw.

**Poisson samples.**

    size      Binomial(n, q), a whole number below Σ w_m:  w_{m+1} = ⌊w_m (n - m) q / ((m + 1)(1 - q))⌋, and the other
              way below the likeliest size, whose weight is 2¹²⁸
    units     as many different ones, every set equally likely: what is missing is drawn again until none is

q is the float that is priced, as the fraction that it is, and the numbers are whole: W sizes of weight above zero are
each wrong by W 2⁻¹²⁸ at most, so that all chances together are wrong by W² 2⁻¹²⁸, below 2⁻⁹⁰ for W ≤ 2¹⁹. A unit's
chance to be drawn is q to within that, and a step adds (1 + e^ε) 2⁻⁹⁰ at most to δ.

**Numbers of runs** k have the weights w_1 = 2¹²⁸, w_{k+1} = ⌊w_k (1 - γ)(k + η) / (k + 1)⌋, which end where one is 0.

**Uniform numbers** below T are remainders of words of 64 bits; words above the largest multiple of T are drawn again.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import secrets
from fractions import Fraction

import numpy as np

from tfdp_rec.core.ground.entropy import os_entropy

_LARGEST = 1 << 128  # weight of the likeliest size


def poisson_sample(num_units: int, probability: float) -> np.ndarray:
    """Each of range(num_units) with the same probability, independently; ascending."""
    least, ends = sizes(num_units, probability)
    size = least + bisect.bisect_right(ends, secrets.randbelow(ends[-1]))
    few = min(size, num_units - size)
    drawn = np.zeros(0, np.int64)
    while len(drawn) < few:
        # No unit is preferred, so every set of `few` is equally likely.
        both = np.append(drawn, uniform_numbers(few - len(drawn), num_units))
        drawn = np.unique(both, return_counts=True)[0]  # counted, it sorts: a table of hashes is slow
    return drawn if few == size else np.delete(np.arange(num_units), drawn)


def uniform_numbers(count: int, below: int) -> np.ndarray:
    """Independent uniform numbers from 0 to below `below`."""
    last, drawn = 2**64 // below * below - 1, np.zeros(0, np.int64)
    while len(drawn) < count:
        words = os_entropy(count - len(drawn))
        words = words[words <= last]  # larger ones would prefer some numbers
        drawn = np.append(drawn, (words % below).astype(np.int64))
    return drawn


def number_of_runs(gamma: float, shape: float) -> int:
    """A number from 1 on, truncated negative binomial."""
    ends = _numbers_of_runs(gamma, shape)
    return 1 + bisect.bisect_right(ends, secrets.randbelow(ends[-1]))


@functools.lru_cache(maxsize=8)
def _numbers_of_runs(gamma: float, shape: float) -> list[int]:
    """The added up weights of all numbers of runs."""
    going, eta = 1 - Fraction(gamma), Fraction(shape)

    def next_weight(weight: int, k: int) -> int:
        return int(weight * going * (k + eta) / (k + 1))

    weights = itertools.accumulate(itertools.count(1), next_weight, initial=_LARGEST)
    return list(itertools.accumulate(itertools.takewhile(bool, weights)))


@functools.lru_cache(maxsize=8)
def sizes(num_units: int, probability: float) -> tuple[int, list[int]]:
    """The least size of a Poisson sample, and the added up weights of that size and of those above it."""
    chance = Fraction(probability)
    heads, tails = chance.numerator, chance.denominator - chance.numerator
    likeliest = min(num_units, int((num_units + 1) * chance))
    more = _weights_upwards(num_units, likeliest, heads, tails)
    fewer = _weights_upwards(num_units, num_units - likeliest, tails, heads)  # sizes of what is not drawn
    return likeliest - len(fewer) + 1, list(itertools.accumulate([*fewer[:0:-1], *more]))


def _weights_upwards(num_units: int, first: int, heads: int, tails: int) -> list[int]:
    """The weights of the sizes from `first` on, the likeliest, that are above zero."""

    def next_weight(weight: int, size: int) -> int:
        return weight * (num_units - size) * heads // ((size + 1) * tails)

    weights = itertools.accumulate(range(first, num_units), next_weight, initial=_LARGEST)
    return list(itertools.takewhile(bool, weights))
