"""What rows of tables owe under a mechanism that pays late: when and how it is settled, and what a step may leave late.

A row's debt is found by `pending.py`; `RowMarks` says which rows have one. Noise is written before the mark that says
so: a step that is cut short in between leaves a row that has its noise and owes it still, which adds noise. The other
way round it would have no noise and owe none.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import Check
from tfdp_rec.core.ground.keras_internals import learning_rate_of
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import find_withheld, size_of
from tfdp_rec.core.mechanism.base import Step
from tfdp_rec.core.mechanism.pending import Debt, History, Owed, Pending, RowMarks, choose_pending
from tfdp_rec.core.mechanism.rules import Recursion, Rows
from tfdp_rec.core.mechanism.tables import Operations, Table, assign, run_after


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
        schedules = keras.optimizers.schedules.LearningRateSchedule
        self._is_scheduled = isinstance(learning_rate_of(optimizer), schedules)
        # Of the largest η s, the least that a step may have. A schedule falls far; a velocity carries noise far.
        by_rate = 2.0**-7 if self._is_scheduled else 0.5
        self._least_part = 2.0**-4 if optimizer.recursion.has_velocity else by_rate
        keeps_largest = self._is_scheduled or optimizer.recursion.has_velocity
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

    # What a step may leave late. Where a step's noise is less than float32 holds beside a weight, a row that is read
    # stays where it is, and one that is not moves by the noise of many steps, which tells one from the other. So
    # weights have a bound, and a step with less noise is left out or refused. Both follow from public numbers: what the
    # rows of a batch hold decides nothing.

    @property
    def sizes(self) -> list[tf.Variable]:
        """The largest weight that each table was released with, and what steps raise that to."""
        several = [(table.path, find_withheld(table.variable)) for table in self.tables.values()]
        without = [path for path, places in several if places is None]
        if without:
            raise NotPrivate(_NO_OWNER.format(without[0]))
        return [places.bound for _, places in several if places is not None]

    def find_bound(self) -> tf.Tensor:
        """The bound of weights ahead of a step."""
        reach = self.optimizer.recursion.reach
        sizes = [size.read_value() for size in self.sizes] + [reach * speed for speed in self._read_speeds()]
        return _GROWTH * tf.reduce_max(tf.stack([*sizes, self.marks.largest.read_value()]))  # whose grid they stand on

    def _read_speeds(self) -> list[tf.Tensor]:
        """The largest velocity that each table was released with."""
        states = (find_withheld(table.state) for table in self.tables.values() if table.state is not None)
        return [places.bound.read_value() for places in states if places is not None]

    def _bound_of(self, step: Step) -> tf.Tensor:
        """The bound of weights in a step, whose noise may raise it."""
        raised = tf.minimum(self.room * self._least_part * tf.abs(step.noise_scale), _AMPLE)
        return tf.maximum(step.bound, raised)

    def count(self, step: Step, before: tf.Tensor, now: tf.Tensor) -> Operations:
        """Puts a step on the clock: from then on every row owes its noise."""
        rate, accounts = tf.cast(step.pace, tf.float64), self.accounts.values()
        totals = [way.next_totals(history.look_up(before), rate, step.stddev) for way, history in accounts]
        size = self._bound_of(step) / _GROWTH
        raised = [done for each in self.sizes for done in assign(each, size)]
        is_left_out = tf.cast((step.pace == 0) & (step.learning_rate != 0), tf.int64)
        with run_after(raised + assign(self.marks.left_out, self.marks.left_out + is_left_out)):
            return self.marks.tick(now, totals, step.noise_scale)

    def bound_moves(self, step: Step) -> list[tf.Tensor]:
        """−η ĝ of the rows of each table, none of which takes a weight past the bound, or further past it.

        A function of a row for each row, that changes no more than its move does: the sensitivity stays as it is.
        """
        tables = self.tables.values()
        bound = tf.where(step.stddev == 0, math.inf, tf.cast(self._bound_of(step), tf.float32))
        moves = [step.move(table).values for table in tables]
        rests = [recursion_of(table).rest(step.rows(table), step.pace) for table in tables]
        reaches = [recursion_of(table).reach for table in tables]

        def keep_within() -> list[tf.Tensor]:
            several = zip(moves, rests, reaches, strict=True)
            return [
                tf.clip_by_value(move, tf.minimum(-bound - rest, 0.0) / reach, tf.maximum(bound - rest, 0.0) / reach)
                for move, rest, reach in several
            ]

        several = zip(moves, rests, reaches, strict=True)
        furthest = [size_of(rest) + reach * size_of(move) for move, rest, reach in several]
        # Well within the bound no move is cut. Without a margin, roundings of the sum would decide for other rows.
        is_within = tf.reduce_max(tf.stack(furthest)) <= bound * (1 - 2.0**-20)
        return tf.cond(is_within, lambda: moves, keep_within)

    def pace_of(self, learning_rate: tf.Tensor, stddev: tf.Tensor, bound: tf.Tensor) -> tf.Tensor:
        """The learning rate of tables in a step of that rate and noise: 0 where they leave the step out."""
        # A schedule that ends at 0 gets there: its last steps are left out.
        if self.optimizer.recursion.has_velocity:  # which would move weights all the same
            return learning_rate
        faint = self._is_faint(tf.cast(learning_rate, tf.float64) * stddev, bound) & (stddev > 0)
        return tf.where(faint, 0.0, learning_rate)

    def warn_of_steps_left_out(self) -> None:
        """Warns of the steps that tables have left out since it was last called."""
        left_out = int(self.marks.left_out.numpy())
        self.marks.left_out.assign(0)
        if left_out:
            warnings.warn(_LEFT_OUT.format(left_out), stacklevel=2)

    def refusals(self, step: Step) -> Iterable[Check]:
        """Checks that the step may be made, ahead of all it writes."""
        rate, now = tf.cast(step.pace, tf.float64), self.marks.now()
        for recursion in self.accounts:
            if recursion.weight_decay:
                yield recursion.keep(rate) > 0, _TOO_MUCH_DECAY
        yield self._check_noise(step)
        if self.arrives_late:
            return
        for path, table in self.tables.items():  # the rows of the gradient were read at this step, and owed nothing
            since = self.marks.read_marks(path, step.move(table).indices)
            yield since == now, _STALE.format(path)

    def _check_noise(self, step: Step) -> Check:
        scale = tf.cast(step.learning_rate, tf.float64) * step.stddev
        enough = ~self._is_faint(scale, step.bound) | (step.stddev == 0)
        if self.optimizer.recursion.has_velocity:  # which rests as long as no step was made, nor velocity read
            moving = tf.reduce_max(tf.stack([self.marks.largest.read_value(), *self._read_speeds()]))
            return enough | (scale == 0) & (moving == 0), _MOVES_WITHOUT_NOISE
        return enough | (scale == 0) | self._is_scheduled, _TOO_FAINT

    @property
    def room(self) -> float:
        """How many times its noise η s the bound of weights may be in a step."""
        return _ROOM

    def _is_faint(self, scale: tf.Tensor, bound: tf.Tensor) -> tf.Tensor:
        return ~(self.room * tf.abs(scale) >= bound)  # also where one of them is NaN

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
    places = tf.squeeze(tf.where(counted), axis=1)  # tf.boolean_mask is thirty operations
    return tf.unique(tf.gather(ids, places))[0]


_NO_OWNER = (
    "'{}' has no owner that would withhold its rows while they owe noise: have a tfdp_rec.PrivateModel (or the mix-in "
    "tfdp_rec.PrivateTraining) build the optimizer, by model.prepare(batch) or fit."
)
_ROOM = 2.0**19  # η s to the bound: noise takes no weight as far as to twice that, where float32 has steps of η s / 8
_AMPLE = 64.0  # a bound that noise does not raise further, so that a rate may fall the more where noise is large
_GROWTH = 4.0  # times the largest weight that was released, a weight may become
_STALE = (
    "Rows of '{}' were read before their pending noise was applied, or the clipped sum is of an earlier step: take it "
    "with tfdp_rec.clipping.clipped_sum just before optimizer.apply."
)
_MOVES_WITHOUT_NOISE = (
    "The noise of this step is too small beside the weights, or beside that of earlier steps, and momentum still moves "
    "the weights: none would hide in their last bits which rows were read. Use a larger learning_rate or l2_norm_clip, "
    "end a schedule above a sixteenth of its largest rate, or leave momentum out."
)
_TOO_FAINT = (
    "The noise of this step is less than a hundred-thousandth of the largest weight, or much less than that of an "
    "earlier step: in float32 a row that is read would not move, and one that is not read would, by the noise of many "
    "steps. Use a larger learning_rate or l2_norm_clip, or DPSGD; before you lower a learning rate, call "
    "model.settle(), or give a keras.optimizers.schedules.LearningRateSchedule."
)
_LEFT_OUT = (
    "Tables left out {} steps of a low learning rate, since the last release, whose noise was too small beside their "
    "weights or beside that of earlier steps (docs/privacy-noise.md). If it was not the end of a schedule, use a "
    "larger learning_rate or l2_norm_clip, or DPSGD."
)
_TOO_MUCH_DECAY = (
    "learning_rate * weight_decay must stay below 1 for lazy decay; a table's regularizer L2(l2) counts as 2 * l2."
)
