"""What rows of tables owe under a mechanism that pays late: when and how it is settled.

A row's debt is found by `pending.py`; `RowMarks` says which rows have one. Noise is written before the mark that says
so: a step that is cut short in between leaves a row that has its noise and owes it still, which adds noise. The other
way round it would have no noise and owe none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp_rec.core.ground.branches import choose
from tfdp_rec.core.ground.graph_checks import HOST, Check, place_on_host
from tfdp_rec.core.mechanism.base import Step
from tfdp_rec.core.mechanism.pending import Debt, History, Owed, Pending, RowMarks, choose_pending
from tfdp_rec.core.mechanism.rules import Recursion, Rows
from tfdp_rec.core.mechanism.tables import Operations, Table, recursion_of, run_after
from tfdp_rec.core.mechanism.weight_bound import WeightBound, is_scheduled
from tfdp_rec.core.sensitivity.float_sums import move_from_host


class Account(NamedTuple):
    """The way to settle tables of one decay, and its totals."""

    way: Pending
    history: History


class RowDebts:
    """What the rows of an optimizer's tables owe."""

    # A plain object, which neither Keras nor TensorFlow tracks: a saved settling function would take its noise along.

    # Of a parameter server: where its totals are kept, and that the steps of other workers may have landed since the
    # rows of a gradient were read.
    history_kind: Callable[[int], History] | None = None
    arrives_late = False
    bound_kind = WeightBound

    def __init__(self, optimizer: Any):
        self.optimizer, self.tables = optimizer, optimizer.tables
        ways = {steps: self.make_pending(steps) for steps in map(recursion_of, self.tables.values())}
        self.accounts = {r: Account(way, (self.history_kind or way.history)(way.columns)) for r, way in ways.items()}
        rows = {path: table.rows for path, table in self.tables.items()}
        histories = [account.history for account in self.accounts.values()]
        keeps_largest = is_scheduled(optimizer) or optimizer.recursion.has_velocity
        self.marks = RowMarks(histories, rows, start=int(optimizer.iterations.numpy()), keeps_largest=keeps_largest)
        self.bound = self.bound_kind(optimizer, self.marks)
        # Not the method itself: TensorFlow takes those of several optimizers for one that is traced too often.
        self.run_settling = tf.function(functools.partial(self.settle_all), autograph=False)

    def make_pending(self, recursion: Recursion) -> Pending:
        """How the noise that rows owe is drawn, for rows whose steps follow a recursion."""
        return choose_pending(recursion, self.optimizer.aggregate_noise)

    # Settling.

    def settle_rows(self, rows: Mapping[str, tf.Tensor], now: tf.Tensor, by_mark: Owed | None = None) -> None:
        """Gives distinct rows, by table path, the noise owed up to `now`: one draw for all tables that decay alike."""
        alike: dict[Recursion, dict[str, tf.Tensor]] = {}
        for path, ids in rows.items():
            alike.setdefault(recursion_of(self.tables[path]), {})[path] = ids
        for recursion, several in alike.items():
            way, history = self.accounts[recursion]
            source, ids = self.optimizer.noise, list(several.values())
            with tf.device(HOST):
                places = self.marks.find_places(several)
            since, grid = self.marks.read_marks(places), self.marks.grid
            pairs = list(zip([self.tables[path] for path in several], move_from_host(ids), strict=True))
            debts = [Debt(table.number, ids, self.read_rows(table, ids)) for table, ids in pairs]
            settled = way.settle_rows(debts, since, now, history, source, grid, by_mark)
            written: Operations = []
            for (table, ids), values in zip(pairs, settled, strict=True):
                written += self.write_rows(table, ids, values)
            with run_after(written):
                self.marks.mark(places, now)

    def read_rows(self, table: Table, ids: tf.Tensor) -> Rows:
        """All of some rows that settling brings up to date."""
        return table.read(ids)

    def write_rows(self, table: Table, ids: tf.Tensor, values: Rows) -> Operations:
        """Replaces what `read_rows` gave."""
        return table.write(ids, values)

    def settle_before_reads(self, rows: Mapping[str, tf.Tensor]) -> None:
        """The guard: whatever the look-ahead announced, no row, by table path, is read that owes noise."""
        for path in rows:
            self.tables[path].withhold(self.optimizer)
        with tf.device(HOST):
            now, owing = self.marks.now(), self.owe_noise(rows)
            owes = tf.reduce_any(owing)

        def settle() -> tf.Tensor:
            self._settle_owing(rows, owing, now)
            return tf.constant(True)

        choose(owes, settle, lambda: tf.constant(False))

    def owe_noise(self, rows: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Whether rows, by table path, owe noise; those of each table after another's."""
        places = self.marks.find_places({path: _flat(ids) for path, ids in rows.items()})
        return self.marks.owe_noise(places, self.marks.now())

    def admit_ids(self, path: str, ids: tf.Tensor) -> tf.Tensor:
        """Ids in one row, the nearest for an id outside the table, as the read has it, which refuses it."""
        least, most = (tf.constant(end, tf.int64) for end in (0, self.tables[path].rows - 1))
        return tf.raw_ops.ClipByValue(t=_flat(ids), clip_value_min=least, clip_value_max=most)

    def settle_upcoming(self, upcoming: Mapping[str, tf.Tensor], now: tf.Tensor) -> None:
        """Settles the distinct rows of tables that owe noise among announced ids."""
        with tf.device(HOST):  # where a batch comes from
            rows = {path: _flat(ids) for path, ids in upcoming.items() if path in self.tables}
            owing = self.marks.owe_noise(self.marks.find_places(rows), now)
        if rows:
            self._settle_owing(rows, owing, now)

    def _settle_owing(self, rows: Mapping[str, tf.Tensor], owing: tf.Tensor, now: tf.Tensor) -> None:
        """Settles the distinct ones of those rows, by table path, that owe noise."""
        # Rows that a step has touched owe nothing: where some rows are read often, these are most. Ids come from the
        # host, where distinct ones are found faster than on a GPU, table by table.
        with tf.device(HOST):
            parts = tf.split(owing, [tf.size(ids) for ids in rows.values()], num=len(rows))
            owed = [_distinct(*each) for each in zip(map(self.admit_ids, rows, rows.values()), parts, strict=True)]
        self.settle_rows(dict(zip(rows, owed, strict=True)), now)

    def settle(self) -> None:
        """Pays what every row of every table owes, in chunks whose memory does not grow with the table."""
        if self.marks.is_settled:
            return
        if not tf.executing_eagerly():
            raise RuntimeError("settle() is for eager code; inside a graph it would be built, not run.")
        now = int(self.marks.clock.numpy())
        # Small tables at once: to trace a graph takes longer than some hundred operations.
        run = self.settle_all if all(table.is_small for table in self.tables.values()) else self.run_settling
        run()
        self.marks.settled_at = now

    def settle_all(self) -> None:
        """As `settle`, as operations of the present graph."""
        now = self.marks.now()
        owed = {recursion: way.find_debt_by_mark(now, history) for recursion, (way, history) in self.accounts.items()}
        for path, table in self.tables.items():
            by_mark = owed[recursion_of(table)]
            table.withhold(self.optimizer)
            table.sweep(lambda ids, path=path, by_mark=by_mark: self.settle_rows({path: ids}, now, by_mark))  # type: ignore[misc]
        self.marks.begin_totals(now)

    # In a step.

    @place_on_host
    def count(self, step: Step, before: tf.Tensor, now: tf.Tensor) -> Operations:
        """Puts a step on the clock: from then on every row owes its noise."""
        rate, accounts = tf.cast(step.pace, tf.float64), self.accounts.values()
        totals = [way.next_totals(history.look_up(before), rate, step.stddev) for way, history in accounts]
        with run_after(self.bound.count(step)):
            return self.marks.tick(now, totals, step.noise_scale)

    def refusals(self, step: Step) -> Iterable[Check]:
        """Checks that the step may be made, ahead of all it writes."""
        with tf.device(HOST):
            rate = tf.cast(step.pace, tf.float64)
            decays = [recursion for recursion in self.accounts if recursion.weight_decay]
            found = [(recursion.keep(rate) > 0, _TOO_MUCH_DECAY) for recursion in decays]
            found.append(self.bound.check_noise(step))
        if self.arrives_late or not self.tables:
            return found
        owing = self.marks.owe_noise(self.find_places(step), self.marks.now())
        with tf.device(HOST):  # the rows of the gradient were read at this step, and owed nothing
            return [*found, (~owing, _STALE)]

    def find_places(self, step: Step) -> tf.Tensor:
        """The places of a step's rows, those with a gradient, among the marks."""
        if not step.places:
            ids = {path: step.move(table).indices for path, table in self.tables.items()}
            step.places.append(self.marks.find_places(ids))
        return step.places[0]

    # Checkpoints.

    @property
    def kept_variables(self) -> dict[str, tf.Variable]:
        """What a training checkpoint holds, in which all is settled."""
        return {"largest": self.marks.largest}

    @contextlib.contextmanager
    def restoration(self) -> Iterator[None]:
        """A block in which all variables become those of a training checkpoint."""
        yield
        self.marks.restart(int(self.optimizer.iterations.numpy()), float(self.marks.largest.numpy()))


def _flat(ids: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.cast(ids, tf.int64), [-1])


def _distinct(ids: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
    """The distinct ids among those that are counted."""
    places = tf.squeeze(tf.where(counted), axis=1)  # tf.boolean_mask is thirty operations
    return tf.unique(tf.gather(ids, places))[0]


_STALE = (
    "Rows of a table were read before their pending noise was applied, or the clipped sum is of an earlier step: take "
    "it with tfdp_rec.clipping.clipped_sum just before optimizer.apply."
)
_TOO_MUCH_DECAY = (
    "learning_rate * weight_decay must stay below 1 for lazy decay; a table's regularizer L2(l2) counts as 2 * l2."
)
