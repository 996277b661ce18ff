"""Batches of events in the order in which they arrive (logs, files, a queue), read once and without a store.

Events get seats in the order in which they arrive, B to a batch: event i of the stream is in batch ⌊i/B⌋, or nowhere.
Its seat stays **empty** if its unit

    was in one of the last b − 1 batches, or is in this one already, or has been in k batches.

No other event moves into an empty seat, which stays a row of its batch, of zeros, that contributes nothing: a batch has
B rows for any data (the last of a stream, as many as there are events). So leaving out all events of a unit changes no
other seat: the data sets are neighbours under zero-out adjacency, and the steps of a unit are as far apart and as few
as a plan with separation b and k participations assumes. The state is the last batch of each unit and its number of
seats; it is private, as the stream is.

After an interruption the same events are given again from their beginning, with `position`; the batches before it are
seated again and left out. The events of the next day are the next *part*: `next_part`, and `save` between processes.
"""

from __future__ import annotations

import hashlib
import itertools
import numbers
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.claim.fetch import Shared, spec_of
from tfdp_rec.core.claim.names import new_iteration
from tfdp_rec.core.claim.orders import Order
from tfdp_rec.core.claim.schemes import integer
from tfdp_rec.core.ground.files import open_atomically
from tfdp_rec.core.ground.refused import NotPrivate

Events = Any
"""A tf.data.Dataset of batches of any size, or a function that returns an iterator over such batches."""

_NEVER = -(2**62)
_UNBOUNDED = 2**31 - 1


