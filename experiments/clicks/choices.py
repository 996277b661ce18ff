"""What private sums may count: nested sets of columns, then a crossed pair or vectors; validation rows choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfdp_rec.sums.clicks import MOST_CELLS

_COUNTED = (1, 2, 3, 4, 6, 9, 13, 19)
_WORTH = 0.003  # of AUC on validation rows: the best of many small gains is chance

Pair = tuple[int, ...]  # or none
Counted = tuple[tuple[int, ...], ...]  # columns and crossed columns, by the columns' numbers


def nested(scores: Sequence[float]) -> Iterator[Counted]:
    """Sets of columns to count, from each column's score alone: the best, the two best, and so on, at last all.

    Example:
        >>> list(nested([0.5, 0.9, 0.7]))
        [((1,),), ((1,), (2,)), ((0,), (1,), (2,))]
    """
    order = [int(column) for column in np.argsort(scores)[::-1]]
    for count in sorted({*(n for n in _COUNTED if n < len(order)), len(order)}):
        yield tuple((column,) for column in sorted(order[:count]))


def choices(sizes: Sequence[int], score: Callable[[Counted, Pair], float]) -> tuple[Counted, Pair]:
    """What is counted, and the columns whose values have vectors, if any.

    The first is the best nested set, beside which there may be a pair with one of the two columns of most values, users
    and items; these two may have vectors. What tells more than another choice has to be better for it.
    """
    alone = [score(((column,),), ()) for column in range(len(sizes))]
    found: Counted = ()
    best = -np.inf
    largest = tuple(sorted(np.argsort(sizes)[-2:].tolist()))
    every = itertools.combinations(range(len(sizes)), 2)
    pairs = [pair for pair in every if {*largest} & {*pair} and sizes[pair[0]] * sizes[pair[1]] <= MOST_CELLS]
    for each in nested(alone):
        if (own := score(each, ())) > best + _WORTH:
            found, best = each, own
    gained, pair = max(((score((*found, pair), ()), pair) for pair in pairs), default=(0.0, (0, 0)))
    crossed = (*found, pair) if gained > best + _WORTH else found
    with_vectors = score(found, largest) if len(sizes) > 1 else 0.0
    return (found, largest) if with_vectors > max(gained, best) + _WORTH else (crossed, ())
