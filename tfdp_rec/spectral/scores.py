"""Scores of the catalogue for a history, from released numbers alone: βμ + history · B - o.

**A history in order**, d items of the catalogue, the oldest first, has weights h: an item that j others follow

    (1 + j)⁻ᵍ d / Σ_{i<d} (1 + i)⁻ᵍ

so that they add up to d, as without order, and stand in the same relation to the prior.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from tfdp_rec.datasets.log import Catalogue
from tfdp_rec.spectral import rules
from tfdp_rec.spectral.denoising import weights_between_items
from tfdp_rec.spectral.features import likeness
from tfdp_rec.spectral.release import Release

_HISTORIES_AT_ONCE = 1024
Weighed: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclasses.dataclass(frozen=True, eq=False)
class Estimates:
    """What is computed from a release.

    Attributes:
        weights: B, between the items of the head.
        prior: βμ, of all items.
        overlap: o, what both tell of the head.
    """

    weights: NDArray[np.float32]
    prior: NDArray[np.float32]
    overlap: NDArray[np.float32]

    @classmethod
    def of(cls, made: Release) -> Estimates:
        """The estimates of a release; minutes for thousands of items."""
        head = made.head
        diagonal = rules.diagonal_of(made.counts[head], made.pairs, made.users, made.counts_noise[head], made.ordered)
        prior = rules.prior_of(made.counts, made.users, made.counts_noise)
        weights = weights_between_items(made.pairs, made.pairs_noise, diagonal)
        overlap = rules.overlap_of(prior[head], weights, rules.kappa(made))
        return cls(weights, (rules.PRIOR * prior).astype(np.float32), overlap.astype(np.float32))


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Scores and the best items for histories of raw ids.

    Attributes:
        catalogue: The items.
        release: The sums, of which the head and the noise are needed.
        estimates: What was computed from them.
        recency: g, the exponent of the weights of a history.
        vectors: Features of the items, if they have any.
    """

    catalogue: Catalogue
    release: Release
    estimates: Estimates
    recency: float
    vectors: sparse.csr_matrix | None = None

    def of(self, histories: Iterable[ArrayLike]) -> NDArray[np.float32]:
        """Scores of the whole catalogue, `[histories, items]`."""
        return self._add_up([self._weigh(history) for history in histories])

    def find_best(self, histories: Sequence[ArrayLike], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Raw ids and scores, `[histories, k]`, of the best items that are not in the history, best first."""
        answers = [
            self._best([self._weigh(history) for history in histories[start : start + _HISTORIES_AT_ONCE]], k)
            for start in range(0, len(histories), _HISTORIES_AT_ONCE)
        ]
        ids, scores = zip(*answers) if answers else ([np.zeros((0, k), np.int64)], [np.zeros((0, k), np.float32)])
        return np.concatenate(ids), np.concatenate(scores)

    def make_module(self) -> Any:
        """A `tf.Module` that gives the same answers."""
        from tfdp_rec.spectral.servable import SpectralAnswers

        features = None if self.vectors is None else (self.vectors, self._weighed_shares)
        found = self.estimates
        return SpectralAnswers(self.release.head, found.weights, found.prior, found.overlap, self.recency, features)

    def _weigh(self, history: ArrayLike) -> Weighed:
        """Places of a history's items and their weights; an item that occurs again counts by its last occurrence."""
        places = self.catalogue.places_of(history)
        latest_first = places[places >= 0][::-1]
        different, age = np.unique(latest_first, return_index=True)
        weights = np.asarray((1.0 + np.arange(len(latest_first))) ** -self.recency, np.float64)
        return different, weights[age] / np.mean(weights) if len(weights) else weights

    def _add_up(self, held: Sequence[Weighed]) -> NDArray[np.float32]:
        head = self.release.head
        rows = np.repeat(np.arange(len(held)), [len(places) for places, _ in held])
        places = np.concatenate([places for places, _ in held]).astype(np.int64)
        weights = np.concatenate([weights for _, weights in held]).astype(np.float32)
        whole = sparse.csr_matrix((weights, (rows, places)), (len(held), len(self.catalogue)))
        has = whole[:, head]
        scores = np.tile(self.estimates.prior, (len(held), 1))
        scores[:, head] += has @ self.estimates.weights
        scores[np.ix_(has.getnnz(axis=1) > 0, head)] -= self.estimates.overlap
        if self.vectors is not None:
            scores += likeness(self.vectors, self._weighed_shares, whole)
        return scores

    @property
    def _weighed_shares(self) -> NDArray[np.float32]:
        """μ, times the weight of features."""
        return np.float32((1 - rules.kappa(self.release) / 2) / rules.PRIOR) * self.estimates.prior

    def _best(self, held: Sequence[Weighed], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        scores = self._add_up(held)
        for row, (places, _) in zip(scores, held):
            row[places] = -np.inf
        best = np.stack([_first(row, k) for row in scores])
        found = np.take_along_axis(scores, best, axis=1)
        return np.where(np.isfinite(found), self.catalogue.ids[best], self.catalogue.padding), found


def _first(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Places of the k best scores, the best first; of equal scores the first place."""
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    places = np.flatnonzero(scores >= least)
    return places[np.argsort(-scores[places], kind="stable")][:k]
