"""What the held-back users are asked: to find, from the 20 rows before it, an item that was new to the user.

A user's items are taken where they first occur, in the order of the log; where rows have no order, in a random one. One
of them but the first is to be found, and what the user had before is told and left out of the answer. Users with fewer
than two different items are asked nothing.

**Items that the model does not know count as not found.** Were they left out, a list of ten items would look best.

What comes out is computed from users' data without noise: for the log's owner.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.data import Interactions

HISTORY, MOST_USERS = 20, 8000


class NewItems:
    """The examples of some users.

    Args:
        log: with its items chosen.
        users: who were held back.
    """

    def __init__(self, log: Interactions, users: NDArray[np.int64]):
        assert log.items is not None
        self.rows, ids = log.found()
        self.number_of = np.concatenate([[0], log.items.numbers(ids.combine_chunks())]).astype(np.int32)
        self.users, self.ordered = users, log.ordered

    def fixed(self, seed: int = 0) -> dict[str, NDArray[np.int32]]:
        """`context` `[users, 20]` and `label` `[users]`, by number, 0 for none."""
        rng = np.random.default_rng(seed)
        asked = [self._asked(user, rng) for user in self.users]
        context = [before for before, label in asked if label >= 0]
        label = [label for _, label in asked if label >= 0]
        return {"context": np.array(context, np.int32).reshape(-1, HISTORY), "label": np.array(label, np.int32)}

    def _asked(self, user: int, rng: np.random.Generator) -> tuple[NDArray[np.int32], int]:
        """Context and label of one user; label −1 for one who is asked nothing."""
        items = np.asarray(self.rows.items[self.rows.offsets[user] : self.rows.offsets[user + 1]])
        if not self.ordered:
            items = rng.permutation(items)
        first = np.sort(np.unique(items, return_index=True)[1])
        before = np.zeros(HISTORY, np.int32)
        if len(first) < 2:
            return before, -1
        place = first[rng.integers(1, len(first))]
        told = self.number_of[items[:place][-HISTORY:]]
        before[: len(told)] = told
        return before, int(self.number_of[items[place]])
