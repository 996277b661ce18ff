"""What a model, or an accountant, has spent: entries that nobody forgets.

An entry is a stretch of steps of one event on batches of one origin, under an id of its own that it keeps wherever it
is written. Two histories are merged entry by entry, the larger count winning:

    merged[id] = max(one[id], other[id])

so that the order, and how often, histories meet does not matter, and neither does a file that was read twice. Who goes
on from a file begins an entry of its own; two trainings that went on from the same file are both counted.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Iterator
from typing import Any

from dp_accounting import DpEvent

from tfdp_rec.privacy import events

DRAWN, UNPROVEN, BY_HAND = "drawn", "unproven", "by hand"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Some steps of one kind.

    Attributes:
        event: of one step on its batch.
        steps: how many were begun, each as often as it was begun.
        origin: DRAWN if every batch carried the proof of its draw, BY_HAND if somebody says so, else UNPROVEN.
        sampling: `Sampling.get_state()` of what drew the batches; None if nobody knows.
        begun: how often the sampling's batches were iterated anew for these steps.
        void: why these steps have no guarantee; empty if they have.
        label: what to call something that looked at all the data once, such as a choice of rows; empty for steps.
    """

    event: DpEvent
    steps: int
    origin: str
    sampling: dict[str, Any] | None = None
    begun: int = 0
    void: str = ""
    label: str = ""

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON-able dicts."""
        return {**dataclasses.asdict(self), "event": events.to_json(self.event)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Entry:
        """The inverse of `to_json`."""
        return cls(**{**fields, "event": events.from_json(fields["event"])})


class History:
    """Entries by id, in the order in which they were heard of.

    Example:
        >>> import dp_accounting
        >>> history, copy = History(), History()
        >>> key = history.add(Entry(dp_accounting.GaussianDpEvent(1.0), 5, BY_HAND))
        >>> for _ in range(2):
        ...     copy.merge(history)
        >>> copy.steps
        5
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def steps(self) -> int:
        """Of all entries."""
        return sum(entry.steps for entry in self if not entry.label)

    def add(self, entry: Entry, key: str | None = None) -> str:
        """Takes an entry, unless it has more steps under that id already; returns the id."""
        key = key or new_key()
        if key not in self._entries or self._entries[key].steps < entry.steps:
            self._entries[key] = entry
        return key

    def merge(self, other: History) -> None:
        """Takes over what another history knows."""
        for key, entry in other._entries.items():
            self.add(entry, key)

    def extend_last(self, entry: Entry) -> None:
        """Adds steps to the last entry if it is of the same kind, else a new entry."""
        key, last = next(reversed(self._entries.items()), (None, None))
        if last is None or dataclasses.replace(last, steps=0, begun=0) != dataclasses.replace(entry, steps=0, begun=0):
            self.add(entry)
        elif key is not None:
            self._entries[key] = dataclasses.replace(
                last, steps=last.steps + entry.steps, begun=last.begun + entry.begun
            )

    def dumps(self) -> str:
        """As JSON text; holds no key of any noise, and nothing of who was sampled."""
        return json.dumps([[key, entry.to_json()] for key, entry in self._entries.items()])

    @classmethod
    def loads(cls, text: str) -> History:
        """The inverse of `dumps`.

        Raises:
            ValueError: for what is no history.
        """
        history = cls()
        try:
            for key, fields in json.loads(text):
                history.add(Entry.from_json(fields), key)
        except (TypeError, KeyError, AttributeError) as problem:
            raise ValueError(f"This is not the privacy history of a model: {problem}.") from problem
        return history


def new_key() -> str:
    """An id for an entry."""
    return secrets.token_hex(8)
