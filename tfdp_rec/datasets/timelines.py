"""What users watched, in order, over one catalogue of movies.

A movie has a *raw id* (as in the files; what a served model takes) and an *index* 1..M, its row in tables. Index 0 is
padding and stands for any unknown id. The catalogue (raw ids and titles) is public; who watched what is private.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.datasets.log import Catalogue, Log


class Timelines(Log):
    """A log of movies, by index, with titles.

    Args:
        movies: Movie indices of all users, int32, one user after the other, oldest first.
        offsets: Bounds of the users' events, int64: user u's are movies[offsets[u] : offsets[u + 1]].
        user_ids: Raw id of each user.
        movie_ids: Raw id of each movie; index i is movie_ids[i - 1].
        titles: Title of each movie.

    Raises:
        ValueError: The parts do not fit together.

    Example:
        >>> seen = Timelines([1, 3, 2, 1], [0, 3, 4], user_ids=[7, 9], movie_ids=[10, 20, 30], titles=["A", "B", "C"])
        >>> seen[0].tolist(), seen.lengths.tolist()
        ([1, 3, 2], [3, 1])
        >>> seen.index_of([30, 31]).tolist(), seen.title(3)
        ([3, 0], 'C')
    """

    ordered = True

    def __init__(
        self, movies: ArrayLike, offsets: ArrayLike, user_ids: ArrayLike, movie_ids: ArrayLike, titles: Sequence[str]
    ):
        super().__init__(np.ascontiguousarray(movies, np.int32), offsets)
        self.user_ids: NDArray[np.int64] = np.ascontiguousarray(user_ids, np.int64)
        self.movie_ids: NDArray[np.int64] = np.ascontiguousarray(movie_ids, np.int64)
        self.titles = list(titles)
        self._catalogue = Catalogue(self.movie_ids)
        if len(self.titles) != self.num_movies:
            raise ValueError(f"{self.num_movies} movie_ids need as many titles, got {len(self.titles)}.")
        if len(self) != len(self.user_ids):
            raise ValueError(f"offsets must have {len(self.user_ids)} parts, one a user, got {len(self)}.")
        if len(self.numbers) and not 1 <= self.numbers.min() <= self.numbers.max() <= self.num_movies:
            raise ValueError(f"movies must be indices from 1 to {self.num_movies}.")

    @property
    def num_movies(self) -> int:
        """Number of movies of the catalogue, M; tables need M + 1 rows, with that of the padding."""
        return len(self.movie_ids)

    num_items = num_movies

    @property
    def num_events(self) -> int:
        """Number of events in all."""
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"Timelines({self.num_users} users, {self.num_movies} movies, {self.num_events} events)"

    def ids(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Raw ids of movie indices."""
        return self.movie_ids[numbers - 1]

    def index_of(self, raw_ids: ArrayLike) -> NDArray[np.int32]:
        """Indices of raw movie ids; 0 for those that are not in the catalogue."""
        return (self._catalogue.places(raw_ids) + 1).astype(np.int32)

    def title(self, index: int) -> str:
        """Title of a movie index."""
        if not 1 <= index <= self.num_movies:
            raise IndexError(f"movie {index} of 1..{self.num_movies}.")
        return self.titles[index - 1]

    def split_users(
        self, train: float = 0.8, seed: int = 0, min_length: int = 2
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions of the users to train on and of those to test on, both sorted.

        Users with fewer than `min_length` events are in neither: an example takes a label and something before it.

        Raises:
            ValueError: the share is not between 0 and 1.
        """
        if not 0 < train < 1:
            raise ValueError(f"train must be between 0 and 1, got {train!r}.")
        usable = np.flatnonzero(self.lengths >= min_length)
        shuffled = np.random.default_rng(seed).permutation(usable)
        cut = round(train * len(usable))
        return np.sort(shuffled[:cut]), np.sort(shuffled[cut:])
