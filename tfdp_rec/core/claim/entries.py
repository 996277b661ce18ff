"""Entries: each expense is one entry with an id, which it keeps in every file.

Two sets of entries are merged id by id, the larger count winning:

    merged[id] = max(one[id], other[id])

so files may be read in any order, and twice. A training that continues from a file begins an entry of its own: two
trainings that continue from one file are both counted.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from dp_accounting import DpEvent, SelfComposedDpEvent

from tfdp_rec.core.claim import events

SAVED_AS = "privacy_history"  # name of the entries among a saved model's variables
_FORMAT = "tfdp_rec entries 4"


def new_id() -> str:
    """An id that no other entry has."""
    return secrets.token_hex(8)


def id_of_use(event: DpEvent, label: str) -> str:
    """The id of a use that its event and label identify, as those of a pre-selection do."""
    return json.dumps([events.to_json(event), label])


class Use(tuple[DpEvent, str]):
    """One use of the data that is no training step: an (event, label) pair with an id, by which it is counted once.

    Make it where the data are used, and give the same object wherever it is declared (`PrivatePlan(spent=)`,
    `add_uses`). A bare pair is another use each time it is declared.

    Args:
        event: Event of the whole use, without sampling.
        label: Name of the use in a statement.
        id: Id of the use, for a program that is run again and does not use the data again; by default a new one.
        unit: What the event protects, such as "user": an accountant of another unit refuses a model that carries it.

    Example:
        >>> import dp_accounting
        >>> monday, tuesday = (Use(dp_accounting.GaussianDpEvent(20.0), "popularity counts") for _ in range(2))
        >>> monday == tuesday, monday.id == tuesday.id
        (True, False)
    """

    id: str
    unit: str

    def __new__(cls, event: DpEvent, label: str, id: str = "", unit: str = "") -> Use:
        if not isinstance(label, str) or not label:
            raise ValueError(f"A use of the data needs a label, a few words for the statement, got {label!r}.")
        made = super().__new__(cls, (event, label))
        made.id, made.unit = id or new_id(), unit
        return made

    def __getnewargs__(self) -> tuple[DpEvent, str, str, str]:
        return *self, self.id, self.unit

    @classmethod
    def of(cls, declared: tuple[DpEvent, str]) -> Use:
        """A use as it was declared: with its id, or with a new one."""
        return declared if isinstance(declared, Use) else cls(*declared)

    @property
    def entry(self) -> Entry:
        """The entry of the use in a privacy history."""
        return Entry(self[0], 1, {"unit": self.unit} if self.unit else None, label=self[1])


@dataclasses.dataclass(frozen=True)
class Entry:
    """Training steps of one kind, or one other use of the data."""

    event: DpEvent  # of one step on its batch, or of the whole use
    steps: int  # begun; 1 for a use that is no step
    sampling: Mapping[str, Any] | None = None  # state of what drew the batches, if proved; of a use, its unit alone
    void: str = ""  # reason why these steps have no guarantee
    label: str = ""  # name of a use that is no private step, such as "popularity counts"
    ordinary: bool = False  # steps of an optimizer that is not private: named in statements, never priced

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON-able dicts."""
        return {**dataclasses.asdict(self), "event": events.to_json(self.event)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Entry:
        """The inverse of `to_json`."""
        return cls(**{**fields, "event": events.from_json(fields["event"])})


class Entries:
    """Entries by id, in the order in which they were added.

    Example:
        >>> import dp_accounting
        >>> carried, copy = Entries(), Entries()
        >>> id = carried.add(Entry(dp_accounting.GaussianDpEvent(1.0), 5))
        >>> for _ in range(2):
        ...     copy.merge(carried)
        >>> copy.steps
        5
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def items(self) -> Iterable[tuple[str, Entry]]:
        """(id, entry) pairs."""
        return self._by_id.items()

    @property
    def steps(self) -> int:
        """Number of training steps in all entries."""
        return sum(entry.steps for entry in self if not entry.label)

    def steps_of(self, id: str) -> int:
        """Number of steps of one entry; 0 if there is none with this id."""
        return self._by_id[id].steps if id in self._by_id else 0

    def add(self, entry: Entry, id: str | None = None) -> str:
        """Adds an entry unless one with this id has at least as many steps; returns the id."""
        id = id or new_id()
        before = self._present(id, entry)
        # An entry only grows, so the larger count is the later one.
        if before is None or before.steps < entry.steps:
            self._by_id[id] = entry
        return id

    def _present(self, id: str, entry: Entry) -> Entry | None:
        # The present entry of an id. One of another event or sampling would be lost in a merge.
        before = self._by_id.get(id)
        if before is not None and dataclasses.replace(before, steps=entry.steps) != entry:
            raise ValueError(
                f"Two expenses have the id {id!r}, {events.describe(before.event)} and {events.describe(entry.event)}: "
                "only one would be counted. Give each an id of its own, or leave id= out."
            )
        return before

    def extend(self, id: str, entry: Entry) -> None:
        """Adds steps to the entry with this id, or makes it."""
        before = self._present(id, entry)
        self._by_id[id] = dataclasses.replace(entry, steps=entry.steps + (before.steps if before else 0))

    def merge(self, other: Entries) -> None:
        """Adds every entry of `other`."""
        for id, entry in other.items():
            self.add(entry, id)

    def dumps(self) -> str:
        """The entries as JSON text, without any noise key or sampled unit."""
        return json.dumps({"format": _FORMAT, "entries": [[id, e.to_json()] for id, e in self.items()]})

    def to_array(self) -> np.ndarray:
        """`dumps` as bytes, for a store of variables."""
        return np.frombuffer(self.dumps().encode(), np.uint8)

    @classmethod
    def of(cls, *uses: Use) -> Entries:
        """Some uses alone; `ValueError` for two that differ and have one id."""
        found = cls()
        for use in uses:
            found.add(use.entry, use.id)
        return found

    @classmethod
    def from_array(cls, saved: Any) -> Entries:
        """The inverse of `to_array`."""
        return cls.loads(bytes(np.asarray(saved)).decode())

    @property
    def uses(self) -> list[tuple[DpEvent, str]]:
        """(event, label) of every use of the data that is no step."""
        own = [entry for entry in self if entry.label and not entry.ordinary]
        return [(e.event if e.steps == 1 else SelfComposedDpEvent(e.event, e.steps), e.label) for e in own]

    @property
    def ordinary(self) -> dict[str, int]:
        """Number of ordinary steps before and after private training, by name of the optimizer."""
        found = Counter[str]()
        for entry in self:
            found[entry.label] += entry.steps if entry.ordinary else 0
        return dict(+found)

    @classmethod
    def loads(cls, text: str) -> Entries:
        """The inverse of `dumps`."""
        found = cls()
        try:
            saved = json.loads(text)
            if isinstance(saved, list) or saved["format"] != _FORMAT:
                raise ValueError(
                    "This privacy history was written by another version of tfdp_rec, whose entries say less or more "
                    "than this one's. What was spent is told by that version alone: train a new model here."
                )
            for id, fields in saved["entries"]:
                found.add(Entry.from_json(fields), id)
        except (TypeError, KeyError, AttributeError) as problem:
            raise ValueError(f"This is not the privacy history of a model: {problem}.") from problem
        return found


def warn_of_ordinary_steps(meter: Any) -> None:
    """Warns, at a release, of steps that no ε covers."""
    for name, steps in (meter.snapshot().ordinary if meter is not None else {}).items():
        warnings.warn(
            f"The model was also trained for {steps} steps of {name}. No epsilon covers these, unless they were made "
            "on public data.",
            stacklevel=4,
        )
