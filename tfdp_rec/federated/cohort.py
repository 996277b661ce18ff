"""What clients hold, and what they draw before a local update.

A client holds a history (fixed before the clicks it trains on) and training clicks: the candidates it was shown
and which one it clicked. For one update it draws, outside any graph,

    padded   [m, H]         which history positions become the anonymous news
    noise    [m, B]         the noise of its attention vector
    samples  [m, S, 1+k]    per training click: the private label's news first, then k negatives

News are named by their ids, which the device keeps; a row is a place in today's catalogue, looked up for one update.
News that the catalogue lacks count as the anonymous news, in their place, and are protected as all are.

Declared clicks, which the person said at the click need no protection, are neither padded nor re-labelled, and a
history of such clicks alone gets no noise. How many there are is public (docs/privacy-privaterec.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.datasets.mind.files import Impression
from tfdp_rec.federated.labels import LabelPermutation
from tfdp_rec.federated.mechanism import AttentionMechanism

Rows = Callable[[Sequence[str]], list[int]]


@dataclasses.dataclass(frozen=True)
class Client:
    """One user's private data, on the user's device."""

    # `clicks` are (ids of the news shown, position of the clicked one), oldest first, as is `history`. `declared` are
    # news whose every click was in a category that the person declared non-sensitive. `label_epsilon` is set by
    # `with_private_labels`: the positions are private labels already, drawn once with this ε (0 if no click needed it).

    history: tuple[str, ...]
    clicks: tuple[tuple[tuple[str, ...], int], ...]
    declared: frozenset[str] = frozenset()
    label_epsilon: float | None = None

    def is_secret(self, shown: tuple[str, ...], click: int) -> bool:
        """Whether a training click has anything to hide: it is protected, and one of several candidates."""
        return len(shown) > 1 and shown[click] not in self.declared

    @property
    def exact(self) -> frozenset[str]:
        """Ids of the declared news that were clicked: what is sent of these clicks has no bound."""
        return self.declared & {*self.history, *(shown[click] for shown, click in self.clicks)}

    @property
    def spends_on_history(self) -> bool:
        """Whether a release about the history costs anything."""
        return not self.declared.issuperset(self.history)

    @property
    def spends_on_labels(self) -> bool:
        """Whether any training click is protected and not yet a private label."""
        if self.label_epsilon is not None:
            return False
        return any(self.is_secret(shown, click) for shown, click in self.clicks)


@dataclasses.dataclass(frozen=True)
class Draws:
    """Everything random in one local update, and the public shapes around it."""

    # Rows are today's: `history` [m, H] with 0 for an empty position, `padded` [m, H], `noise` [m, B], `samples` [m, S,
    # 1 + k] with the label's row first, `counted` [m, S] with 1.0 for a sample that exists.

    history: NDArray[np.int32]
    padded: NDArray[np.bool_]
    noise: NDArray[np.float64]
    samples: NDArray[np.int32]
    counted: NDArray[np.float32]


def client_of(impressions: Sequence[Impression], declared: frozenset[str] = frozenset()) -> Client:
    """The client that saw these impressions: its history is the one before the first of them.

    Args:
        impressions: One user's impressions in time order, at least one. Of those at one time with the same candidates
            the first counts.
        declared: Ids of news whose clicks need no protection.

    Raises:
        ValueError: If there is no impression.
    """
    if not impressions:
        raise ValueError("impressions must not be empty.")
    # A log that was appended to twice has its lines twice: each would draw a label of the same click.
    once = {(shown.time, tuple(sorted(shown.candidates))): shown for shown in reversed(impressions)}
    clicks = tuple((shown.candidates, click) for shown in reversed(once.values()) for click in shown.clicks)
    return Client(impressions[0].history, clicks, declared)


def with_private_labels(
    client: Client, labels: LabelPermutation, source: words.WordSource = words.os_entropy
) -> Client:
    """The client with its labels drawn once and for all.

    Rounds then use the stored labels: a click pays for its label once, not once a round. Negatives are drawn anew
    each time; they depend on the private label alone.

    Args:
        client: Client with its true clicks.
        labels: Permutation of the labels.
        source: Source of the random words.

    Raises:
        ValueError: If the client has private labels already.

    Example:
        >>> shown = Client((), ((("N3", "N4", "N5", "N6", "N7"), 2),))
        >>> with_private_labels(shown, LabelPermutation(8.0)).label_epsilon
        8.0
    """
    if client.label_epsilon is not None:
        raise ValueError("client has private labels already; drawing again would cost again.")
    clicks = tuple(
        (shown, int(labels.sample(len(shown), click, source)[0]) if client.is_secret(shown, click) else click)
        for shown, click in client.clicks
    )
    private = labels.holds and source is words.os_entropy  # labels of other words can be drawn again
    cost = (labels.epsilon if private else math.inf) if client.spends_on_labels else 0.0
    return dataclasses.replace(client, clicks=clicks, label_epsilon=cost)


def histories(clicked: Sequence[Sequence[str]], length: int, rows: Rows) -> NDArray[np.int32]:
    """`rows` of the latest `length` news of each history in `clicked` [m, length], zeros behind the last."""
    table = np.zeros((len(clicked), length), dtype=np.int32)
    for index, news in enumerate(clicked):
        table[index, : len(news)] = rows(news[-length:])
    return table


def draw(
    clients: Sequence[Client],
    rows: Rows,
    mechanism: AttentionMechanism,
    labels: LabelPermutation,
    history_length: int,
    samples_per_client: int,
    source: words.WordSource = words.os_entropy,
) -> Draws:
    """Draws everything random for one local update of each client."""
    history = histories([client.history for client in clients], history_length, rows)
    protected = np.zeros(history.shape, dtype=bool)
    for index, client in enumerate(clients):
        recent = client.history[-history_length:]
        protected[index, : len(recent)] = [news not in client.declared for news in recent]
    padded = np.logical_and(mechanism.padding_mask(history.shape, source), protected)
    noise = mechanism.noise((len(clients), mechanism.num_basis), source)
    noise *= np.any(protected, axis=1, keepdims=True)
    samples = np.zeros((len(clients), samples_per_client, labels.num_negatives + 1), dtype=np.int32)
    counted = np.zeros((len(clients), samples_per_client), dtype=np.float32)
    for index, client in enumerate(clients):
        for slot, (shown, clicked) in enumerate(client.clicks[-samples_per_client:]):
            if len(shown) < 2:
                continue  # one news alone is no choice
            fresh = client.label_epsilon is None and client.is_secret(shown, clicked)
            positions = (labels if fresh else _exact(labels)).sample(len(shown), clicked, source)
            samples[index, slot] = np.asarray(rows(shown), dtype=np.int32)[positions]
            counted[index, slot] = 1.0
    return Draws(history, padded, noise, samples, counted)


def _exact(labels: LabelPermutation) -> LabelPermutation:
    return LabelPermutation(math.inf, labels.num_negatives)
