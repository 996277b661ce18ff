"""Watch timelines like MovieLens-20M's, made from nothing but a seed.

Popularity falls as p_r ∝ 1/(r + 60)^1.6 with rank r, which at 27,278 movies gives the most watched about 0.33% of all
events, as in the real data, and the thousand most watched two thirds of them. Every movie belongs to one of K tastes,
at random. A user has three tastes, liked unequally, and walks: at every event

    keep the present taste (else choose one of the three anew)      with probability 0.9
    then watch    the sequel of the last movie                      with probability 0.05
                  any movie, by popularity                          with probability 0.4
                  a movie of the present taste, by popularity       otherwise.

A user watches no movie twice. So what was watched last shows the present taste, and a little more; most of what comes
next stays unknowable, as in life. Lengths are 20 plus a log-normal excess: median 68, mean 144, the longest in the
thousands.

Users are made in blocks, each from its own generator, without any loop over events: choices of a taste are made
everywhere and carried forward from the last place where one was due.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.datasets.timelines import Timelines

POPULARITY_SHIFT, POPULARITY_POWER = 60.0, 1.6
TASTES_EACH, TASTE_WEIGHTS = 3, (0.5, 0.3, 0.2)
KEEP_TASTE, SEQUEL, ANYTHING = 0.9, 0.05, 0.4
SHORTEST, LONGEST, EXCESS_SPREAD = 20, 9254, 1.378
MEAN_LENGTH = 144.4
_BLOCK = 1024


def timelines(
    num_users: int = 138_493,
    num_movies: int = 27_278,
    events: int | None = None,
    seed: int = 0,
    num_tastes: int = 30,
) -> Timelines:
    """Generated timelines; the defaults have the size of MovieLens-20M.

    Args:
        num_users: Number of users.
        num_movies: Number of movies in the catalogue, some of which may have been watched by no user.
        events: Approximate number of events in all; left out, 144.4 a user.
        seed: Seed; the same arguments and seed give the same timelines.
        num_tastes: Number of tastes.

    Raises:
        ValueError: a size is too small, or there are not movies enough for so many events.

    Example:
        >>> small = timelines(num_users=200, num_movies=500, events=10_000)
        >>> small
        Timelines(200 users, 500 movies, ... events)
        >>> len(small[0]) == len(set(small[0].tolist()))
        True
    """
    mean = MEAN_LENGTH if events is None else events / max(num_users, 1)
    if num_users < 1 or num_movies < 30:
        raise ValueError(f"at least 1 user and 30 movies are needed, got {num_users} and {num_movies}.")
    if not 2 <= mean <= num_movies / 3:
        raise ValueError(
            f"events must come to between 2 and num_movies / 3 = {num_movies / 3:.0f} a user, got {mean:.1f}."
        )
    root = np.random.SeedSequence(seed)
    catalogue, people, *blocks = root.spawn(2 + -(-num_users // _BLOCK))
    movies = _Catalogue(num_movies, min(num_tastes, num_movies // 10), np.random.default_rng(catalogue))
    lengths = _lengths(num_users, num_movies, mean, np.random.default_rng(people))
    parts = [
        _block(movies, lengths[start : start + _BLOCK], np.random.default_rng(block))
        for start, block in zip(range(0, num_users, _BLOCK), blocks)
    ]
    counts = np.concatenate([counts for _, counts in parts])
    return Timelines(
        movies=np.concatenate([watched for watched, _ in parts]),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        user_ids=np.arange(1, num_users + 1),
        movie_ids=movies.raw_ids,
        titles=movies.titles,
    )


class _Catalogue:
    """Movies, their tastes and popularity; `draw` picks by popularity within a taste or overall."""

    def __init__(self, num_movies: int, num_tastes: int, rng: np.random.Generator):
        ranks = rng.permutation(num_movies)
        weights = (ranks + POPULARITY_SHIFT) ** -POPULARITY_POWER
        tastes = rng.integers(num_tastes, size=num_movies)
        self.num_movies, self.num_tastes = num_movies, num_tastes
        self.by_taste = np.argsort(tastes, kind="stable")  # movies of one taste lie together
        self.cumulative = np.concatenate([[0.0], np.cumsum(weights[self.by_taste])])
        self.bounds = self.cumulative[np.searchsorted(tastes[self.by_taste], np.arange(num_tastes + 1))]
        self.sequel = self._sequels(ranks, tastes)
        self.raw_ids = np.sort(rng.choice(5 * num_movies, num_movies, replace=False)) + 1
        years = rng.integers(1930, 2016, num_movies)
        self.titles = [f"Movie {each} ({year})" for each, year in zip(self.raw_ids, years)]

    def _sequels(self, ranks: NDArray[np.int64], tastes: NDArray[np.int64]) -> NDArray[np.int64]:
        """A movie's sequel: the next by popularity in its taste; the last one's is the first."""
        order = np.lexsort((ranks, tastes))
        following = np.roll(order, -1)
        first = np.searchsorted(tastes[order], np.arange(self.num_tastes))
        ends = np.flatnonzero(tastes[order] != tastes[following])
        following[ends] = order[first[tastes[order[ends]]]]
        sequel = np.empty_like(order)
        sequel[order] = following
        return sequel

    def draw(self, low: NDArray, high: NDArray, rng: np.random.Generator) -> NDArray[np.int64]:
        """Movies by popularity among those whose cumulative weight lies between low and high."""
        place = np.searchsorted(self.cumulative, low + (high - low) * rng.random(len(low)), side="right") - 1
        return self.by_taste[place.clip(0, self.num_movies - 1)]


def _lengths(num_users: int, num_movies: int, mean: float, rng: np.random.Generator) -> NDArray[np.int64]:
    shortest = max(2, min(SHORTEST, int(mean * SHORTEST / MEAN_LENGTH)))
    longest = min(LONGEST, num_movies // 2)
    excess = rng.lognormal(0.0, EXCESS_SPREAD, num_users)
    wanted = (mean - shortest) / np.exp(EXCESS_SPREAD**2 / 2)
    return np.minimum(shortest + np.round(excess * wanted), longest).astype(np.int64)


def _block(
    movies: _Catalogue, lengths: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Some users' movie indices, and how many each has. Who has seen most of it before walks on, further each time."""
    least = min(TASTES_EACH, movies.num_tastes - 1)
    tastes = rng.random((len(lengths), movies.num_tastes)).argpartition(least, axis=1)[:, :TASTES_EACH]
    seen = np.zeros(len(lengths) * movies.num_movies, bool)
    rounds, missing = [], lengths
    for patience in itertools.count():
        walked = np.where(missing > 0, (missing + missing // 4 + 4) << patience, 0)
        users, watched = _choose_first(*_walk(movies, tastes, walked, rng), missing, seen)
        rounds.append((users, watched))
        missing = missing - np.bincount(users, minlength=len(lengths))
        if not missing.any():
            break
    users, watched = (np.concatenate(column) for column in zip(*rounds))
    return (watched[np.argsort(users, kind="stable")] + 1).astype(np.int32), lengths


def _walk(
    movies: _Catalogue, tastes: NDArray[np.int64], lengths: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(user, movie) of walks of these lengths, user by user."""
    users = np.repeat(np.arange(len(lengths)), lengths)
    total = len(users)
    begins = np.concatenate([[True], users[1:] != users[:-1]])
    due = begins | (rng.random(total) >= KEEP_TASTE)
    chosen = np.searchsorted(np.cumsum(TASTE_WEIGHTS)[:-1], rng.random(total), side="right")
    last_due = np.maximum.accumulate(np.where(due, np.arange(total), 0))
    taste = tastes[users, chosen[last_due]]
    kind = rng.random(total)
    anything = (kind >= SEQUEL) & (kind < SEQUEL + ANYTHING)
    low = np.where(anything, 0.0, movies.bounds[taste])
    high = np.where(anything, movies.cumulative[-1], movies.bounds[taste + 1])
    watched = movies.draw(low, high, rng)
    sequels = np.flatnonzero((kind < SEQUEL) & ~begins)
    watched[sequels] = movies.sequel[watched[sequels - 1]]
    return users, watched


def _choose_first(
    users: NDArray[np.int64], watched: NDArray[np.int64], wanted: NDArray[np.int64], seen: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each user's first `wanted` events with movies not seen before, which are then noted in `seen`."""
    pairs = users * (len(seen) // len(wanted)) + watched
    fresh = np.flatnonzero(~seen[pairs])
    fresh = fresh[np.sort(np.unique(pairs[fresh], return_index=True)[1])]
    starts = np.searchsorted(users[fresh], np.arange(len(wanted)))
    kept = fresh[np.arange(len(fresh)) - starts[users[fresh]] < wanted[users[fresh]]]
    seen[pairs[kept]] = True
    return users[kept], watched[kept]
