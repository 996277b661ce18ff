"""A sum over all users of what a pure function of some of them gives: here, or where the log is.

    total = Σ over the parts of a log, over the pieces of a part, of the cells that `give` makes of a piece

All are whole numbers, so that the sum is the same in any order and in any division into parts: an engine that has the
log adds up on its own machines (`spark.py`), and the noise is added once, to the total.

**A draw that decides what a user gives** is made of random words for each user. Here they are new ones. An engine may
run a task twice: there they are computed from a secret key, new for each sum, and from the user's own id.
"""

from __future__ import annotations

import collections
import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy
from tfdp_rec.datasets.log import PART, Catalogue, InParts, Part

# Places in a flat array, and what is added to each; a place may be there several times.
Cells: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
# From so many words for each user of a part to these, user by user.
Draw: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.uint64]]


def _whole(part: Part, draw: Draw) -> Iterable[Part]:
    return [part]


class Summand(NamedTuple):
    """What is added up. Functions are pure, and an engine can send them: those of a module, or a `partial` of these."""

    give: Callable[[Part], Cells]
    size: int  # of the flat array
    pieces: Callable[[Part, Draw], Iterable[Part]] = _whole  # as much as is worked on at a time; draws are made here
    in_order: bool = False  # each user's items as they first occur
    events: int = PART  # of a part


def total(source: InParts, catalogue: Catalogue, summand: Summand, words: WordSource = os_entropy) -> NDArray[np.int64]:
    """The sum over all parts, by the source's own engine if it has one. It has no noise and must not be released."""
    if hasattr(source, "total"):
        return np.asarray(source.total(catalogue, summand, words))
    return add_up(source, catalogue, summand, lambda start, part: lambda counts: words(int(counts.sum())))


def add_up(
    source: InParts, catalogue: Catalogue, summand: Summand, draw: Callable[[int, Part], Draw],
    cores: int = os.cpu_count() or 1,
) -> NDArray[np.int64]:  # fmt: skip
    """The sum in this process; `draw` is given the number of users before a part, and the part."""
    found, start = np.zeros(summand.size, np.int64), 0
    waiting: collections.deque[Future[Cells]] = collections.deque()
    with ThreadPoolExecutor(cores) as pool:
        for part in source.parts(catalogue, summand.events, summand.in_order):
            for piece in summand.pieces(part, draw(start, part)):
                waiting.append(pool.submit(summand.give, piece))
                if len(waiting) > cores:  # holds no more pieces in memory than are being counted
                    np.add.at(found, *waiting.popleft().result())
            start += part.num_users
        while waiting:
            np.add.at(found, *waiting.popleft().result())
    return found


def keyed_draw(key: bytes, ids: Any) -> Draw:
    """Words of a secret key and each user's own id, an Arrow array of them, by SHAKE-256: always the same ones."""

    def draw(counts: NDArray[np.int64]) -> NDArray[np.uint64]:
        of_users = zip(ids.to_pylist(), counts.tolist(), strict=True)
        drawn = (hashlib.shake_256(key + str(i).encode()).digest(8 * n) for i, n in of_users if n)
        return np.frombuffer(b"".join(drawn), "<u8")

    return draw