class BoundedStream(Order):
    """Batches of a stream in which the steps of a unit are few and far apart.

    Guarantee: a planned training costs its plan's event, once; plans begun anew are composed. It assumes that the
    events are the same when they are read again, and that a loaded state is the one that was saved
    (docs/assumptions.md).

    Args:
        num_units: Largest number of units that the stream can have; δ is judged by it, and it is not enforced.
        expected_batch_size: Number of seats in a batch.
        unit: Name of a unit in a privacy statement.
        separation: b, the number of successive batches of which a unit is in one at most.
        participations: k, the largest number of batches that a unit is in; None for as many as the separation allows.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> stream = BoundedStream(100, 2, unit="user", separation=2, participations=2)
        >>> events = lambda: iter([{"user": np.array([7, 8, 7, 9, 7]), "item": np.arange(5)}])
        >>> for drawn in stream.batches(events, "user"):
        ...     print(drawn.batch["user"].numpy(), drawn.draw.present.numpy())
        [7 8] [ True  True]
        [0 9] [False  True]
        [7] [ True]
    """

    def __init__(
        self,
        num_units: int,
        expected_batch_size: int,
        unit: str = "user",
        *,
        separation: int,
        participations: int | None = None,
    ):
        super().__init__(num_units, integer("expected_batch_size", expected_batch_size), unit)
        self._separation = integer("separation", separation)
        self._participations = None if participations is None else integer("participations", participations)
        self._begin = self._furthest = Seats(self._separation, self._participations or _UNBOUNDED)
        self._handed_out: list[int] = []  # a checksum of the units in each batch of this part

    @property
    def separation(self) -> int:
        return self._separation

    def participations(self, steps: int) -> int:
        fitting = -(-steps // self._separation)
        return fitting if self._participations is None else min(self._participations, fitting)

    def batch_at(self, step: Any) -> Any:
        return step

    @property
    def fingerprint(self) -> int:
        return 2**40 + zlib.crc32(repr(sorted(self.get_state().items())).encode())

    def get_state(self) -> dict[str, Any]:
        """Settings of the stream; the units that it has seated are in the file that `save` writes."""
        return {**super().get_state(), "separation": self._separation, "participations": self._participations}

    def index_batches(self, seed: int | None = None, position: int = 0) -> Iterator[np.ndarray]:
        """Refused: the units of a stream have no numbers."""
        raise ValueError("A BoundedStream has no units by number: use batches(events, user).")

    def batches(  # type: ignore[override]
        self,
        events: Events,
        user: str | Callable[[Any], Any],
        position: int | None = None,
        *,
        shared: Shared | None = None,
        map: Callable[..., Any] | None = None,  # noqa: A002
    ) -> Any:
        """A tf.data.Dataset of `Drawn(batch, draw)` that ends with the stream; its last batch may be smaller.

        Args:
            events: Batches of any size: a tf.data.Dataset, or a function that returns an iterator over NumPy arrays in
                a nest of dicts and tuples, a row for each event. Each new iteration reads it from its beginning.
            user: Key of the column (of a dict, or of the first entry of a tuple) that names each event's unit, or a
                function from a batch to that column. Units are named by texts, by bytes or by whole numbers alone.
            position: Number of batches that were already trained on, `model.optimizer.position`; None for the first
                batch of this part.
            shared: Function as in `Sampling.batches`.
            map: Function as in `Sampling.batches`.

        Raises:
            NotPrivate: The events differ from those of an earlier iteration, or a unit could be seated as two.
            ValueError: The position is before this part, or the events are empty.
        """
        import tensorflow as tf

        from tfdp_rec.core.claim import sampling_proof

        position = self._begin.batches if position is None else position
        if position < self._begin.batches:
            raise ValueError(f"position={position} is before this part, which begins at {self._begin.batches}.")
        chunks = events.as_numpy_iterator if isinstance(events, tf.data.Dataset) else events
        first = next(iter(chunks()), None)
        if first is None:
            raise ValueError("events are empty: there must be one batch at least.")

        def open_rows(spec: Any) -> Any:
            return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

        signature = tf.nest.map_structure(open_rows, spec_of(first))
        users_of = user if callable(user) else lambda rows: (rows if isinstance(rows, dict) else rows[0])[user]
        drawn = lambda: self._draw(chunks(), users_of, position)  # noqa: E731
        return sampling_proof.generate(drawn, signature, self, shared, map).prefetch(1)

    def _draw(self, chunks: Iterator[Any], users_of: Callable[[Any], Any], position: int) -> Iterator[Any]:
        import tensorflow as tf

        iteration, seats, part = new_iteration(), self._begin.copy(), self._handed_out
        for rows in _regroup(chunks, int(self.expected_batch_size)):
            users = np.asarray(users_of(rows)).tolist()
            place, seated = seats.batches, seats.seat(users)
            self._check_events(part, place, users, seats)
            if place < position:  # trained on already: its units keep their seats
                continue
            draw = iteration, place - position, len(users), place, seated
            yield draw, tf.nest.map_structure(lambda column: _clear(column, ~seated), rows)  # noqa: B023

    def _check_events(self, part: list[int], place: int, users: list[Any], seats: Seats) -> None:
        """Notes the units of a batch; if a batch was handed out in this place before, compares its units."""
        if part is not self._handed_out:  # its seats do not know the units of the new part
            raise NotPrivate(
                "Refused batch: next_part or load was called after this iteration of the stream began: a unit could be "
                "in steps that are nearer than planned. Iterate over batches(events, user) of the present part."
            )
        number, checksum = place - self._begin.batches, _checksum(users)
        if number == len(part):
            part.append(checksum)
        if seats.batches > self._furthest.batches and part[number] == checksum:
            self._furthest = seats
        if part[number] != checksum:
            raise NotPrivate(
                f"Refused batch: batch {place} of the stream is not the one that was handed out before: a unit could "
                "be in steps that are nearer than planned. Give the same events again, or, for those that come after "
                "them, call stream.next_part(model.optimizer.position) first."
            )

    def next_part(self, position: int) -> None:
        """Begins a part of other events, such as the next day's. Units keep their seats, trained on or not.

        Args:
            position: Number of steps made so far, `model.optimizer.position`: the place of the part's first batch.
        """
        if not self._begin.batches <= position <= self._furthest.batches:
            raise ValueError(
                f"position={position} is not in this part, of which batches {self._begin.batches} to "
                f"{self._furthest.batches} were handed out."
            )
        self._begin = self._furthest = self._furthest.copy()
        self._begin.batches = position
        self._handed_out = []

    def save(self, path: str) -> None:
        """Writes the seats taken before this part to `path`, for another process; readable by its owner alone.

        The other process goes on with the same events, by `position=`, or with those that come after them if
        `next_part` was called before `save`. Others are refused.
        """
        with open_atomically(path, "wb", private=True) as file:
            self._begin.save(file, handed_out=np.array(self._handed_out, np.uint64))

    def load(self, path: str) -> None:
        """Reads the seats that another process saved to `path`; to be called before the first batch."""
        if self._handed_out or self._begin.batches:
            raise ValueError("load belongs before the first batch: this stream has handed out some already.")
        self._begin.load(path)
        with np.load(path, allow_pickle=False) as held:
            self._furthest, self._handed_out = self._begin, held["handed_out"].tolist()

    def describe(self) -> str:
        """One line for a privacy statement."""
        often = "any number of" if self._participations is None else f"at most {self._participations}"
        return (
            f"a stream in its own order, in batches of {self.expected_batch_size} seats: each {self.unit} in {often} "
            f"steps, at least {self._separation} apart, an event that comes too early or too often leaving an empty "
            "seat; no amplification claimed"
        )


class Seats:
    """The last batch of each unit, and its number of seats."""

    def __init__(self, separation: int, participations: int):
        self._separation, self._participations = separation, participations
        self._numbers: dict[Any, int] = {}
        self._last: NDArray[np.int64] = np.full(1024, _NEVER, np.int64)
        self._count: NDArray[np.int64] = np.zeros(1024, np.int64)
        self.batches = 0

    def seat(self, users: Sequence[Any]) -> NDArray[np.bool_]:
        """Whether each event of the next batch has a seat; refuses ids that could name one user in two ways."""
        found = self._numbers
        self._check_kind([user for user in users if user not in found])
        numbers_of = np.fromiter((found.setdefault(user, len(found)) for user in users), np.int64, len(users))
        self._make_room(len(found))
        first_here = np.zeros(len(users), bool)
        first_here[np.unique(numbers_of, return_index=True)[1]] = True
        apart = self.batches - self._last[numbers_of] >= self._separation
        # No limit on the number of users: one who leaves would make room for another, and neighbours differ in two.
        seated = first_here & apart & (self._count[numbers_of] < self._participations)
        self._last[numbers_of[seated]] = self.batches
        self._count[numbers_of[seated]] += 1
        self.batches += 1
        return seated

    def _check_kind(self, new: list[Any]) -> None:
        kinds = {_kind(user) for user in itertools.chain(itertools.islice(self._numbers, 1), new)}
        if None in kinds or len(kinds) > 1:
            raise NotPrivate(
                "Refused batch: the users of a stream must be all texts, all bytes or all whole numbers, and none "
                "missing: a user who is named in two ways, or by NaN, would have the seats of several. Convert the "
                "column, and leave out events without a user."
            )

    def _make_room(self, units: int) -> None:
        more = max(0, units - len(self._last))
        if more:
            more = max(more, len(self._last))
            self._last = np.concatenate([self._last, np.full(more, _NEVER, np.int64)])
            self._count = np.concatenate([self._count, np.zeros(more, np.int64)])

    def copy(self) -> Seats:
        """The same seats, to be changed independently."""
        other = Seats(self._separation, self._participations)
        other._numbers, other.batches = dict(self._numbers), self.batches
        other._last, other._count = self._last.copy(), self._count.copy()
        return other

    def save(self, file: Any, **others: NDArray[Any]) -> None:
        """Writes the seats, and other arrays, into an open file."""
        size, users = len(self._numbers), list(self._numbers)
        # NumPy drops zeros from the ends of texts and bytes: a mark behind each keeps b"a\0" and b"a" apart.
        kind = _kind(users[0]) if users else int
        mark: Any = "|" if kind is str else b"|" if kind is bytes else None
        if mark:
            kept = np.array([user + mark for user in users])
        else:  # NumPy's own choice for numbers below and above 2^63 is float64, which makes neighbours equal
            kept = np.array([int(user) for user in users], np.uint64 if min(users, default=0) >= 0 else np.int64)
        last, count = self._last[:size], self._count[:size]
        arrays: dict[str, Any] = {"users": kept, "marked": mark is not None, "last": last, "count": count, **others}
        np.savez(file, **arrays, batches=self.batches)

    def load(self, path: str) -> None:
        """Reads a file that `save` wrote; refuses one that is incomplete, or in which two users are equal."""
        with np.load(path, allow_pickle=False) as held:
            users, marked, last, count, batches = (held[name] for name in "users marked last count batches".split())
        if not len(users) == len(last) == len(count):
            raise ValueError(f"{path} is not a whole state of a stream.")
        self._numbers = {user[:-1] if marked else user: number for number, user in enumerate(users.tolist())}
        if len(self._numbers) != len(users):
            raise ValueError(f"{path} holds a user twice: its seats are not known.")
        self._last, self._count, self.batches = last, count, int(batches)


def _clear(column: Any, empty: NDArray[np.bool_]) -> NDArray[Any]:
    """A column without what the events of empty seats hold."""
    kept = np.array(column)
    kept[empty] = b"" if kept.dtype == object else np.zeros((), kept.dtype)
    return kept


def _checksum(users: list[Any]) -> int:
    """A number by which other processes, too, know the units of a batch again."""
    return int.from_bytes(hashlib.blake2b(repr(users).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _kind(user: Any) -> type | None:
    """Type of a user's id; None for a value that is no id, such as NaN."""
    for kind in (str, bytes):
        if isinstance(user, kind):
            return kind
    return int if isinstance(user, numbers.Real) and user % 1 == 0 else None


def _regroup(chunks: Iterable[Any], size: int) -> Iterator[Any]:
    """The same rows in batches of `size`; the last one may be smaller."""
    import tensorflow as tf

    held: Any = None
    for chunk in chunks:
        both = [chunk] if held is None else [held, chunk]
        held = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *both)
        rows = len(tf.nest.flatten(held)[0])
        for first in range(0, rows - size + 1, size):
            yield tf.nest.map_structure(lambda column: column[first : first + size], held)  # noqa: B023
        held = tf.nest.map_structure(lambda column: column[rows - rows % size :], held)  # noqa: B023
    if held is not None and len(tf.nest.flatten(held)[0]):
        yield held
