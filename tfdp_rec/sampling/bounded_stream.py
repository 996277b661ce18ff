"""Data as they come: logs, files, a queue. For noise that is planned and correlated, in one pass and without a store.

Events are seated in the order in which they come, B to a batch: event i of the stream is in batch ⌊i/B⌋, or nowhere.
Its seat stays **empty** if its unit

    was in one of the last b − 1 batches, or in this one already, or has been in k batches.

Nobody moves up, so that leaving out all of a unit's events changes no other seat: the data sets are neighbours under
zero-out adjacency, and a unit's steps lie as a plan with separation b and k participations counts on. What is kept is
each unit's last batch and how often it was seated. That, like the stream itself, is private.

Whoever goes on after an interruption gives the same events from their beginning, and `position`; those before it are
seated again and left out. The next day's events are the next *part*: `next_part`, and `save` between processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent
from numpy.typing import NDArray

from tfdp_rec.files import writing
from tfdp_rec.sampling.fetch import Shared, joined, spec_of
from tfdp_rec.sampling.iterations import new_iteration
from tfdp_rec.sampling.orders import Order
from tfdp_rec.sampling.schemes import Run, composed, fold_gaussians

Events = Any
"""A tf.data.Dataset of batches of any size, or a function that gives an iterator over such; each begins anew."""

_NEVER = -(2**62)
_UNBOUNDED = 2**31 - 1


class BoundedStream(Order):
    """Batches of a stream, in which no unit is too often or too soon again.

    Guarantee: a planned training costs its plan's event, once; plans begun anew are composed.
    It rests on the events' being the same when they are read again, and on the saved state's being the one that was
    saved (docs/assumptions.md).

    Args:
        num_units: how many there are at most; δ is judged by it.
        expected_batch_size: seats in a batch.
        unit: as `Sampling`.
        separation: b: a unit is in one of b successive batches at most.
        participations: k: in so many batches at most; left out, as many as the separation allows.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> stream = BoundedStream(100, 2, unit="user", separation=2, participations=2)
        >>> events = lambda: iter([{"user": np.array([7, 8, 7, 9, 7]), "item": np.arange(5)}])
        >>> [drawn.batch["item"].numpy().tolist() for drawn in stream.batches(events, "user")]
        [[0, 1], [3], [4]]
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
        super().__init__(num_units, expected_batch_size, unit)
        for name, value in (("expected_batch_size", expected_batch_size), ("separation", separation)):
            if int(value) != value or value < 1:
                raise ValueError(f"{name} must be a positive whole number, got {value!r}.")
        if participations is not None and (int(participations) != participations or participations < 1):
            raise ValueError(f"participations must be a positive whole number or None, got {participations!r}.")
        self._separation, self._most = int(separation), participations
        self._begin = self._furthest = Seats(self._separation, participations or _UNBOUNDED)
        self._handed_out: list[int] = []  # a checksum of who was in each batch of this part

    @property
    def separation(self) -> int:
        return self._separation

    def participations(self, steps: int) -> int:
        fitting = -(-steps // self._separation)
        return fitting if self._most is None else min(self._most, fitting)

    def turn(self, step: Any) -> Any:
        return step

    @property
    def number(self) -> int:
        return 2**40 + zlib.crc32(repr(sorted(self.get_state().items())).encode())

    def get_state(self) -> dict[str, Any]:
        """Which stream this is; who was in it, `save` keeps."""
        return {**super().get_state(), "separation": self._separation, "participations": self._most}

    def index_batches(self, seed: int | None = None, position: int = 0) -> Iterator[np.ndarray]:
        """Refused: a stream's units have no numbers."""
        raise ValueError("A BoundedStream has no units by number: give batches(events, user).")

    def batches(  # type: ignore[override]
        self,
        events: Events,
        user: str | Callable[[Any], Any],
        position: int | None = None,
        *,
        shared: Shared | None = None,
        map: Callable[..., Any] | None = None,  # noqa: A002
    ) -> Any:
        """A tf.data.Dataset of `Drawn(batch, draw)`, which ends as the stream does; its last batch may be smaller.

        Args:
            events: a tf.data.Dataset of batches of any size, or a function that gives an iterator over batches: NumPy
                arrays in a nest of dicts and tuples, a row for each event. It is read again from its beginning by
                whoever iterates anew.
            user: the key of the column (of a dict, or of the first of a tuple) that says whose event it is, or a
                function from a batch to that column.
            position: how many batches were already trained on; `model.optimizer.position`. The first of this part, if
                left out.
            shared: as `Sampling.batches`.
            map: as `Sampling.batches`.

        Raises:
            ValueError: for a position before this part, or events without a first batch.
        """
        import tensorflow as tf

        from tfdp_rec.sampling import sampling_proof

        position = self._begin.batches if position is None else position
        if position < self._begin.batches:
            raise ValueError(f"position={position} is before this part, which begins at {self._begin.batches}.")
        chunks = events.as_numpy_iterator if isinstance(events, tf.data.Dataset) else events
        first = next(iter(chunks()), None)
        if first is None:
            raise ValueError("events are empty: there must be one batch at least.")
        rows_of = lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)  # noqa: E731
        signature = tf.nest.map_structure(rows_of, spec_of(first))
        keys: tuple[str, ...] = ()
        if shared is not None:
            example = shared()
            keys, signature = tuple(sorted(example)), joined(signature, spec_of(example))
        whose = user if callable(user) else lambda rows: (rows if isinstance(rows, dict) else rows[0])[user]
        elements = tf.data.Dataset.from_generator(
            lambda: self._drawn(chunks(), whose, position, shared),
            output_signature=((tf.TensorSpec([], tf.int64),) * 4, signature),
        )
        return sampling_proof.dataset_of(elements, self, False, keys, map).prefetch(1)

    def _drawn(
        self, chunks: Iterator[Any], whose: Callable[[Any], Any], position: int, shared: Shared | None
    ) -> Iterator[Any]:
        import tensorflow as tf

        iteration, seats = new_iteration(), self._begin.copy()
        for rows in _regrouped(chunks, int(self.expected_batch_size)):
            users = np.asarray(whose(rows)).tolist()
            place, seated = seats.batches, seats.seat(users)
            self._hand_out(place, users, seats)
            if place < position:
                continue
            kept = tf.nest.map_structure(lambda column: column[seated], rows)  # noqa: B023
            draw = iteration, place - position, int(seated.sum()), place
            yield draw, kept if shared is None else joined(kept, shared())

    def _hand_out(self, place: int, users: list[Any], seats: Seats) -> None:
        """Notes who came to a batch, or compares, if it was handed out before."""
        from tfdp_rec.refused import NotPrivate

        number, checksum = place - self._begin.batches, hash(tuple(users))
        if number == len(self._handed_out):
            self._handed_out.append(checksum)
            self._furthest = seats
        elif self._handed_out[number] != checksum:
            raise NotPrivate(
                f"Refused batch: batch {place} of the stream is not the one that was handed out before: a unit could "
                "be in steps that are nearer than planned. Give the same events again, or, for those that come after "
                "them, call stream.next_part(model.optimizer.position) first."
            )

    def next_part(self, position: int) -> None:
        """From here on come other events, such as the next day's. Who was seated stays so, trained on or not.

        Args:
            position: of their first batch: the steps made so far, `model.optimizer.position`.

        Raises:
            ValueError: for a position that is not in this part.
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
        """Writes who was seated before this part, for another process; private, for the owner's eyes alone.

        Args:
            path: of the file.
        """
        with writing(path, "wb", private=True) as file:
            self._begin.save(file)

    def load(self, path: str) -> None:
        """Goes on where a stream was saved.

        Args:
            path: of the file.

        Raises:
            ValueError: batches were handed out already.
        """
        if self._handed_out or self._begin.batches:
            raise ValueError("load belongs before the first batch: this stream has handed out some already.")
        self._begin.load(path)
        self._furthest = self._begin

    def compose_independent(self, runs: Sequence[Run], restarts: int) -> DpEvent:
        """A unit's participations where noise is least; iterating anew may be another stream, which seats it anew."""
        left = (restarts + 1) * self.participations(sum(steps for _, steps in runs))
        folded = [(fold_gaussians(event), steps) for event, steps in runs]
        charged = []
        if all(isinstance(event, GaussianDpEvent) for event, _ in folded):
            for event, steps in sorted(folded, key=lambda run: run[0].noise_multiplier):
                charged.append((event, min(left, steps)))
                left -= charged[-1][1]
        else:  # costs that cannot be compared: every run is charged all it can hold
            charged = [(event, min(left, steps)) for event, steps in folded]
        return composed(dp_accounting.SelfComposedDpEvent(event, count) for event, count in charged if count)

    def describe(self) -> str:
        """One line for a privacy statement."""
        often = "any number of" if self._most is None else f"at most {self._most}"
        return (
            f"a stream in its own order, in batches of {self.expected_batch_size} seats: each {self.unit} in {often} "
            f"steps, at least {self._separation} apart, what comes too early or too often leaving an empty seat; no "
            "amplification claimed"
        )


