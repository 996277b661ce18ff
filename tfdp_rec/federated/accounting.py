"""What one client has spent over all its releases.

A client releases attention vectors (about its history) and permuted labels (about its clicks on candidates), again
and again. Each release is a dp_accounting event whose profile is known (`tfdp_rec.pricing.profiles`), and they are
composed. A server that chooses the clients itself gets no amplification by sampling: it knows which clients answered.

A click belongs to the history or to the candidates of a round. `epsilon(delta)` assumes that the same click may sit
in both and composes everything; `epsilon(delta, disjoint=True)` takes the larger of the two books. That is right for
one training whose histories were fixed before the clicks used as labels, as in `Simulation`; a device, whose label of
today is history tomorrow, never uses it.
"""

from __future__ import annotations

from collections import Counter

from dp_accounting import DpEvent

from tfdp_rec.pricing.profiles import composed_epsilon


class ClientAccountant:
    """Adds up one client's releases.

    Example:
        >>> from tfdp_rec.pricing.events import PureDpEvent
        >>> accountant = ClientAccountant()
        >>> accountant.spend_labels(PureDpEvent(0.5), count=3)
        >>> round(accountant.epsilon(delta=0.0), 3)
        1.5
    """

    def __init__(self) -> None:
        self.history: Counter[DpEvent] = Counter()
        self.labels: Counter[DpEvent] = Counter()

    def spend_history(self, release: DpEvent, count: int = 1) -> None:
        """Record releases about the history.

        Args:
            release: Mechanism that made the release.
            count: Number of releases.

        Raises:
            ValueError: If the count is negative.
        """
        _add(self.history, release, count)

    def spend_labels(self, release: DpEvent, count: int = 1) -> None:
        """Record releases that each concern the *same* click among candidates.

        Labels of different clicks compose in parallel: record the most that one click went through.

        Args:
            release: Mechanism that made the labels.
            count: Number of labels for one click.

        Raises:
            ValueError: If the count is negative.
        """
        _add(self.labels, release, count)

    def epsilon(self, delta: float, disjoint: bool = False) -> float:
        """Total ε for one click at this `delta`.

        Args:
            delta: Failure probability of the whole, in [0, 1).
            disjoint: Whether no click is both in the history and a label.

        Raises:
            ValueError: If δ is out of range.
        """
        if not 0 <= delta < 1:
            raise ValueError(f"delta must be in [0, 1), got {delta}.")
        books = [self.history, self.labels] if disjoint else [self.history + self.labels]
        return max(composed_epsilon(book, delta) for book in books)


def _add(book: Counter[DpEvent], release: DpEvent, count: int) -> None:
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}.")
    if count:
        book[release] += count
