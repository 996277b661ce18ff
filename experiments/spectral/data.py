"""Data sets that others keep, read from files of the user's, and split into what is counted and what is asked.

Three forms of file, told apart by their first line: `user_id:token item_id:token … timestamp:float` with tabs; a line
of `user item` an event, in order; a line of `user item item item …` a user, in order.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.spectral.generated import SHAPES, histories


@dataclasses.dataclass(frozen=True)
class Split:
    """What is counted, and what is asked of held-out users or of the same.

    Attributes:
        name: of the data.
        num_items: of the catalogue, ids 1 to that.
        counted: private histories.
        given: what the recommender is told of each user who is asked for.
        relevant: what it should find.
    """

    name: str
    num_items: int
    counted: list[NDArray[np.int64]]
    given: list[NDArray[np.int64]]
    relevant: list[NDArray[np.int64]]


def read(source: str) -> tuple[str, list[NDArray[np.int64]], int]:
    """Name, users' items in order with ids from 1, and the size of the catalogue.

    Args:
        source: a file, or the name of a generated shape.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if source in SHAPES:
        made = histories(SHAPES[source])
        return source, np.split(made.numbers, made.offsets[1:-1]), SHAPES[source].items
    users, items = _rows(Path(source))
    numbers = np.unique(items, return_inverse=True)[1] + 1
    starts = np.flatnonzero(np.diff(users)) + 1
    return Path(source).stem, np.split(numbers, starts), int(numbers.max())


def _rows(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(user, item) of every event, user by user and in order."""
    with path.open(encoding="utf-8") as file:
        lines = [line.split() for line in file]
    if ":" in lines[0][0]:
        place = {name.split(":")[0]: at for at, name in enumerate(lines[0])}
        columns = [np.array([float(line[place[name]]) for line in lines[1:]]) for name in
                   ("user_id", "item_id", "timestamp")]  # fmt: skip
        order = np.lexsort((columns[2], columns[0]))
        return columns[0][order].astype(np.int64), columns[1][order].astype(np.int64)
    pairs = np.array([(int(line[0]), int(item)) for line in lines for item in line[1:]], np.int64)
    order = np.argsort(pairs[:, 0], kind="stable")
    return pairs[order, 0], pairs[order, 1]


def users_apart(
    source: str, share: float = 0.2, most: int = 6000, seed: int = 0, users: int | None = None
) -> Split:
    """A fifth of the users is asked, the others are counted; a random fifth of an asked user's items is to be found.

    Args:
        source: see `read`.
        share: of users who are asked.
        most: at most so many.
        seed: of the split.
        users: how many of the data's take part; all if left out.
    """
    name, histories, num_items = read(source)
    return _apart(name, num_items, histories, share, most, np.random.default_rng(seed), users)


def _apart(
    name: str,
    num_items: int,
    users: list[NDArray[np.int64]],
    share: float,
    most: int,
    rng: np.random.Generator,
    first: int | None = None,
) -> Split:
    order = rng.permutation(len(users))[:first]
    cut = min(int(share * len(order)), most)
    given, relevant = [], []
    for user in order[:cut]:
        if len(users[user]) < 2:
            continue
        mixed = rng.permutation(users[user])
        hidden = max(1, round(0.2 * len(mixed)))
        given.append(mixed[hidden:])
        relevant.append(mixed[:hidden])
    return Split(name, num_items, [users[user] for user in order[cut:]], given, relevant)


def leave_two_out(source: str, for_test: bool = True) -> Split:
    """Everybody is counted and asked: the last item is the test, the one before it the validation.

    Args:
        source: see `read`.
        for_test: whether the last item is asked for, the one before it being told but not counted; else the one before.
    """
    name, users, num_items = read(source)
    long = [user for user in users if len(user) > 2]
    given = [user[:-1] if for_test else user[:-2] for user in long]
    relevant = [user[-1:] if for_test else user[-2:-1] for user in long]
    return Split(name, num_items, [user[:-2] for user in long], given, relevant)
