"""Steps of a size of each row's own, constant for a while: adaptive, and still linear, so that noise may come late.

A row r moves by a_r m where it would move by m = −η u, u = ĝ + n its noisy gradient. The scales a are constant for R
steps, a *phase*; within it everything is linear in u, and what a row owes is what it would owe without scales, times
a_r. Between two phases all rows are settled, and scales are made anew from how far each row went in the phase, in units
of how far noise alone would have taken it:

    q_r = mean(Δθ_r²) / (a_r² Σ_phase (η_t s_t)²)                                Δθ_r = θ_r − θ_r as the phase began
    level_r ← β level_r + (1 − β) q_r,      a_r = 1/√max(level_r, 1),      level_r = 1 at first

Noise alone gives q = 1, give or take √(2/width); a row that gradients pull one way gives more, and is slowed down.
With momentum μ noise goes 1/(1 − μ) times as far, which is counted. A phase without noise leaves levels as they are.

Guarantees:
- scales are a function of weights that have all their noise: post-processing of what DP-SGD would have released;
- a row's noise and gradient of a step have one scale: it changes when the row owes nothing. Lazy equals eager, exactly.

Memory: the weights as the phase began, as much as momentum takes, and one number a row. A new phase is one pass over
the tables.

Reference:
    Li et al., "Differentially private adaptive optimization with delayed preconditioners", ICLR 2023, who scale
    gradients before the clip; here gradient and noise are scaled together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.keras_internals import resource
from tfdp_rec.optimizers.rules import TableRule
from tfdp_rec.optimizers.step import Step
from tfdp_rec.optimizers.tables import Operations, Table, scatter


@keras.saving.register_keras_serializable(package="tfdp_rec")
@dataclasses.dataclass(frozen=True)
class DelayedRMSprop(TableRule):
    """Slows down rows that go far: a = 1/√level, 1 for rows that go no further than noise.

    Args:
        refresh_every: R, steps of a phase; each costs a pass over the tables.
        decay: β, what a level keeps of itself.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> DelayedRMSprop().scale(tf.constant([0.9, 4.0])).numpy().tolist()
        [1.0, 0.5]
    """

    refresh_every: int = 100
    decay: float = 0.5

    def __post_init__(self) -> None:
        if int(self.refresh_every) != self.refresh_every or self.refresh_every < 1:
            raise ValueError(f"refresh_every must be a positive number of steps, got {self.refresh_every}.")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {self.decay}.")

    def scale(self, level: tf.Tensor) -> tf.Tensor:
        """a = 1/√level, at most 1."""
        return tf.math.rsqrt(tf.maximum(level, 1.0))


class Phase:
    """The phase of an optimizer: how much of it is left, the noise it has seen, and what its tables keep.

    Args:
        rule: which scales.
        momentum: μ.
        tables: whose rows they are.
        add_variable: the optimizer's.
    """

    def __init__(
        self, rule: DelayedRMSprop, momentum: float, tables: Iterable[Table], add_variable: Callable[..., Any]
    ):
        self._rule, self._reach, self._tables = rule, 1 / (1 - momentum) ** 2, list(tables)
        self._left = add_variable((), dtype="int64", name="steps_left_of_phase")
        self._noise = add_variable((), dtype="float64", name="noise_of_phase")
        for table in self._tables:
            table.scales = Scales(rule, table, add_variable)

    def count(self, step: Step, settle_all: Callable[[], None]) -> Operations:
        """Begins another phase if this one is over, ahead of a step, and counts the step.

        Args:
            step: it.
            settle_all: pays what all rows owe of the steps before.
        """
        left, noise = resource(self._left), resource(self._noise)

        def begin() -> tf.Tensor:
            # A row's scale must not change while it owes noise of that scale.
            settle_all()
            variance = tf.cast(noise.read_value() * self._reach, tf.float32)
            for table in self._tables:
                table.scales.refresh(variance)
            left.assign(self._rule.refresh_every)
            noise.assign(0.0)
            return tf.constant(True)

        begun = tf.cond(left <= 0, begin, lambda: tf.constant(False))
        with tf.control_dependencies([begun]):
            rate = tf.cast(step.learning_rate, tf.float64)
            counted = [left.assign_sub(1), noise.assign_add(tf.square(rate * step.stddev))]
        return counted


class Scales:
    """The scales of one table's rows.

    Args:
        rule: which scales.
        table: whose.
        add_variable: the optimizer's.
    """

    def __init__(self, rule: DelayedRMSprop, table: Table, add_variable: Callable[..., Any]):
        self._rule, self._table = rule, table
        self._levels = add_variable((table.rows,), "ones", dtype="float32", name=f"levels_{table.number}")
        self._start = add_variable((table.rows, table.width), dtype="float32", name=f"phase_start_{table.number}")

    def of(self, ids: tf.Tensor) -> tf.Tensor:
        """Those of some rows, `[n, 1]`."""
        return self._rule.scale(tf.gather(resource(self._levels), ids))[:, None]

    def refresh(self, variance: tf.Tensor) -> None:
        """Makes them anew, from rows that owe nothing.

        Args:
            variance: of what noise alone would have moved a weight by in the phase, at scale 1.
        """
        levels, start = resource(self._levels), resource(self._start)

        def act(ids: tf.Tensor) -> None:
            weights, level = self._table.read(ids)[0], tf.gather(levels, ids)
            way = tf.reduce_mean(tf.square(weights - tf.gather(start, ids)), axis=1)
            found = way / (tf.square(self._rule.scale(level)) * variance)
            moved = self._rule.decay * level + (1 - self._rule.decay) * found
            scatter("Update", levels, ids, tf.where(variance > 0, moved, level))
            scatter("Update", start, ids, weights)

        self._table.sweep(act)
