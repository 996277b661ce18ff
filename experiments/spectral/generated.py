"""Histories shaped like real catalogues, made from a seed: items live in small neighbourhoods within regions.

Popularity falls as 1/(rank + shift)^power. A neighbourhood holds a heavy-tailed number of items, popular ones near
popular ones; a user walks: the next item is from the present neighbourhood with probability `stay`, from the home
region with `near`, else from anywhere, all by popularity, and sometimes the home moves along. Lengths are log-normal.
So what two items have in common is mostly local, as in series of books or places of a town, where timelines of films
(`tfdp_rec.datasets.movielens.generated`) have thirty tastes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.spectral import Histories

Draw = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a data set: users, items, lengths, and how local tastes are."""

    users: int
    items: int
    median: int
    spread: float
    shortest: int
    shift: float
    power: float
    neighbourhood: int
    regions: int
    stay: float
    near: float


SHAPES = {
    "books-like": Shape(70_679, 24_915, 5, 1.1, 3, 30, 0.95, 8, 40, 0.33, 0.25),
    "places-like": Shape(29_858, 40_981, 16, 1.0, 8, 25, 0.9, 8, 100, 0.4, 0.3),
    "films-like": Shape(6_040, 3_706, 110, 1.0, 20, 60, 1.3, 12, 18, 0.12, 0.45),
}


def histories(shape: Shape, seed: int = 0) -> Histories:
    """Users' items in order; ids from 1; what a user would repeat is left out.

    Args:
        shape: of the data.
        seed: the same one gives the same.

    Example:
        >>> small = Shape(50, 300, 6, 0.5, 3, 10, 1.0, 8, 5, 0.3, 0.3)
        >>> len(histories(small)), bool((histories(small).numbers == histories(small).numbers).all())
        (50, True)
    """
    rng = np.random.default_rng(seed)
    excess = rng.lognormal(np.log(max(shape.median - shape.shortest, 0.7)), shape.spread, shape.users)
    lengths = np.minimum(shape.shortest + np.round(excess).astype(np.int64), min(shape.items // 4, 1000))
    users, items = _walk(shape, lengths, rng)
    order = np.argsort(users, kind="stable")
    pairs = users[order] * shape.items + items[order]
    first = np.sort(np.unique(pairs, return_index=True)[1])
    counts = np.bincount(pairs[first] // shape.items, minlength=shape.users)
    return Histories(pairs[first] % shape.items + 1, np.concatenate([[0], np.cumsum(counts)]))


def _walk(
    shape: Shape, lengths: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    weights, neighbourhood, region = _catalogue(shape, rng)
    here, around, anywhere = (_by_popularity(of, weights, rng) for of in (neighbourhood, region, 0 * region))
    now = anywhere(np.zeros(shape.users, np.int64))
    home, users, items = region[now], [np.arange(shape.users)], [now.copy()]
    for length in range(1, int(lengths.max())):
        walking = np.flatnonzero(lengths > length)
        kind = np.searchsorted([shape.stay, shape.stay + shape.near], rng.random(len(walking)), side="right")
        following = np.empty(len(walking), np.int64)
        for number, (draw, of) in enumerate(
            [(here, neighbourhood[now[walking]]), (around, home[walking]), (anywhere, 0 * walking)]
        ):
            following[kind == number] = draw(of[kind == number])
        moves = (kind == 2) & (rng.random(len(walking)) < 0.2)
        home[walking[moves]] = region[following[moves]]
        now[walking] = following
        users.append(walking)
        items.append(following)
    return np.concatenate(users), np.concatenate(items)


def _catalogue(
    shape: Shape, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Popularity, neighbourhood and region of each item."""
    popularity = (np.arange(shape.items) + shape.shift) ** -shape.power
    sizes = np.maximum(2, np.round(rng.pareto(1.5, shape.items) * shape.neighbourhood / 2 + 2)).astype(np.int64)
    count = int(np.searchsorted(np.cumsum(sizes), shape.items)) + 1
    neighbourhood = np.repeat(np.arange(count), sizes[:count])[: shape.items]
    liked = rng.lognormal(0.0, 1.0, count)  # of a neighbourhood
    weights = np.empty(shape.items)
    weights[np.argsort(-(rng.gumbel(size=shape.items) + np.log(liked)[neighbourhood]))] = popularity
    return weights, neighbourhood, rng.integers(shape.regions, size=count)[neighbourhood]


def _by_popularity(group: NDArray[np.int64], weights: NDArray[np.float64], rng: np.random.Generator) -> Draw:
    """Draws an item of each given group."""
    order = np.argsort(group, kind="stable")
    cumulative = np.concatenate([[0.0], np.cumsum(weights[order])])
    bounds = cumulative[np.searchsorted(group[order], np.arange(group.max() + 2))]

    def draw(of: NDArray[np.int64]) -> NDArray[np.int64]:
        at = bounds[of] + (bounds[of + 1] - bounds[of]) * rng.random(len(of))
        return order[(np.searchsorted(cumulative, at, side="right") - 1).clip(0, len(order) - 1)]

    return draw
