"""LazyDP-SGD: the noise of DP-SGD, drawn for a row only when the row is next read, and for all rows at release.

A row that no batch reads owes, for every step that passes, the noise (and decay, and momentum) that DP-SGD would have
given it. What it owes is one Gaussian (`pending.py`); it is paid

- before the model reads the row: by the step before, for the ids that look-ahead announced, and otherwise at the moment
  of reading (so look-ahead is an optimisation, never a condition of correctness);
- for every row, by `settle()`, before anything leaves training.

Guarantees:
- the released weights have the distribution that DP-SGD's have: the same ε, for any learning-rate schedule, weight
  decay, momentum, and change of σ, C, B or η in mid-training;
- not for someone who watches the training: between releases unread rows lack noise.

Per row a mark of 4 bytes (`ledger.py`). The order of writes is such that a step cut short anywhere, by an error or
Ctrl-C, could only add noise: a step is on the clock before its gradient is in a table, and noise is in a table before
the mark that says so.

Reference: Lim et al., "LazyDP: Co-Designing Algorithm-Software for Scalable Training of Differentially Private
Recommendation Models", ASPLOS 2024.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import NotPrivate
from tfdp_rec.noise import Request
from tfdp_rec.optimizers.base import PrivateOptimizer, Step
from tfdp_rec.optimizers.lazy.marks import Ledger
from tfdp_rec.optimizers.lazy.pending import Owed, Replayed, UnitNoise, pending
from tfdp_rec.optimizers.tables import Table, after

Debts = Callable[[tf.Tensor], Owed]
"""What rows owe, from the steps they were settled at."""


@keras.saving.register_keras_serializable(package="tfdp_rec")
class LazyDPSGD(PrivateOptimizer):
    """DP-SGD at the speed of sparse SGD: same released model, same ε, noise drawn when it falls due.

    Args:
        learning_rate: float or Keras schedule.
        l2_norm_clip: C, the bound on each example's gradient norm.
        noise_multiplier: σ, the noise's standard deviation in units of C.
        expected_batch_size: B, what every step divides by.
        aggregate_noise: draw what a row owes as one Gaussian; False draws every owed step by itself (the paper's
            "without ANS"; slow, for comparison and tests).
        **kwargs: as `PrivateOptimizer`.

    Raises:
        ValueError: for values out of range, or what has no exact lazy form.

    Example:

    >>> LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=1024).dp_event()
    GaussianDpEvent(noise_multiplier=1.1)
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        l2_norm_clip: float,
        noise_multiplier: float,
        expected_batch_size: float,
        aggregate_noise: bool = True,
        **kwargs: Any,
    ):
        super().__init__(
            learning_rate,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            **kwargs,
        )
        self.aggregate_noise = aggregate_noise
        rate = learning_rate if isinstance(learning_rate, (int, float)) else 0.0
        if rate * self.recursion.weight_decay >= 1:
            raise ValueError(
                f"learning_rate * weight_decay must be below 1, got {rate} * {self.recursion.weight_decay}: a step "
                "would leave nothing of a weight, and lazy decay divides by what is left."
            )
        self.pending = pending(self.recursion, aggregate_noise)
        self._settle_function = _Untracked()

    def build_tables(self) -> None:
        for table in self.tables.values():
            if table.variable.dtype != "float32":
                raise NotPrivate(
                    f"Table '{table.path}' is {table.variable.dtype}: rounding a gradient before its noise is added "
                    "breaks the bound on its effect. Keep tables float32 (policy mixed_bfloat16 does), or use DPSGD."
                )
        rows = {path: table.rows for path, table in self.tables.items()}
        self.ledger = Ledger(self.pending.columns, rows, start=int(self._iterations.numpy()))

    # Paying.

    def _pay(self, table: Table, ids: tf.Tensor, now: tf.Tensor, debts: Debts | None = None) -> None:
        """Pays what distinct rows of a table owe up to step `now`; for a row that owes nothing this changes nothing."""
        self._pay_all({table.path: ids}, now, debts)

    def _pay_all(self, rows: Mapping[str, tf.Tensor], now: tf.Tensor, debts: Debts | None = None) -> None:
        """Pays what distinct rows of several tables owe, with one draw for all of them."""
        history, kind = self.ledger.history, self.pending
        tables = {path: self.tables[path] for path in rows}
        since = {path: self.ledger.since(path, ids) for path, ids in rows.items()}
        if isinstance(kind, Replayed):
            paid = [
                kind.pay(table.read(rows[path]), rows[path], since[path], now, history, self._unit_of(table))
                for path, table in tables.items()
            ]
        else:
            owed = [debts(since[path]) if debts else kind.owed(since[path], now, history) for path in rows]
            requests = [Request(t.number, rows[p], t.width, o.stddev) for (p, t), o in zip(tables.items(), owed)]
            noise = self.noise.draw(requests, now)
            paid = [
                kind.pay(table.read(rows[path]), o.coefficients, drawn)
                for (path, table), o, drawn in zip(tables.items(), owed, noise)
            ]
        for (path, table), values in zip(tables.items(), paid):
            with after(table.write(rows[path], *values)):
                self.ledger.mark(path, rows[path], now)

    def _unit_of(self, table: Table) -> UnitNoise:
        return lambda ids, step: self.noise.normal(table.number, ids, step, table.width)

    def before_read(self, variable: keras.Variable, ids: tf.Tensor) -> None:
        """The guard: whatever the look-ahead announced, no row is read that owes noise."""
        table = self.tables.get(variable.path)
        if table is None:
            return
        flat, now = tf.reshape(tf.cast(ids, tf.int64), [-1]), self.ledger.now()
        owing = self.ledger.since(table.path, flat) < now

        def pay() -> tf.Tensor:
            self._pay(table, tf.unique(tf.boolean_mask(flat, owing))[0], now)
            return tf.constant(True)

        tf.cond(tf.reduce_any(owing), pay, lambda: tf.constant(False))

    # The step.

    def step_tables(self, step: Step) -> None:
        if not self.tables:
            return
        before, rate = self.ledger.now(), tf.cast(step.learning_rate, tf.float64)
        with after([check for check in self._checks(step, before, rate) if check is not None]):
            now = before + 1
            ticked = self.ledger.tick(
                now, self.pending.next_totals(self.ledger.history.at(before), rate, step.stddev)
            )
        with after(ticked):
            for table in self.tables.values():
                table.inject(functools.partial(step.mean, table), step.learning_rate)
        upcoming = step.upcoming.items()
        self._pay_all({path: self._announced(path, ids) for path, ids in upcoming if path in self.tables}, now)

    def _announced(self, path: str, ids: tf.Tensor) -> tf.Tensor:
        """The distinct rows among announced ids; an id outside the table is for the read to refuse."""
        ids = tf.reshape(tf.cast(ids, tf.int64), [-1])
        return tf.unique(tf.boolean_mask(ids, (ids >= 0) & (ids < self.tables[path].rows)))[0]

    def _checks(self, step: Step, now: tf.Tensor, rate: tf.Tensor) -> Iterator[Any]:
        """A gradient belongs to this step only if its rows owed nothing when they were read."""
        for path, table in self.tables.items():
            since = self.ledger.since(path, step.mean(table).indices)
            yield tf.debugging.assert_equal(since, now, _STALE.format(path))
        if self.recursion.weight_decay:
            left = tf.cast(self.recursion.keep(rate), tf.float64)
            yield tf.debugging.assert_positive(left, _TOO_MUCH_DECAY)

    # Release.

    @property
    def releasable(self) -> bool:
        """Whether no row of any table owes noise."""
        return not self.built or self.ledger.settled

    def settle(self) -> None:
        """Pays what every row of every table owes, in chunks whose memory does not grow with the table."""
        if self.releasable:
            return
        if not tf.executing_eagerly():
            raise RuntimeError("settle() is for eager code; inside a graph it would be built, not run.")
        if self._settle_function.value is None:
            self._settle_function.value = tf.function(self._settle_all, autograph=False)
        now = int(self.ledger.clock.numpy())
        self._settle_function.value()
        self.ledger.settled_at = now

    def _settle_all(self) -> None:
        now, debts = self.ledger.now(), None
        if not isinstance(self.pending, Replayed):
            # There are fewer steps than rows: what a row owes is found once for every step it may be marked with.
            debts = self.pending.owed(tf.range(now + 1), now, self.ledger.history).of
        for table in self.tables.values():
            table.sweep(lambda ids, table=table: self._pay(table, ids, now, debts))  # type: ignore[misc]

    @property
    def ledger_variables(self) -> dict[str, tf.Variable]:
        """The clock, the totals and every table's marks."""
        marks = {f"marks/{path}": variable for path, variable in self.ledger.marks.items()}
        return {"clock": self.ledger.clock, "totals": self.ledger.history.table, **marks}

    def ledger_restored(self) -> None:
        """Rows may owe noise now."""
        self.ledger.settled_at = None

    # Saving: a saved optimizer is a settled one, so its ledger starts afresh at its step count.

    def save_own_variables(self, store: Any) -> None:
        """Settles, then saves as every Keras optimizer does."""
        self.settle()
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Loads a settled optimizer."""
        super().load_own_variables(store)
        if self.built:
            self.ledger.restart(int(self._iterations.numpy()))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "aggregate_noise": self.aggregate_noise}


class _Untracked:
    """Holds what TensorFlow must not find when it saves: the settling function would take its noise along."""

    value: Any = None


_STALE = (
    "Rows of '{}' were read before their pending noise was applied, or the clipped sum is of an earlier step: take it "
    "with tfdp_rec.clipping.clipped_sum just before optimizer.apply"
)
_TOO_MUCH_DECAY = "learning_rate * weight_decay must stay below 1 for lazy decay"
