"""What rows of tables owe under a mechanism that pays late: when and how it is settled, and what a step may leave late.

A row's debt is found by `pending.py`; `RowMarks` says which rows have one. Noise is written before the mark that says
so: a step that is cut short in between leaves a row that has its noise and owes it still, which adds noise. The other
way round it would have no noise and owe none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import Check
from tfdp_rec.core.ground.keras_internals import learning_rate_of
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import find_withheld
from tfdp_rec.core.mechanism.base import Step
from tfdp_rec.core.mechanism.pending import Debt, History, Owed, Pending, RowMarks, choose_pending
from tfdp_rec.core.mechanism.rules import Recursion, Rows
from tfdp_rec.core.mechanism.tables import Operations, Table, run_after


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

    def __init__(self, optimizer: Any):
        self.optimizer, self.tables = optimizer, optimizer.tables
        ways = {steps: self.make_pending(steps) for steps in map(recursion_of, self.tables.values())}
        self.accounts = {r: Account(way, (self.history_kind or way.history)(way.columns)) for r, way in ways.items()}
        rows = {path: table.rows for path, table in self.tables.items()}
        histories = [account.history for account in self.accounts.values()]
        scheduled = isinstance(learning_rate_of(optimizer), keras.optimizers.schedules.LearningRateSchedule)
        keeps_largest = scheduled or optimizer.recursion.has_velocity
        self.marks = RowMarks(histories, rows, start=int(optimizer.iterations.numpy()), keeps_largest=keeps_largest)
        # Not the method itself: TensorFlow takes those of several optimizers for one that is traced too often.
        self.run_settling = tf.function(functools.partial(self.settle_all), autograph=False)

    def make_pending(self, recursion: Recursion) -> Pending:
        """How the noise that rows owe is drawn, for rows whose steps follow a recursion."""
        return choose_pending(recursion, self.optimizer.aggregate_noise)

    # Settling.

    def settle_rows(self, rows: Mapping[str, tf.Tensor], now: tf.Tensor, by_mark: Owed | None = None) -> None:
        """Gives distinct rows, by table path, the noise owed up to `now`: one draw for all tables that decay alike."""
        debts: dict[Recursion, dict[str, Debt]] = {}
        for path, ids in rows.items():
            table = self.tables[path]
            since = self.marks.read_marks(path, ids)
            debt = Debt(table.number, ids, self.read_rows(table, ids), since, now)
            debts.setdefault(recursion_of(table), {})[path] = debt
        for recursion, several in debts.items():
            way, history = self.accounts[recursion]
            settled = way.settle_rows(list(several.values()), history, self.optimizer.noise, self.marks.grid, by_mark)
            for (path, debt), values in zip(several.items(), settled):
                with run_after(self.write_rows(self.tables[path], debt.ids, values)):
                    self.marks.mark(path, debt.ids, now)

    def read_rows(self, table: Table, ids: tf.Tensor) -> Rows:
        """All of some rows that settling brings up to date."""
        return table.read(ids)

    def write_rows(self, table: Table, ids: tf.Tensor, values: Rows) -> Operations:
        """Replaces what `read_rows` gave."""
        return table.write(ids, values)

    def settle_before_read(self, variable: keras.Variable, ids: tf.Tensor) -> None:
        """The guard: whatever the look-ahead announced, no row is read that owes noise."""
        table = self.tables.get(variable.path)
        if table is None:
            return
        table.withhold()
        flat, now = tf.reshape(tf.cast(ids, tf.int64), [-1]), self.marks.now()
        owing = self.marks.owe_noise(table.path, flat, now)

        def settle() -> tf.Tensor:
            self.settle_rows({table.path: _distinct(flat, owing)}, now)
            return tf.constant(True)

        tf.cond(tf.reduce_any(owing), settle, lambda: tf.constant(False))

    def settle_upcoming(self, upcoming: Mapping[str, tf.Tensor], now: tf.Tensor) -> None:
        """Settles the distinct rows of tables that owe noise among announced ids; row 0 for an id outside the table."""
        owing = {}
        for path, ids in upcoming.items():
            if path in self.tables:
                ids = tf.reshape(tf.cast(ids, tf.int64), [-1])
                ids = tf.where((ids >= 0) & (ids < self.tables[path].rows), ids, 0)  # the read refuses it
                # Rows that this step has touched owe nothing: where some rows are read often, these are most.
                owing[path] = _distinct(ids, self.marks.owe_noise(path, ids, now))
        self.settle_rows(owing, now)

    def settle(self) -> None:
        """Pays what every row of every table owes, in chunks whose memory does not grow with the table."""
        if self.marks.is_settled:
            return
        if not tf.executing_eagerly():
            raise RuntimeError("settle() is for eager code; inside a graph it would be built, not run.")
        now = int(self.marks.clock.numpy())
        self.run_settling()
        self.marks.settled_at = now

    def settle_all(self) -> None:
        """As `settle`, as operations of the present graph."""
        now = self.marks.now()
        owed = {recursion: way.find_debt_by_mark(now, history) for recursion, (way, history) in self.accounts.items()}
        for path, table in self.tables.items():
            by_mark = owed[recursion_of(table)]
            table.withhold()
            table.sweep(lambda ids, path=path, by_mark=by_mark: self.settle_rows({path: ids}, now, by_mark))  # type: ignore[misc]
        self.marks.begin_totals(now)

    # What a step may leave late.

    def count(self, step: Step, before: tf.Tensor, now: tf.Tensor) -> Operations:
        """Puts a step on the clock: from then on every row owes its noise."""
        rate, accounts = tf.cast(step.pace, tf.float64), self.accounts.values()
        totals = [way.next_totals(history.look_up(before), rate, step.stddev) for way, history in accounts]
        return self.marks.tick(now, totals, step.noise_scale)

    def pace_of(self, learning_rate: tf.Tensor, stddev: tf.Tensor) -> tf.Tensor:
        """The learning rate of tables in a step of that rate and noise: 0 where they leave the step out."""
        # Where a step's noise is too small for the weights' grid, a row that is read stays where it is, and one that is
        # not moves by the noise of many steps. A schedule that ends at 0 would get there: its last steps are left out.
        if self.optimizer.recursion.has_velocity:  # a velocity would move the weights all the same: `refusals`
            return learning_rate
        faint = self.marks.is_faint(tf.cast(learning_rate, tf.float64) * stddev, _LEFT_OUT)
        return tf.where(faint, 0.0, learning_rate)

    def refusals(self, step: Step) -> Iterable[Check]:
        """Checks that the step may be made, ahead of all it writes."""
        rate, now = tf.cast(step.pace, tf.float64), self.marks.now()
        for recursion in self.accounts:
            if recursion.weight_decay:
                yield recursion.keep(rate) > 0, _TOO_MUCH_DECAY
            if recursion.has_velocity:
                yield ~self.marks.is_faint(step.noise_scale, _FAINT) | (step.stddev == 0), _MOVES_WITHOUT_NOISE
        if self.arrives_late:
            return
        for table in self.tables.values():
            if find_withheld(table.variable) is None:
                raise NotPrivate(_NO_OWNER.format(table.path))
        for path, table in self.tables.items():  # the rows of the gradient were read at this step, and owed nothing
            since = self.marks.read_marks(path, step.move(table).indices)
            yield since == now, _STALE.format(path)
        if self.tables:
            yield self.check_room(step)

    def check_room(self, step: Step) -> Check:
        """Whether float32 has places for the step's noise beside the weights that it moves."""
        largest = tf.stack([tf.reduce_max(tf.abs(step.rows(table)[0])) for table in self.tables.values()])
        scale = tf.abs(step.noise_scale)
        return ~(tf.cast(largest, tf.float64) > _ROOM * scale) | (scale == 0), _TOO_FAINT

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