class Seats:
    """Who was seated when, and how often.

    Args:
        separation: b.
        most: k.

    Example:
        >>> seats = Seats(separation=2, most=5)
        >>> [seats.seat(users).tolist() for users in (["a", "b"], ["a", "c"], ["a", "a"])]
        [[True, True], [False, True], [True, False]]
    """

    def __init__(self, separation: int, most: int):
        self._separation, self._most = separation, most
        self._numbers: dict[Any, int] = {}
        self._last: NDArray[np.int64] = np.full(1024, _NEVER, np.int64)
        self._count: NDArray[np.int64] = np.zeros(1024, np.int64)
        self.batches = 0

    def seat(self, users: Sequence[Any]) -> NDArray[np.bool_]:
        """Which of a batch's events have a seat; the batch is over then."""
        found = self._numbers
        who = np.fromiter((found.setdefault(user, len(found)) for user in users), np.int64, len(users))
        self._make_room(len(found))
        here_first = np.zeros(len(users), bool)
        here_first[np.unique(who, return_index=True)[1]] = True
        seated = here_first & (self.batches - self._last[who] >= self._separation) & (self._count[who] < self._most)
        self._last[who[seated]] = self.batches
        self._count[who[seated]] += 1
        self.batches += 1
        return seated

    def _make_room(self, units: int) -> None:
        more = max(0, units - len(self._last))
        if more:
            more = max(more, len(self._last))
            self._last = np.concatenate([self._last, np.full(more, _NEVER, np.int64)])
            self._count = np.concatenate([self._count, np.zeros(more, np.int64)])

    def copy(self) -> Seats:
        """Another one, who goes on from here."""
        other = Seats(self._separation, self._most)
        other._numbers, other.batches = dict(self._numbers), self.batches
        other._last, other._count = self._last.copy(), self._count.copy()
        return other

    def save(self, file: Any) -> None:
        """Writes them.

        Raises:
            ValueError: some users are texts and others numbers, which one array would make equal.
        """
        size, users = len(self._numbers), list(self._numbers)
        kinds = {kind for kind in (str, bytes) for user in users if isinstance(user, kind)}
        if kinds and not all(isinstance(user, next(iter(kinds))) for user in users):
            raise ValueError("The users of a stream must be of one type: all texts, all bytes or all numbers.")
        # NumPy drops zeros from the ends of texts and bytes: a mark behind each keeps b"a\0" and b"a" apart.
        mark: Any = "|" if str in kinds else b"|" if bytes in kinds else None
        kept = np.array([user + mark for user in users] if mark else users) if size else np.zeros(0, np.int64)
        last, count = self._last[:size], self._count[:size]
        np.savez(file, users=kept, marked=mark is not None, last=last, count=count, batches=self.batches)

    def load(self, path: str) -> None:
        """Takes over what `save` wrote.

        Raises:
            ValueError: the file is not whole.
        """
        with np.load(path, allow_pickle=False) as held:
            users, last, count, batches = (held[name] for name in ("users", "last", "count", "batches"))
            marked = "marked" in held and bool(held["marked"])  # files of before had no marks
        if not len(users) == len(last) == len(count):
            raise ValueError(f"{path} is not a whole state of a stream.")
        self._numbers = {user[:-1] if marked else user: number for number, user in enumerate(users.tolist())}
        if len(self._numbers) != len(users):
            raise ValueError(f"{path} holds users whose names were cut off at their ends: its seats are not known.")
        self._last, self._count, self.batches = last, count, int(batches)


def _regrouped(chunks: Iterable[Any], size: int) -> Iterator[Any]:
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
