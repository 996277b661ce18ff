"""DP-SGD: noise on every row of every table at every step. The baseline, and the slow one.

    θ ← (1 − ηλ) θ − η (ĝ + n),    n ~ N(0, s² I) on all rows,    s = σ C / B

Guarantees:
- (ε, δ)-DP of the weights after every step, for the event `GaussianDpEvent(σ)` under the sampling that was used.

All rows make the step in chunks and in place, so that it is an honest baseline: no temporary has the table's shape.
Gradient and noise meet in float32 before anything is rounded to the table's type: rounding is post-processing, also for
bfloat16 tables.

Reference:
    Abadi et al., "Deep Learning with Differential Privacy", 2016.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdp_rec.core.mechanism.base import PrivateOptimizer, Step
from tfdp_rec.core.mechanism.tables import Table


@keras.saving.register_keras_serializable(package="tfdp_rec")
class DPSGD(PrivateOptimizer):
    """Differentially private SGD with noise on every weight.

    Arguments as `PrivateOptimizer`.

    Example:
        >>> DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=256).dp_event()
        GaussianDpEvent(noise_multiplier=1.1)
    """

    moves_every_row = True

    def step_tables(self, step: Step) -> None:
        for table in self.tables.values():
            self._step_all_rows(table, step)

    def _step_all_rows(self, table: Table, step: Step) -> None:
        moves = step.move(table)
        ids = tf.cast(moves.indices, tf.int64)
        order = tf.argsort(ids)  # sorted, the gradients of a chunk of rows are one stretch
        ids, values = tf.gather(ids, order), tf.gather(moves.values, order)

        def act(rows: tf.Tensor) -> None:
            first, end = tf.unstack(tf.searchsorted(ids, tf.stack([rows[0], rows[-1] + 1])))
            places, shape = ids[first:end, None] - rows[0], tf.stack([tf.size(rows, tf.int64), table.width])
            onto = tf.scatter_nd(places, values[first:end], shape)
            ((total, _),) = self.noisy_moves(step, [(table, rows, onto)])
            table.step(rows, total, step.learning_rate)

        table.sweep(act)
