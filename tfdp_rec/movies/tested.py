"""How well a recommender does on users whom it was not made from: the place at which it puts the movie that came next.

A test user gives one example: a random movie of theirs, and the 20 before it, which are told and left out of the
answer. With s the scores of all other movies and y the movie to be found,

    place = |{i : s_i > s_y}| + |{i before y in the catalogue : s_i = s_y}|,
    recall@k = the share of users with place < k,      nDCG@k = the mean of [place < k] / log₂(place + 2).

Everybody is asked the same, whatever they are made of: scores of the whole catalogue from the same 20 movies. A score
that is no number stands last. A label 0 is not in the catalogue, and nobody finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.metrics import Mean

KS = (1, 5, 10, 20)
_AT_ONCE = 500  # users, times the catalogue: about 50 MB

Scores = Callable[[NDArray[np.int32]], Any]
"""From movie numbers `[users, history]`, oldest first and then zeros, to scores `[users, movies]`."""


class Examples(Protocol):
    """What a user is told, and what is to be found."""

    def fixed(self, seed: int = 0) -> dict[str, NDArray[np.int32]]:
        """`context` `[users, history]`, oldest first and then zeros, and `label` `[users]`; the same for a seed."""


class Tests:
    """The examples of the test users, the same for everybody.

    Args:
        examples: of the test users.
        seed: of which movies are to be found.
        at_once: users; times the catalogue, this is memory.
    """

    __test__ = False  # for pytest, which takes the name for a class of tests

    def __init__(self, examples: Examples, seed: int, at_once: int = _AT_ONCE):
        fixed, self._at_once = examples.fixed(seed), at_once
        self.context, self.label = fixed["context"], fixed["label"]

    def __len__(self) -> int:
        return len(self.label)

    def measured(self, scores: Scores) -> dict[str, Mean]:
        """recall@k and nDCG@10, each a mean over the users.

        Args:
            scores: what is tested.
        """
        places = self.places(scores)
        found = {f"recall@{k}": places < k for k in KS}
        return {name: Mean.of(each) for name, each in {**found, "nDCG@10": _gains(places, 10)}.items()}

    def places(self, scores: Scores) -> NDArray[np.int64]:
        """At which place, from 0, each user's movie is put."""
        parts = [slice(start, start + self._at_once) for start in range(0, len(self), self._at_once)]
        return np.concatenate(
            [_places(np.array(scores(self.context[part])), self.context[part], self.label[part]) for part in parts]
        )


def _places(
    scores: NDArray[np.float32], context: NDArray[np.int32], label: NDArray[np.int32]
) -> NDArray[np.int64]:
    rows = np.arange(len(label))
    users, columns = np.nonzero(context)
    scores[np.isnan(scores)] = -np.inf
    scores[users, context[users, columns] - 1] = -np.inf
    own = scores[rows, label - 1][:, None]
    earlier = np.arange(scores.shape[1]) < label[:, None] - 1
    places = np.sum((scores > own) | ((scores == own) & earlier), axis=1)
    return np.asarray(np.where(label > 0, places, scores.shape[1]), np.int64)


def _gains(places: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    return np.where(places < k, 1 / np.log2(places + 2.0), 0.0)


def everybody_the_same(scores: NDArray[Any]) -> Scores:
    """One score a movie, whoever asks."""
    return lambda context: np.broadcast_to(scores.astype(np.float32), (len(context), len(scores)))
