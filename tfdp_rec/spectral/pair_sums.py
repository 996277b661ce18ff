"""Sums over users of what each gives to pairs of items of the head, in whole numbers, on all cores.

Sums of whole numbers are the same in any order, so users are counted in pieces, side by side. Which pairs a user gives
to, and how much, is that of `gram.py` or `near_pairs.py`.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.datasets.log import Catalogue, InParts, Part

# Cells of a matrix of so many rows, i · size + j, and what is given to each; a cell may be there several times.
Cells: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
Progress: TypeAlias = Callable[[int], None]

_PAIRS_AT_ONCE = 2**24  # pairs in a piece of work: about half a gigabyte at most
_EVENTS_AT_ONCE = 2**18


def pair_sums(
    histories: InParts, catalogue: Catalogue, head: NDArray[np.int64], cells: Callable[[Part, int], Cells],
    progress: Progress, in_order: bool,
) -> NDArray[np.int64]:
    """The matrix of the head, from the cells of some users. It has no noise and must not be released."""
    position = np.full(len(catalogue), -1)
    position[head] = np.arange(len(head))
    total = np.zeros(len(head) ** 2, np.int64)
    waiting: collections.deque[Future[Cells]] = collections.deque()
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        for part in histories.parts(catalogue, _EVENTS_AT_ONCE, in_order):
            for piece in _pieces(part.restrict_to(position)):
                waiting.append(pool.submit(cells, piece, len(head)))
                if len(waiting) > cores:  # holds no more pieces in memory than are being counted
                    np.add.at(total, *waiting.popleft().result())
            progress(part.num_users)
        while waiting:
            np.add.at(total, *waiting.popleft().result())
    return total.reshape(len(head), len(head))


def _pieces(part: Part) -> Iterator[Part]:
    """The users of a part, in pieces with a bounded number of pairs."""
    lengths = part.lengths
    pairs = np.cumsum(lengths * lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    begin = 0
    while begin < part.num_users:
        before = pairs[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(pairs, before + _PAIRS_AT_ONCE, side="right")))
        events = slice(starts[begin], starts[end])
        yield Part(end - begin, part.users[events] - begin, part.places[events])
        begin = end