def recursion_of(table: Table) -> Recursion:
    """The recursion of a table; tables of one recursion have one account."""
    assert isinstance(table.rule, Recursion), "no lazy mechanism takes another rule"
    return table.rule


def _distinct(ids: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
    """The distinct ids among those that are counted."""
    return tf.unique(tf.boolean_mask(ids, counted))[0]


_NO_OWNER = (
    "'{}' has no owner that would withhold its rows while they owe noise: have a tfdp_rec.PrivateModel (or the mix-in "
    "tfdp_rec.PrivateTraining) build the optimizer, by model.prepare(batch) or fit."
)
_ROOM = 2.0**20  # η s to the largest weight: then its float32 has steps of η s / 8 at most
_LEFT_OUT = 2.0**-10  # of the largest η s: steps below that are left out
_FAINT = 2.0**-17  # of the largest η s: eight steps of the grid
_STALE = (
    "Rows of '{}' were read before their pending noise was applied, or the clipped sum is of an earlier step: take it "
    "with tfdp_rec.clipping.clipped_sum just before optimizer.apply."
)
_MOVES_WITHOUT_NOISE = (
    "The learning rate fell below a hundred-thousandth of its largest, and momentum still moves the weights: no noise "
    "would hide in their last bits which rows were read. End the schedule above that, or leave momentum out."
)
_TOO_FAINT = (
    "The noise of this step is less than a millionth of a weight: in float32 a row that is read would not move, and "
    "one that is not read would, by the noise of many steps. Use a larger learning_rate or l2_norm_clip, or DPSGD."
)
_TOO_MUCH_DECAY = (
    "learning_rate * weight_decay must stay below 1 for lazy decay; a table's regularizer L2(l2) counts as 2 * l2."
)
