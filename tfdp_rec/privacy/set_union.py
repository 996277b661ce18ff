"""Which terms many people use, found privately: a vocabulary that may be published.

**A vocabulary read off private data is itself a release**: a term in it tells that somebody used it. So it is public
to begin with, or it is counted under differential privacy:

    each individual gives its distinct terms (at most m, chosen at random) the weight 1/√t, t how many:
    one individual moves the vector of all weights by at most 1 in ℓ₂. Add N(0, σ²) to each weight seen, keep
    those above ρ = max over t = 1..m of { 1/√t + σ Φ⁻¹((1 − δ_ρ)^(1/t)) }, of these the greatest.

Guarantees:
- A term only one individual holds passes with probability at most δ_ρ over all its terms, and given that none does,
  what is released is the Gaussian mechanism with noise multiplier σ. So the terms cost `GaussianDpEvent(σ)`, and δ_ρ to
  be taken off the δ of the accountant.

Reference:
    Gopi, Gulhane, Kulkarni, Shen, Shokouhi and Yekhanin, Differentially Private Set Union, ICML 2020 (weighted Gaussian
    with truncation).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent
from scipy import special

from tfdp_rec.noise.words import WordSource, gaussian, os_entropy


class Found(NamedTuple):
    """Terms, and what finding them cost.

    Attributes:
        terms: the most used first.
        event: for `Accountant.spend`.
        delta: δ_ρ, to be taken off the accountant's δ.
    """

    terms: tuple[str, ...]
    event: DpEvent
    delta: float


def private_terms(
    held: Iterable[Iterable[str]],
    size: int,
    *,
    noise_multiplier: float,
    threshold_delta: float,
    max_terms: int = 100,
    words: WordSource = os_entropy,
) -> Found:
    """The terms that most individuals hold, counted under differential privacy, one individual a unit.

    Args:
        held: the terms of each individual; an individual's repeats count once. Read once.
        size: at most so many terms; fewer when fewer pass the threshold.
        noise_multiplier: σ; the vector of weights has sensitivity 1.
        threshold_delta: δ_ρ, probability that a term of a single individual passes.
        max_terms: m, distinct terms an individual gives.
        words: for tests; the operating system's if left out.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> people = [["towel", "tea"]] * 500 + [["secret"]]
        >>> sorted(private_terms(people, 10, noise_multiplier=1.0, threshold_delta=1e-6).terms)
        ['tea', 'towel']
    """
    if size < 1 or max_terms < 1:
        raise ValueError(f"size and max_terms must be at least 1, got {size} and {max_terms}.")
    if not (noise_multiplier > 0 and math.isfinite(noise_multiplier)):
        raise ValueError(f"noise_multiplier must be positive, got {noise_multiplier}.")
    above = threshold(noise_multiplier, threshold_delta, max_terms)
    weights = clipped_weights(held, max_terms, words)
    terms = sorted(weights)  # an order that depends on no individual
    noisy = np.array([weights[term] for term in terms]) + noise_multiplier * gaussian(words, (len(terms),))
    best = [place for place in np.argsort(-noisy, kind="stable")[:size] if noisy[place] > above]
    return Found(tuple(terms[place] for place in best), GaussianDpEvent(noise_multiplier), threshold_delta)


def threshold(noise_multiplier: float, threshold_delta: float, max_terms: int) -> float:
    """ρ: the noisy weight above which terms are released.

    Args:
        noise_multiplier: σ.
        threshold_delta: δ_ρ in (0, 1).
        max_terms: m.

    Raises:
        ValueError: δ_ρ is out of range.

    Example:
        >>> round(threshold(1.0, 1e-6, 1), 3)
        5.753
    """
    if not 0 < threshold_delta < 1:
        raise ValueError(f"threshold_delta must lie strictly between 0 and 1, got {threshold_delta}.")
    t = np.arange(1, max_terms + 1)
    upper_tail = -np.expm1(np.log1p(-threshold_delta) / t)  # 1 − (1 − δ)^(1/t), without cancellation
    return float(np.max(1 / np.sqrt(t) - noise_multiplier * special.ndtri(upper_tail)))


def clipped_weights(held: Iterable[Iterable[str]], max_terms: int, words: WordSource) -> dict[str, float]:
    """The sum of the individuals' weights, which one of them moves by at most 1 in ℓ₂. No noise: not to be released."""
    weights: dict[str, float] = {}
    for terms in held:
        distinct = sorted(set(terms))
        given = distinct if len(distinct) <= max_terms else _sample(distinct, max_terms, words)
        for term in given:
            weights[term] = weights.get(term, 0.0) + len(given) ** -0.5
    return weights


def _sample(terms: Sequence[str], count: int, words: WordSource) -> list[str]:
    """So many of them, each set of that size as likely as any: those whose random words are least."""
    return [terms[place] for place in np.argsort(words(len(terms)), kind="stable")[:count]]
