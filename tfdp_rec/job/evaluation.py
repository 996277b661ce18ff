"""How well a recommender does on held-out users: the rank that it gives to an item that was new to the user.

A user's items are taken where they first occur, in the order of the log; where rows have no order, in a random one.
One of them but the first is the label. The user's last 20 rows before it are the context, which the recommender sees
and which is left out of the answer. Users with fewer than two different items are left out. With s the scores of all
other items and y the label,

    rank = |{i : s_i > s_y}| + |{i before y in the catalogue : s_i = s_y}|,
    recall@k = the share of users with rank < k,      nDCG@k = the mean of [rank < k] / log₂(rank + 2).

All recommenders are asked the same. A score that is no number ranks last. **Items that the recommender does not know
count as not found** (label 0): were they left out, a catalogue of ten items would look best.

The results are computed from users' data without noise: for the log's owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.ground.files import rows_at_a_time
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.next_item import NextItemExamples
from tfdp_rec.metrics import Mean, ranks

KS, HISTORY = (1, 5, 10, 20), 20
_AT_ONCE, _SCORES = 500, 2**24  # users, and their scores at once: 64 MB, and a few times that

Scores = Callable[[NDArray[np.int32]], Any]
"""From item numbers `[users, history]`, oldest first and then zeros, to scores `[users, items]`."""


class NewItemExamples:
    """The examples of the held-out users of a log with its items chosen."""

    def __init__(self, log: Interactions, users: NDArray[np.int64]):
        assert log.items is not None
        self.rows, ids = log.found()
        self.number_of = np.concatenate([[0], log.items.numbers(ids.combine_chunks())]).astype(np.int32)
        self.users, self.ordered = users, log.ordered

    def fixed(self, seed: int = 0) -> dict[str, NDArray[np.int32]]:
        """`context` `[users, 20]` and `label` `[users]`, by number, 0 for none."""
        rng = np.random.default_rng(seed)
        asked = [self._example(user, rng) for user in self.users]
        context = [before for before, label in asked if label >= 0]
        label = [label for _, label in asked if label >= 0]
        return {"context": np.array(context, np.int32).reshape(-1, HISTORY), "label": np.array(label, np.int32)}

    def by_own_rows(self, draws: NDArray[np.float64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Contexts and labels of all users, each by their own rows and own draw in [0, 1): no user moves another's."""
        # Rows of a user stand by time, else as they came: neither is changed by rows of others.
        rngs = [np.random.default_rng(int(draw * 2**53)) for draw in draws[self.users]]
        contexts, labels = zip(*map(self._example, self.users, rngs))
        return np.array(contexts), np.array(labels)

    def _example(self, user: int, rng: np.random.Generator) -> tuple[NDArray[np.int32], int]:
        """Context and label of one user; label −1 for a user without an example."""
        # A copy, since `permutation` shuffles an array without entries in place, and the log's are read-only.
        items = np.array(self.rows.numbers[self.rows.offsets[user] : self.rows.offsets[user + 1]])
        if not self.ordered:
            items = rng.permutation(items)
        first = np.sort(np.unique(items, return_index=True)[1])
        before = np.zeros(HISTORY, np.int32)
        if len(first) < 2:
            return before, -1
        place = first[rng.integers(1, len(first))]
        seen = self.number_of[items[:place][-HISTORY:]]
        before[: len(seen)] = seen
        return before, int(self.number_of[items[place]])


def users_at_once(num_items: int) -> int:
    """How many users' scores of all items are in memory at a time."""
    return min(_AT_ONCE, rows_at_a_time([1, num_items], _SCORES))


class Evaluation:
    """Tests on the same examples for every recommender; `at_once` users' scores are in memory at a time."""

    def __init__(self, examples: NewItemExamples | NextItemExamples, seed: int, at_once: int = _AT_ONCE):
        fixed, self._at_once = examples.fixed(seed), at_once
        self.context, self.label = fixed["context"], fixed["label"]

    def __len__(self) -> int:
        return len(self.label)

    def measure(self, scores: Scores) -> dict[str, Mean]:
        """recall@k and nDCG@10, each a mean over the users; empty if there are none."""
        if not len(self):
            return {}
        places = self.ranks(scores)
        found = {f"recall@{k}": places < k for k in KS}
        gains = np.where(places < 10, 1 / np.log2(places + 2.0), 0.0)
        return {name: Mean.of(each) for name, each in {**found, "nDCG@10": gains}.items()}

    def ranks(self, scores: Scores) -> NDArray[np.int64]:
        """The rank, from 0, of each user's label."""
        parts = [slice(start, start + self._at_once) for start in range(0, len(self), self._at_once)]
        return np.concatenate(
            [_ranks(np.array(scores(self.context[part])), self.context[part], self.label[part]) for part in parts]
        )


def same_for_all(scores: NDArray[Any]) -> Scores:
    """One score an item, whatever the context."""
    return lambda context: np.broadcast_to(scores.astype(np.float32), (len(context), len(scores)))


def _ranks(scores: NDArray[np.float32], context: NDArray[np.int32], label: NDArray[np.int32]) -> NDArray[np.int64]:
    users, columns = np.nonzero(context)
    scores[users, context[users, columns] - 1] = -np.inf
    return ranks(scores, label)
