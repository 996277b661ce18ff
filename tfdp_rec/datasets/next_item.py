"""Next-item examples from timelines (EANA, §4.1): a movie of the timeline as label, the 20 before it as context.

One example a user and draw, so with Poisson-sampled users the guarantee is **user-level**: a user's whole timeline is
behind at most one row of a batch. The label's place is uniform among all but the first, which has nothing before it.
Negatives are uniform from the public catalogue, without repetition, the same for the whole batch: they depend on no
user, as private training needs.

    context  [b, history]   oldest first, then zeros
    label    [b]
    negatives [S]           shared by the batch

Reference:
    Ning et al., "EANA: Reducing Privacy Risk on Large-scale Recommendation Models", RecSys 2022, §4.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.datasets.timelines import PADDING, Timelines

Features = dict[str, NDArray[np.int32]]


class NextItemExamples:
    """Examples of some users of timelines; `fetch` and `shared` are what a sampling's `batches` asks for.

    Args:
        timelines: the timelines.
        users: positions of the users; index i of `fetch` is users[i]. All, if left out.
        history: movies of context.
        negatives: how many; 0 leaves them out.
        seed: for tests only. Left out, labels and negatives come from the operating system's entropy.

    Raises:
        ValueError: a user's timeline is shorter than 2, or an argument is out of range.

    Example:
        >>> from tfdp_rec.datasets.movielens import generated
        >>> timelines = generated.timelines(num_users=100, num_movies=300, events=3_000)
        >>> train, test = timelines.split_users(0.8)
        >>> examples = NextItemExamples(timelines, train, negatives=50)
        >>> {name: array.shape for name, array in examples.fetch(np.array([4, 7])).items()}
        {'context': (2, 20), 'label': (2,)}
        >>> examples.shared()["negatives"].shape
        (50,)
    """

    def __init__(
        self,
        timelines: Timelines,
        users: ArrayLike | None = None,
        history: int = 20,
        negatives: int = 500,
        seed: int | None = None,
    ):
        self.timelines = timelines
        self.users = np.arange(timelines.num_users) if users is None else np.asarray(users, np.int64)
        self.history, self.negatives = history, negatives
        self._rng = np.random.default_rng(seed)
        self._check()
        self._starts = timelines.offsets[self.users]
        self._lengths = timelines.lengths[self.users]

    def _check(self) -> None:
        if self.history < 1:
            raise ValueError(f"history must be at least 1, got {self.history!r}.")
        if not 0 <= self.negatives <= self.timelines.num_movies:
            raise ValueError(
                f"negatives must be between 0 and the {self.timelines.num_movies} movies, got {self.negatives!r}."
            )
        if len(self.users) == 0 or not 0 <= self.users.min() <= self.users.max() < self.timelines.num_users:
            raise ValueError(f"users must be positions from 0 to {self.timelines.num_users - 1}, and at least one.")
        if len(np.unique(self.users)) != len(self.users):
            raise ValueError("users holds somebody twice, who could then be in a batch twice.")
        short = int((self.timelines.lengths[self.users] < 2).sum())
        if short:
            raise ValueError(
                f"{short} of the users have fewer than 2 events, too few for a label and something before it: leave "
                "them out, as timelines.split_users does."
            )

    def __len__(self) -> int:
        """How many users, and so how many units to sample from."""
        return len(self.users)

    def fetch(self, indices: ArrayLike) -> Features:
        """One example of each user at these indices (perhaps none): what a sampling's `batches` asks for."""
        indices = np.asarray(indices, np.int64)
        return self._examples(indices, self._rng.integers(1, self._lengths[indices]))

    def shared(self) -> Features:
        """Fresh negatives, if there are any, for `batches(examples.fetch, shared=examples.shared)`."""
        return {"negatives": self._draw_negatives()} if self.negatives else {}

    def fixed(self, seed: int = 0) -> Features:
        """One example of every user, the same at every call: for testing. Without negatives."""
        positions = np.random.default_rng(seed).integers(1, self._lengths)
        return self._examples(np.arange(len(self)), positions)

    def _examples(self, indices: NDArray[np.int64], positions: NDArray[np.int64]) -> Features:
        """Labels at these places of the timelines, with what comes before."""
        movies, labels = self.timelines.movies, self._starts[indices] + positions
        counts = np.minimum(positions, self.history)[:, None]
        columns = np.arange(self.history)
        places = labels[:, None] - counts + columns
        context = np.where(columns < counts, movies[np.minimum(places, len(movies) - 1)], PADDING)
        return {"context": context.astype(np.int32), "label": movies[labels]}

    def _draw_negatives(self) -> NDArray[np.int32]:
        drawn = self._rng.choice(self.timelines.num_movies, self.negatives, replace=False, shuffle=False)
        return (drawn + 1).astype(np.int32)
