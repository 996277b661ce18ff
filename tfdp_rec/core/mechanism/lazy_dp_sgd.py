"""LazyDP-SGD: the noise of DP-SGD, drawn for a row only when the row is next read, and for all rows at release.

A row that no batch reads owes, for every step that passes, the noise (and decay, and momentum) that DP-SGD would have
given it. What it owes is one Gaussian (`pending.py`); it is settled

- before the model reads the row: by the step before, for the ids that look-ahead announced, and otherwise at the moment
  of reading (so look-ahead is an optimisation, never a condition of correctness);
- for every row, by `settle()`, before anything leaves training.

A row that has a gradient makes the step at once, gradient and noise in one addition, as under DP-SGD: what is rounded
to the row's grid is their sum, and rounding a private number is no look at the data.

Guarantees:
- the released weights have the distribution that DP-SGD's have: the same ε, for any learning-rate schedule, weight
  decay, momentum, and change of σ, C, B or η in mid-training;
- not against an observer of the training: between releases unread rows lack noise.

Tables leave out steps whose noise is below a thousandth of the largest so far, and refuse steps whose noise float32
has no room for beside the weights (docs/privacy-noise.md): both would show which rows were read.

Per row a mark of 4 bytes (`RowMarks`). The order of writes is such that a step cut short anywhere, by an error or
Ctrl-C, could only add noise: a step is on the clock before its gradient is in a table, and noise is in a table before
the mark that says so.

Reference:
    Lim et al., "LazyDP: Co-Designing Algorithm-Software for Scalable Training of Differentially Private
    Recommendation Models", ASPLOS 2024.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Unpack, overload

import keras
import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import Check, require
from tfdp_rec.core.ground.keras_internals import learning_rate_of
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.arguments import Numbers, Planned
from tfdp_rec.core.mechanism.base import PrivateOptimizer, Step
from tfdp_rec.core.mechanism.noise.base import Request
from tfdp_rec.core.mechanism.pending import Debt, History, Owed, Pending, RowMarks, choose_pending, step_on, weights_on
from tfdp_rec.core.mechanism.rules import Recursion, Rows
from tfdp_rec.core.mechanism.tables import CHUNK_VALUES, Operations, Table, run_after


class Account(NamedTuple):
    """The way to settle tables of one decay, and its totals."""

    choose_pending: Pending
    history: History


@keras.saving.register_keras_serializable(package="tfdp_rec")
class LazyDPSGD(PrivateOptimizer):
    """DP-SGD whose step costs what its batch reads: same released model, same ε, noise drawn when it falls due.

    Args:
        learning_rate: Learning rate: a number or a Keras schedule.
        aggregate_noise: Whether a row's owed noise is drawn as one Gaussian; False draws every owed step by itself (the
            paper's "without ANS"; slow, for comparison and tests).
        **settings: Settings of `PrivateOptimizer`.

    Raises:
        ValueError: for values out of range, or what has no exact lazy form.

    Example:
        >>> LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=1024).dp_event()
        GaussianDpEvent(noise_multiplier=1.1)
    """

    why_no_table_rule = "Adagrad and Adam are not linear in their gradients, so that late noise cannot be added up"
    moves_every_row = True
    pays_late = True

    # Of a parameter server: where its totals are kept, and that the steps of other workers may have landed since the
    # rows of a gradient were read.
    history_kind: Callable[[int], History] | None = None
    arrives_late = False

    @overload
    def __init__(self, learning_rate: Any, *, aggregate_noise: bool = ..., **settings: Unpack[Numbers]) -> None: ...
    @overload
    def __init__(self, learning_rate: Any, *, aggregate_noise: bool = ..., **settings: Unpack[Planned]) -> None: ...
    def __init__(self, learning_rate: Any, *, aggregate_noise: bool = True, **settings: Any):
        super().__init__(learning_rate, **settings)
        self.aggregate_noise = aggregate_noise
        self._refuse_too_much_decay(self.recursion)
        self._settle_function = _Untracked()

    def _refuse_too_much_decay(self, recursion: Recursion, of: str = "") -> None:
        rate = learning_rate_of(self)
        if isinstance(rate, keras.Variable) and float(rate.numpy()) * recursion.weight_decay >= 1:
            raise ValueError(
                f"learning_rate * weight_decay must be below 1, got {float(rate.numpy()):g} * "
                f"{recursion.weight_decay:g}{of}: a step would leave nothing of a weight, and lazy decay divides by "
                "what is left."
            )

    def make_pending(self, recursion: Recursion) -> Pending:
        """How the noise that rows owe is drawn, for rows whose steps follow a recursion."""
        return choose_pending(recursion, self.aggregate_noise)

    def build_tables(self) -> None:
        for table in self.tables.values():
            if table.variable.dtype != "float32":
                raise NotPrivate(
                    f"Table '{table.path}' is {table.variable.dtype}, whose grid would round away most of the noise "
                    "that is added late. Keep tables float32 (policy mixed_bfloat16 does), or use DPSGD, which adds "
                    "gradient and noise ahead of every rounding."
                )
            self._refuse_too_much_decay(_steps_of(table), f" with the regularizer of '{table.path}'")
        ways = {steps: self.make_pending(steps) for steps in map(_steps_of, self.tables.values())}
        self.accounts = {r: Account(way, (self.history_kind or way.history)(way.columns)) for r, way in ways.items()}
        rows = {path: table.rows for path, table in self.tables.items()}
        histories = [account.history for account in self.accounts.values()]
        scheduled = isinstance(learning_rate_of(self), keras.optimizers.schedules.LearningRateSchedule)
        keeps_largest = scheduled or self.recursion.has_velocity
        self.row_marks = RowMarks(histories, rows, start=int(self.iterations.numpy()), keeps_largest=keeps_largest)

    # Settling.

    def settle_rows(self, rows: Mapping[str, tf.Tensor], now: tf.Tensor, by_mark: Owed | None = None) -> None:
        """Gives distinct rows, by table path, the noise owed up to `now`: one draw for all tables that decay alike."""
        debts: dict[Recursion, dict[str, Debt]] = {}
        for path, ids in rows.items():
            table = self.tables[path]
            since = self.row_marks.read_marks(path, ids)
            debt = Debt(table.number, ids, self.read_rows(table, ids), since, now)
            debts.setdefault(_steps_of(table), {})[path] = debt
        for recursion, several in debts.items():
            way, history = self.accounts[recursion]
            settled = way.settle_rows(list(several.values()), history, self.noise, self.row_marks.grid, by_mark)
            for (path, debt), values in zip(several.items(), settled):
                # Noise before mark: a step that is cut short in between leaves a row that has its noise and owes it
                # still, which adds noise. The other way round it would have no noise and owe none.
                with run_after(self.write_rows(self.tables[path], debt.ids, values)):
                    self.row_marks.mark(path, debt.ids, now)

    def read_rows(self, table: Table, ids: tf.Tensor) -> Rows:
        """All of some rows that settling brings up to date."""
        return table.read(ids)

    def write_rows(self, table: Table, ids: tf.Tensor, values: Rows) -> Operations:
        """Replaces what `read_rows` gave."""
        return table.write(ids, values)

    def before_read(self, variable: keras.Variable, ids: tf.Tensor) -> None:
        """The guard: whatever the look-ahead announced, no row is read that owes noise."""
        table = self.tables.get(variable.path)
        if table is None:
            return
        table.withhold()
        flat, now = tf.reshape(tf.cast(ids, tf.int64), [-1]), self.row_marks.now()
        owing = self.row_marks.owe_noise(table.path, flat, now)

        def settle() -> tf.Tensor:
            self.settle_rows({table.path: _distinct(flat, owing)}, now)
            return tf.constant(True)

        tf.cond(tf.reduce_any(owing), settle, lambda: tf.constant(False))

    # The step.

    def step_tables(self, step: Step) -> None:
        if not self.tables:
            return
        # Check, tick, step, settle, in this order: once the clock shows the step every row owes its noise, so that what
        # goes wrong after that can add noise and never lose it.
        before, rate = self.row_marks.now(), tf.cast(step.pace, tf.float64)
        if self.arrives_late:  # what a row owes is older than the gradient that comes to it: that is settled first
            self.settle_rows({path: step.move(table).indices for path, table in self.tables.items()}, before)
        now = before + 1
        accounts = self.accounts.values()
        totals = [way.next_totals(history.look_up(before), rate, step.stddev) for way, history in accounts]
        with run_after(self.row_marks.tick(now, totals, step.noise_scale)):
            self._step_rows(step, before)
        upcoming = step.upcoming.items()
        self.settle_rows({path: self._find_owing(path, ids, now) for path, ids in upcoming if path in self.tables}, now)

    def _step_rows(self, step: Step, before: tf.Tensor) -> None:
        """Rows with a gradient make the step at once: it meets its noise before it is rounded to a row's grid."""
        # A source that is a function of the step must not give again what a payment was made of.
        number = -1 - before if self.aggregate_noise else before
        scale, grid, wanted, old = step.noise_scale, self.row_marks.grid, [], []
        for path, table in self.tables.items():
            move = step.move(table)
            old.append(step.rows(table))
            plain = _steps_of(table).is_plain
            onto, on = ((old[-1][0], move.values), grid) if plain else ((move.values,), None)
            wanted.append((path, Request(table.number, move.indices, table.width, scale, onto, on)))
        with run_after(require(*self._room(step)) if self.arrives_late else []):
            met = self.meet(wanted, number)
        for rows, (path, asked), (noisy, others) in zip(old, wanted, met, strict=True):
            rule, ids = _steps_of(self.tables[path]), asked.rows
            made = (noisy,) if rule.is_plain else weights_on(grid, step_on(grid, rule, rows, noisy, step.pace))
            with run_after(others + self.tables[path].write(ids, made)):
                self.row_marks.mark(path, ids, before + 1)

    def _find_owing(self, path: str, ids: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """The distinct rows among announced ids that owe noise; row 0 for an id outside the table."""
        ids = tf.reshape(tf.cast(ids, tf.int64), [-1])
        ids = tf.where((ids >= 0) & (ids < self.tables[path].rows), ids, 0)  # the read refuses it
        # Rows that this step has touched owe nothing: where some rows are read often, these are most.
        return _distinct(ids, self.row_marks.owe_noise(path, ids, now))

    def pace_of(self, learning_rate: tf.Tensor, stddev: tf.Tensor) -> tf.Tensor:
        # Where a step's noise is too small for the weights' grid, a row that is read stays where it is, and one that is
        # not moves by the noise of many steps. A schedule that ends at 0 would get there: its last steps are left out.
        if self.recursion.has_velocity:  # a velocity would move the weights all the same: `refusals`
            return learning_rate
        faint = self.row_marks.is_faint(tf.cast(learning_rate, tf.float64) * stddev, _LEFT_OUT)
        return tf.where(faint, 0.0, learning_rate)

    def refusals(self, step: Step) -> Iterable[Check]:
        rate, now = tf.cast(step.pace, tf.float64), self.row_marks.now()
        for recursion in self.accounts:
            if recursion.weight_decay:
                yield recursion.keep(rate) > 0, _TOO_MUCH_DECAY
            if recursion.has_velocity:
                yield ~self.row_marks.is_faint(step.noise_scale, _FAINT) | (step.stddev == 0), _MOVES_WITHOUT_NOISE
        if self.arrives_late:
            return
        for path, table in self.tables.items():  # the rows of the gradient were read at this step, and owed nothing
            since = self.row_marks.read_marks(path, step.move(table).indices)
            yield since == now, _STALE.format(path)
        if self.tables:
            yield self._room(step)

    def _room(self, step: Step) -> Check:
        """Whether float32 has places for the step's noise beside the weights that it moves."""
        largest = tf.stack([tf.reduce_max(tf.abs(step.rows(table)[0])) for table in self.tables.values()])
        scale = tf.abs(step.noise_scale)
        return ~(tf.cast(largest, tf.float64) > _ROOM * scale) | (scale == 0), _TOO_FAINT

    # Release.

    @property
    def coarseness(self) -> float:
        return float(self.row_marks.largest.numpy()) if self.built else 0.0

    @property
    def releasable(self) -> bool:
        """Whether no row of any table owes noise."""
        return not self.built or self.row_marks.is_settled

    def settle(self) -> None:
        """Pays what every row of every table owes, in chunks whose memory does not grow with the table."""
        if self.releasable:
            return
        if not tf.executing_eagerly():
            raise RuntimeError("settle() is for eager code; inside a graph it would be built, not run.")
        if self._settle_function.value is None:
            # Not the method itself: TensorFlow takes those of several optimizers for one that is traced too often.
            self._settle_function.value = tf.function(functools.partial(self.settle_all), autograph=False)
        now = int(self.row_marks.clock.numpy())
        self._settle_function.value()
        self.row_marks.settled_at = now

    def settle_all(self) -> None:
        now = self.row_marks.now()
        owed = {recursion: way.find_debt_by_mark(now, history) for recursion, (way, history) in self.accounts.items()}
        for path, table in self.tables.items():
            by_mark = owed[_steps_of(table)]
            table.withhold()
            table.sweep(lambda ids, path=path, by_mark=by_mark: self.settle_rows({path: ids}, now, by_mark))  # type: ignore[misc]
        self.row_marks.begin_totals(now)

    @property
    def pending_variables(self) -> dict[str, tf.Variable]:
        """The clock, the totals, those of regularized tables under their decay, and every table's marks."""
        # What a server's checkpoint holds, which is not settled.
        marks = {f"marks/{path}": variable for path, variable in self.row_marks.marks.items()}
        named = {r: "totals" if r == self.recursion else f"totals/{r.weight_decay!r}" for r in self.accounts}
        totals = {named[recursion]: account.history.table for recursion, account in self.accounts.items()}
        return {"clock": self.row_marks.clock, "largest": self.row_marks.largest, **totals, **marks}

    @property
    def kept_variables(self) -> dict[str, tf.Variable]:
        return {"largest": self.row_marks.largest}

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        with super().restoring():
            yield
        self.row_marks.restart(int(self.iterations.numpy()), float(self.row_marks.largest.numpy()))

    # Saving: a saved optimizer is a settled one, so its ledger starts afresh at its step count.

    def save_own_variables(self, store: Any) -> None:
        """Releases, then saves as every Keras optimizer does."""
        self.release()
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Loads a settled optimizer; what this one owes is settled before it is forgotten."""
        self.release()
        super().load_own_variables(store)
        if self.built:
            # Velocities of a file are released, and say how large the noise has been that momentum still moves by.
            fastest = max(map(_largest_velocity, self.tables.values()), default=0.0)
            self.row_marks.restart(int(self.iterations.numpy()), fastest / _LARGEST_GAUSSIAN)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "aggregate_noise": self.aggregate_noise}


def _distinct(ids: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
    """The distinct ids among those that are counted."""
    return tf.unique(tf.boolean_mask(ids, counted))[0]


def _largest_velocity(table: Table) -> float:
    """Of a settled table, a bounded part at a time; 0 without momentum."""
    if table.state is None:
        return 0.0
    chunk, found = max(1, CHUNK_VALUES // max(table.width, 1)), 0.0
    for start in range(0, table.rows, chunk):
        _, velocity = table.read(tf.range(start, min(start + chunk, table.rows), dtype=tf.int64))
        found = max(found, float(tf.reduce_max(tf.abs(velocity))))
    return found


def _steps_of(table: Table) -> Recursion:
    """The recursion of a table; tables of one recursion have one account."""
    assert isinstance(table.rule, Recursion), "no lazy mechanism takes another rule"
    return table.rule


class _Untracked:
    """Holds what TensorFlow must not find when it saves: the settling function would take its noise along."""

    value: Any = None


_ROOM = 2.0**20  # η s to the largest weight: then its float32 has steps of η s / 8 at most
_LEFT_OUT = 2.0**-10  # of the largest η s: steps below that are left out
_FAINT = 2.0**-17  # of the largest η s: eight steps of the grid
_LARGEST_GAUSSIAN = 10.0  # standard deviations that no Gaussian of ours passes
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
