"""What is compared: each method counts private histories and answers given ones.

- `popularity`: exact counts. No privacy.
- `DP popularity`: the counts alone, with the whole budget.
- `spectral cut`, `ridge filter`: one release of the same two sums, m best items, divided by √max(count, f σ √m) on both
  sides; eigenvectors above the noise's edge (f = 5), or the 200 largest eigenvalues λ weighed by L / (L + a L₂₀),
  L = λ − λ₂₀₀ (f = 3). What this package does is measured against them at the head of its own rule.
- `alternating`: alternating minimisation with noisy sums, the same budget in parts (`alternating.py`).
- `spectral`: `tfdp_rec.spectral`; `spectral by recency`, told that the order of a history counts.
- `EASE`: ridge regression of each item on all others, best of some ridges by the test users, on the 6,000 most popular
  items. No privacy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, sparse

from experiments.spectral.alternating import Alternating
from experiments.spectral.data import Split
from tfdp_rec.core.mechanism.noise.words import WordSource
from tfdp_rec.datasets.log import Catalogue, log_of
from tfdp_rec.privacy import noise_of_one_release, private_counts
from tfdp_rec.spectral import Histories, SpectralRecommender, rules
from tfdp_rec.spectral.pair_sums import pair_sums
from tfdp_rec.sums.fixed_point import release_pairs

Answer = Callable[[Sequence[NDArray[np.int64]], int], NDArray[np.int64]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A split with the private histories flat."""

    split: Split
    histories: Histories
    catalogue: Catalogue

    @classmethod
    def of(cls, split: Split) -> Problem:
        """The problem of a split."""
        offsets = np.concatenate([[0], np.cumsum([len(items) for items in split.counted])])
        catalogue = Catalogue(np.arange(1, split.num_items + 1))
        return cls(split, Histories(np.concatenate(split.counted), offsets), catalogue)


def popularity(problem: Problem) -> Answer:
    """Everybody the same."""
    counts = np.bincount(np.concatenate([np.unique(items) for items in problem.split.counted]),
                         minlength=problem.split.num_items + 1)[1:]  # fmt: skip
    return linear(problem, np.arange(0), np.zeros((0, 0)), counts)


def dp_popularity(problem: Problem, epsilon: float, delta: float, words: WordSource) -> Answer:
    """Everybody the same, by noisy counts."""
    sigma = noise_of_one_release(epsilon, delta)
    counted = private_counts(problem.histories, problem.catalogue, noise_multiplier=sigma, words=words)
    return linear(problem, np.arange(0), np.zeros((0, 0)), counted.values)


def spectral(problem: Problem, epsilon: float, delta: float, words: WordSource) -> Answer:
    """The package's."""
    recommender = SpectralRecommender(problem.catalogue.ids, epsilon, delta, words=words)
    recommender.fit(problem.histories, verbose=0)
    return lambda given, k: recommender.recommend(given, k)[0]


def spectral_by_recency(problem: Problem, epsilon: float, delta: float, words: WordSource) -> Answer:
    """The package's, for the next item after an ordered history."""
    recommender = SpectralRecommender(problem.catalogue.ids, epsilon, delta, recency=0.25, words=words)
    recommender.fit(problem.histories, verbose=0)
    return lambda given, k: recommender.recommend(given, k)[0]


def spectral_cut(problem: Problem, epsilon: float, delta: float, words: WordSource) -> Answer:
    """Eigenvectors above the noise's edge."""
    return _filtered(problem, epsilon, delta, words, 5.0, lambda values: (values > 1.05 * 2 / 5).astype(np.float32))


def ridge_filter(problem: Problem, epsilon: float, delta: float, words: WordSource) -> Answer:
    """Eigenvalues weighed by a ridge that the twentieth sets."""

    def weigh(values: NDArray[np.float32]) -> NDArray[np.float32]:
        above = np.maximum(values - values[min(199, len(values) - 1)], 0)
        return above / (above + 0.5 * above[min(19, len(values) - 1)] + 1e-12)

    return _filtered(problem, epsilon, delta, words, 3.0, weigh)


