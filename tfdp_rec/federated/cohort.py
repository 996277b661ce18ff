"""What clients hold, and what they draw before a local update.

A client holds a history (fixed before the clicks it trains on) and training clicks: the candidates it was shown
and which one it clicked. For one update it draws, outside any graph,

    padded   [m, H]         which history positions become the anonymous news
    noise    [m, B]         the noise of its attention vector
    samples  [m, S, 1+k]    per training click: the private label's news first, then k negatives

Personal settings: clicks on categories that the user declared non-sensitive are neither padded nor re-labelled,
and a history without a sensitive click gets no noise. Which categories those are, and how many sensitive clicks a
history holds, is public (docs/privacy-privaterec.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.datasets.mind.files import Impression, NewsCatalogue
from tfdp_rec.federated.labels import LabelPermutation, PublishedLabelPermutation
from tfdp_rec.federated.mechanism import AttentionMechanism
from tfdp_rec.noise import words


@dataclasses.dataclass(frozen=True)
class PrivacySettings:
    """What one user wants protected.

    Args:
        non_sensitive: Category names whose clicks need no protection. Nothing, by default.

    Example:
        >>> PrivacySettings(("sports",)).non_sensitive
        ('sports',)
    """

    non_sensitive: tuple[str, ...] = ()

    def sensitive_rows(self, catalogue: NewsCatalogue) -> frozenset[int]:
        """Catalogue rows whose clicks are protected.

        Raises:
            ValueError: If a category is not in the catalogue (a typo must not go unseen).
        """
        unknown = set(self.non_sensitive) - set(catalogue.categories)
        if unknown:
            raise ValueError(f"non_sensitive names unknown categories {sorted(unknown)}.")
        free = [catalogue.categories.index(name) for name in self.non_sensitive]
        rows = np.flatnonzero(~np.isin(catalogue.features["category"], free))
        return frozenset(rows.tolist())


@dataclasses.dataclass(frozen=True)
class Client:
    """One user's private data, on the user's device.

    Args:
        history: Catalogue rows clicked before, oldest first.
        clicks: Training clicks: (candidate rows shown, position of the clicked one).
        sensitive: Rows whose clicks are protected; None protects all.
        label_epsilon: Set by `with_private_labels`: the positions in `clicks` are private labels already, drawn
            once with this ε (0 if no click needed it).
    """

    history: tuple[int, ...]
    clicks: tuple[tuple[tuple[int, ...], int], ...]
    sensitive: frozenset[int] | None = None
    label_epsilon: float | None = None

    def protects(self, row: int) -> bool:
        """Whether a click on this news is protected."""
        return self.sensitive is None or row in self.sensitive

    @property
    def spends_on_history(self) -> bool:
        """Whether a release about the history costs anything."""
        return any(map(self.protects, self.history))

    @property
    def spends_on_labels(self) -> bool:
        """Whether any training click is protected and not yet a private label."""
        if self.label_epsilon is not None:
            return False
        return any(_is_choice(self, candidates, clicked) for candidates, clicked in self.clicks)


@dataclasses.dataclass(frozen=True)
class Draws:
    """Everything random in one local update, and the public shapes around it.

    Args:
        history: Rows [m, H]; 0 is an empty position.
        padded: Which positions are replaced [m, H].
        noise: Noise of the attention vectors [m, B].
        samples: Rows [m, S, 1 + k], the (private) label's first.
        counted: 1.0 where a sample exists [m, S].
    """

    history: NDArray[np.int32]
    padded: NDArray[np.bool_]
    noise: NDArray[np.float64]
    samples: NDArray[np.int32]
    counted: NDArray[np.float32]


def client_of(impressions: Sequence[Impression], sensitive: frozenset[int] | None = None) -> Client:
    """The client that saw these impressions: its history is the one before the first of them.

    Args:
        impressions: One user's impressions in time order, at least one.
        sensitive: Rows whose clicks are protected; None protects all.

    Raises:
        ValueError: If there is no impression.
    """
    if not impressions:
        raise ValueError("impressions must not be empty.")
    clicks = tuple((shown.candidates, click) for shown in impressions for click in shown.clicks)
    return Client(impressions[0].history, clicks, sensitive)


def with_private_labels(
    client: Client, labels: LabelPermutation, source: words.WordSource = words.os_entropy
) -> Client:
    """The client with its labels drawn once and for all.

    Rounds then use the stored labels: a click pays for its label once, not once a round. Negatives are drawn anew
    each time; they depend on the private label alone.

    Args:
        client: With its true clicks.
        labels: How labels are permuted.
        source: Where the randomness comes from.

    Raises:
        ValueError: If the client has private labels already.

    Example:
        >>> shown = Client((), (((3, 4, 5, 6, 7), 2),))
        >>> with_private_labels(shown, LabelPermutation(8.0)).label_epsilon
        8.0
    """
    if client.label_epsilon is not None:
        raise ValueError("client has private labels already; drawing again would cost again.")
    clicks = tuple(
        (shown, int(labels.sample(len(shown), click, source)[0]) if _is_choice(client, shown, click) else click)
        for shown, click in client.clicks
    )
    cost = labels.epsilon if client.spends_on_labels else 0.0
    return dataclasses.replace(client, clicks=clicks, label_epsilon=cost)


def histories(clients: Iterable[Client], length: int) -> NDArray[np.int32]:
    """The latest `length` clicks of each client [m, length], zeros behind the last."""
    rows = [client.history[-length:] for client in clients]
    table = np.zeros((len(rows), length), dtype=np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def draw(
    clients: Sequence[Client],
    mechanism: AttentionMechanism,
    labels: LabelPermutation | PublishedLabelPermutation,
    history_length: int,
    samples_per_client: int,
    source: words.WordSource = words.os_entropy,
) -> Draws:
    """Draw everything random for one local update of each client.

    Args:
        clients: The cohort.
        mechanism: Pads histories and sizes the noise.
        labels: Permutes labels and samples negatives.
        history_length: Positions H that every history is brought to.
        samples_per_client: Training clicks S used of each client, the latest ones.
        source: Where the randomness comes from.
    """
    history = histories(clients, history_length)
    protected = np.array([[client.protects(row) for row in rows] for client, rows in zip(clients, history)])
    padded = mechanism.padding_mask(history.shape, source) & protected & (history != 0)
    noise = mechanism.noise((len(clients), mechanism.num_basis), source)
    noise *= (protected & (history != 0)).any(axis=1)[:, None]
    samples = np.zeros((len(clients), samples_per_client, labels.num_negatives + 1), dtype=np.int32)
    counted = np.zeros((len(clients), samples_per_client), dtype=np.float32)
    for index, client in enumerate(clients):
        for slot, (candidates, clicked) in enumerate(client.clicks[-samples_per_client:]):
            if len(candidates) < 2:
                continue  # one news alone tells nothing
            fresh = client.label_epsilon is None and client.protects(candidates[clicked])
            rule = labels if fresh else _exact(labels)
            positions = rule.sample(len(candidates), clicked, source)
            samples[index, slot] = np.asarray(candidates, dtype=np.int32)[positions]
            counted[index, slot] = 1.0
    return Draws(history, padded, noise, samples, counted)


def _is_choice(client: Client, shown: tuple[int, ...], click: int) -> bool:
    """Whether there is anything to hide: a protected click among several candidates."""
    return len(shown) > 1 and client.protects(shown[click])


def _exact(labels: LabelPermutation | PublishedLabelPermutation) -> LabelPermutation:
    return LabelPermutation(math.inf, labels.num_negatives)
