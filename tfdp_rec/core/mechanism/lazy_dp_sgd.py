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
  decay and momentum;
- not against an observer of the training: between releases unread rows lack noise.

In float32 noise needs room beside a weight, else it shows which rows were read. So gradients take no weight past a
bound, and tables leave out or refuse steps with too little noise beside that; both follow from public numbers
(docs/privacy-noise.md).

Per row a mark of 8 bytes (`RowMarks`). The order of writes is such that a step cut short anywhere, by an error or
Ctrl-C, could only add noise: a step is on the clock before its gradient is in a table, and noise is in a table before
the mark that says so.

Reference:
    Lim et al., "LazyDP: Co-Designing Algorithm-Software for Scalable Training of Differentially Private
    Recommendation Models", ASPLOS 2024.
"""

from __future__ import annotations

from typing import Any, Unpack, overload

import keras
import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import HOST
from tfdp_rec.core.ground.keras_internals import learning_rate_of
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.arguments import Numbers, Planned
from tfdp_rec.core.mechanism.base import PrivateOptimizer, Step
from tfdp_rec.core.mechanism.noise.base import Request
from tfdp_rec.core.mechanism.noise.meeting import within
from tfdp_rec.core.mechanism.pending import step_on, weights_on
from tfdp_rec.core.mechanism.row_debts import RowDebts
from tfdp_rec.core.mechanism.rules import Recursion
from tfdp_rec.core.mechanism.tables import Table, recursion_of, run_after


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

    debts: RowDebts
    debts_kind = RowDebts  # a parameter server has one of its own

    @overload
    def __init__(self, learning_rate: Any, *, aggregate_noise: bool = ..., **settings: Unpack[Numbers]) -> None: ...
    @overload
    def __init__(self, learning_rate: Any, *, aggregate_noise: bool = ..., **settings: Unpack[Planned]) -> None: ...
    def __init__(self, learning_rate: Any, *, aggregate_noise: bool = True, **settings: Any):
        super().__init__(learning_rate, **settings)
        self.aggregate_noise = aggregate_noise
        _refuse_too_much_decay(self, self.recursion)

    def build_tables(self) -> None:
        for table in self.tables.values():
            if table.variable.dtype != "float32":
                raise NotPrivate(
                    f"Table '{table.path}' is {table.variable.dtype}, whose grid would round away most of the noise "
                    "that is added late. Keep tables float32 (policy mixed_bfloat16 does), or use DPSGD, which adds "
                    "gradient and noise ahead of every rounding."
                )
            _refuse_too_much_decay(self, recursion_of(table), f" with the regularizer of '{table.path}'")
        self.debts = self.debts_kind(self)

    # The step.

    def step_tables(self, step: Step) -> None:
        if not self.tables:
            return
        # Check, tick, step, settle, in this order: once the clock shows the step every row owes its noise, so that what
        # goes wrong after that can add noise and never lose it.
        before = self.debts.marks.now()
        if self.debts.arrives_late:  # what a row owes is older than the gradient that comes to it, and is settled first
            self.debts.settle_rows({path: step.move(table).indices for path, table in self.tables.items()}, before)
        with tf.device(HOST):
            now, bound = before + 1, self.debts.bound.limit(step)
        with run_after(self.debts.count(step, before, now)):
            self._step_rows(step, bound, before, now)
        self.debts.settle_upcoming(step.upcoming, now)

    def _step_rows(self, step: Step, bound: tf.Tensor, before: tf.Tensor, now: tf.Tensor) -> None:
        """Rows with a gradient make the step at once: it meets its noise before it is rounded to a row's grid."""
        # A source that is a function of the step must not give again what a payment was made of.
        number = -1 - before if self.aggregate_noise else before
        scale, grid, wanted, old = step.noise_scale, self.debts.marks.grid, [], []
        for path, table in self.tables.items():
            move, rows, rule = step.move(table), step.rows(table), recursion_of(table)
            if rule.is_plain:
                met_by: dict[str, Any] = {"onto": (rows[0], move.values), "grid": grid, "bound": bound}
            else:
                met_by = {"onto": (within(rule.rest(rows, step.pace), move.values, bound, rule.reach),)}
            wanted.append((path, Request(table.number, move.indices, table.width, scale, **met_by)))
            old.append(rows)
        met, written = self.meet(wanted, number), []
        for rows, (path, asked), (noisy, others) in zip(old, wanted, met, strict=True):
            rule, ids = recursion_of(self.tables[path]), asked.rows
            made = (noisy,) if rule.is_plain else weights_on(grid, step_on(grid, rule, rows, noisy, step.pace))
            with run_after(others):
                written += self.tables[path].write(ids, made)
        with run_after(written):
            self.debts.marks.mark(self.debts.find_places(step), now)

    # Release.

    @property
    def releasable(self) -> bool:
        """Whether no row of any table owes noise."""
        return not self.built or self.debts.marks.is_settled

    # Saving: a saved optimizer is a settled one, so its ledger starts afresh at its step count.

    def save_own_variables(self, store: Any) -> None:
        """Releases, then saves as every Keras optimizer does."""
        _release(self)
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Loads a settled optimizer; what this one owes is settled before it is forgotten."""
        _release(self)
        super().load_own_variables(store)
        if self.built:
            # Velocities of a file are released, and say how large the noise has been that momentum still moves by.
            fastest = max(map(_largest_velocity, self.tables.values()), default=0.0)
            self.debts.marks.restart(int(self.iterations.numpy()), fastest / _LARGEST_GAUSSIAN)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "aggregate_noise": self.aggregate_noise}


def _refuse_too_much_decay(optimizer: LazyDPSGD, recursion: Recursion, of: str = "") -> None:
    rate = learning_rate_of(optimizer)
    if isinstance(rate, keras.Variable) and float(rate.numpy()) * recursion.weight_decay >= 1:
        raise ValueError(
            f"learning_rate * weight_decay must be below 1, got {float(rate.numpy()):g} * "
            f"{recursion.weight_decay:g}{of}: a step would leave nothing of a weight, and lazy decay divides by "
            "what is left."
        )


def _release(optimizer: LazyDPSGD) -> None:
    """Settles, and lets the rows out by the owner of the tables (`weights.py`)."""
    optimizer.settle()
    if optimizer.built:
        for owner in {vars(table.variable).get("private_weights") for table in optimizer.tables.values()} - {None}:
            owner.release()


def _largest_velocity(table: Table) -> float:
    """Of a settled table, a bounded part at a time; 0 without momentum."""
    if table.state is None:
        return 0.0
    found: list[float] = []
    table.sweep(lambda ids: found.append(float(tf.reduce_max(tf.abs(table.read(ids)[1])))))
    return max(found, default=0.0)


_LARGEST_GAUSSIAN = 10.0  # standard deviations that no Gaussian of ours passes