def alternating(problem: Problem, epsilon: float, delta: float, words: WordSource) -> Answer:
    """Users solved exactly, items from noisy sums over them; settings as were best for the asked users of ml-100k."""
    settings, share = Alternating(), 1 / 9
    sigma = noise_of_one_release(epsilon, delta)
    of_counts, of_sums = sigma / share**0.5, sigma * (settings.sums / (1 - share)) ** 0.5
    counts = private_counts(problem.histories, problem.catalogue, noise_multiplier=of_counts, words=words).values
    head = np.argsort(-counts, kind="stable")[: settings.head]
    has = _matrix(problem, problem.split.counted)[:, head].astype(np.float64)
    items = settings.fit(has, counts[head], of_sums, np.random.default_rng(words(2)))
    prior = np.maximum(counts, 0) / len(problem.histories)
    mine = lambda held: settings.users(held[:, head].astype(np.float64).tocsr(), items) @ items.T  # noqa: E731
    return by_head(problem, head, mine, prior)


def _filtered(
    problem: Problem,
    epsilon: float,
    delta: float,
    words: WordSource,
    floor: float,
    weigh: Callable[[NDArray[np.float32]], NDArray[np.float32]],
) -> Answer:
    users = len(problem.histories)
    split = rules.Split.from_budget(noise_of_one_release(epsilon, delta), users, len(problem.catalogue))
    counts = private_counts(problem.histories, problem.catalogue, noise_multiplier=split.counts, words=words).values
    head = rules.head_of(counts, users, split.gram)
    noisy = release_pairs(pair_sums(problem.histories, problem.catalogue, head, ordered=False), split.gram, words)
    scale = np.maximum(counts[head], floor * split.gram * len(head) ** 0.5).astype(np.float32) ** -0.5
    values, vectors = linalg.eigh(noisy * scale[:, None] * scale, driver="evd")
    values, vectors = values[::-1], vectors[:, ::-1]
    return linear(problem, head, (vectors * weigh(values)) @ vectors.T, 1e-6 * np.maximum(counts, 0))


def ease(problem: Problem, ridge: float) -> Answer:
    """No privacy."""
    counts = np.bincount(np.concatenate(problem.split.counted), minlength=problem.split.num_items + 1)[1:]
    head = np.argsort(-counts, kind="stable")[: rules.MOST_HEAD]
    has = _matrix(problem, problem.split.counted)[:, head]
    gram = (has.T @ has).toarray()
    inverse = np.linalg.inv(gram + ridge * np.eye(len(head), dtype=np.float32))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    return linear(problem, head, weights, 1e-9 * counts)


def linear(problem: Problem, head: NDArray[np.int64], weights: NDArray[Any], prior: NDArray[Any]) -> Answer:
    """Answers by prior + history · weights, what was given left out."""
    return by_head(problem, head, lambda has: has[:, head] @ weights, prior)


def by_head(
    problem: Problem, head: NDArray[np.int64], score: Callable[[sparse.csr_matrix], NDArray[Any]], prior: NDArray[Any]
) -> Answer:
    """Answers by prior + what the head's items are given for a history, what was given left out."""

    def answer(given: Sequence[NDArray[np.int64]], k: int) -> NDArray[np.int64]:
        found = []
        for start in range(0, len(given), 1000):
            has = _matrix(problem, given[start : start + 1000])
            scores = np.tile(prior.astype(np.float32), (has.shape[0], 1))
            scores[:, head] += score(has)
            scores[has.nonzero()] = -np.inf
            best = np.argpartition(-scores, k, axis=1)[:, :k]
            order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
            found.append(problem.catalogue.ids[np.take_along_axis(best, order, 1)])
        return np.concatenate(found)

    return answer


def _matrix(problem: Problem, histories: Sequence[NDArray[np.int64]]) -> sparse.csr_matrix:
    (part,) = log_of(list(histories)).parts(problem.catalogue, events=2**62)
    ones = np.ones(len(part.users), np.float32)
    return sparse.csr_matrix((ones, (part.users, part.places)), (part.num_users, len(problem.catalogue)))
