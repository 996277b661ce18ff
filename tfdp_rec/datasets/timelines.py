"""What users watched, in order: one flat array of movie indices and where each user's part of it begins.

A movie has a *raw id* (as in the files; what a served model takes) and an *index* 1..M, its row in tables. Index 0 is
padding and stands for any unknown id. The catalogue (raw ids and titles) is public; who watched what is private.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

PADDING = 0


class Timelines:
    """The timelines of all users over one catalogue.

    Args:
        movies: Movie indices of all users, int32, one user after the other, oldest first.
        offsets: Bounds of the users' events, int64: user u's are movies[offsets[u] : offsets[u + 1]].
        user_ids: Raw id of each user.
        movie_ids: Raw id of each movie; index i is movie_ids[i - 1].
        titles: Title of each movie.

    Raises:
        ValueError: the parts do not fit together.

    Example:
        >>> seen = Timelines([1, 3, 2, 1], [0, 3, 4], user_ids=[7, 9], movie_ids=[10, 20, 30], titles=["A", "B", "C"])
        >>> seen[0].tolist(), seen.lengths.tolist()
        ([1, 3, 2], [3, 1])
        >>> seen.index_of([30, 31]).tolist(), seen.title(3)
        ([3, 0], 'C')
    """

    def __init__(
        self, movies: ArrayLike, offsets: ArrayLike, user_ids: ArrayLike, movie_ids: ArrayLike, titles: Sequence[str]
    ):
        self.movies: NDArray[np.int32] = np.ascontiguousarray(movies, np.int32)
        self.offsets: NDArray[np.int64] = np.ascontiguousarray(offsets, np.int64)
        self.user_ids: NDArray[np.int64] = np.ascontiguousarray(user_ids, np.int64)
        self.movie_ids: NDArray[np.int64] = np.ascontiguousarray(movie_ids, np.int64)
        self.titles = list(titles)
        self._check()
        self._by_id = np.argsort(self.movie_ids)

    def _check(self) -> None:
        if len(self.movie_ids) == 0 or len(self.titles) != len(self.movie_ids):
            raise ValueError(f"{len(self.movie_ids)} movie_ids need as many titles, got {len(self.titles)}.")
        if len(np.unique(self.movie_ids)) != len(self.movie_ids):
            raise ValueError("movie_ids are not all different.")
        if len(self.offsets) != len(self.user_ids) + 1 or self.offsets[0] or self.offsets[-1] != len(self.movies):
            raise ValueError(
                f"offsets must run from 0 to {len(self.movies)} in {len(self.user_ids)} parts, got {self.offsets}."
            )
        if np.any(np.diff(self.offsets) < 0):
            raise ValueError("offsets must not fall.")
        if len(self.movies) and not 1 <= self.movies.min() <= self.movies.max() <= self.num_movies:
            raise ValueError(f"movies must be indices from 1 to {self.num_movies}.")

    ordered = True

    @property
    def numbers(self) -> NDArray[np.int32]:
        """The movies of all users, by index."""
        return self.movies

    @property
    def num_items(self) -> int:
        """As `num_movies`."""
        return self.num_movies

    @property
    def num_users(self) -> int:
        """How many users."""
        return len(self.user_ids)

    @property
    def num_movies(self) -> int:
        """How many movies the catalogue has, M; tables need M + 1 rows, with that of the padding."""
        return len(self.movie_ids)

    @property
    def num_events(self) -> int:
        """How many events in all."""
        return len(self.movies)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Events of each user."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return self.num_users

    def __getitem__(self, user: int) -> NDArray[np.int32]:
        """Movie indices of the user at this position, oldest first."""
        if not 0 <= user < self.num_users:
            raise IndexError(f"user {user} of {self.num_users}.")
        return self.movies[self.offsets[user] : self.offsets[user + 1]]

    def __repr__(self) -> str:
        return f"Timelines({self.num_users} users, {self.num_movies} movies, {self.num_events} events)"

    def index_of(self, raw_ids: ArrayLike) -> NDArray[np.int32]:
        """Indices of raw movie ids; 0 for those that are not in the catalogue."""
        wanted = np.asarray(raw_ids, np.int64)
        place = self._by_id[np.searchsorted(self.movie_ids, wanted, sorter=self._by_id).clip(max=self.num_movies - 1)]
        return np.where(self.movie_ids[place] == wanted, place + 1, PADDING).astype(np.int32)

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

    def save(self, path: str | Path) -> None:
        """Writes an .npz file, whole or not at all."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            np.savez(
                file,
                movies=self.movies,
                offsets=self.offsets,
                user_ids=self.user_ids,
                movie_ids=self.movie_ids,
                titles=np.array(self.titles, dtype=np.str_),
            )
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Timelines:
        """Reads what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not one of timelines.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"No timelines at {path}.")
        try:
            with np.load(path, allow_pickle=False) as parts:
                return cls(**{name: parts[name] for name in ("movies", "offsets", "user_ids", "movie_ids", "titles")})
        except (KeyError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as problem:
            raise ValueError(f"{path} is not a file of timelines: {problem}.") from problem
