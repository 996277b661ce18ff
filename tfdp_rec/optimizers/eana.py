"""EANA: embedding-aware noise addition. Only the rows that this batch gave a gradient get noise.

    θ_i ← (1 − ηλ) θ_i − η (ĝ_i + n_i),    n_i ~ N(0, s² I),    for rows i with ĝ_i ≠ 0; other rows stay bit for bit

Guarantees:
- none that is formal: which rows moved tells what was in the batch. ε is reported as infinite.
- a data-dependent bound for one pass over the data with known counts: `tfdp_rec.privacy.eana_rdp`.
- what it hides in practice is measured, not proved: `tfdp_rec.audit`.

Momentum and weight decay act on the touched rows only. A padding or masked id has no gradient and gets no noise.

Reference:
    Ning et al., "EANA: Reducing Privacy Risk on Large-scale Recommendation Models", RecSys 2022.
"""

from __future__ import annotations

import dp_accounting
import keras
import tensorflow as tf

from tfdp_rec.noise import Request
from tfdp_rec.optimizers.base import PrivateOptimizer, Step


@keras.saving.register_keras_serializable(package="tfdp_rec")
class EANA(PrivateOptimizer):
    """SGD with noise on the rows that the batch touched. Not differentially private; see the module's text.

    Arguments as `PrivateOptimizer`.

    Example:
        >>> EANA(0.1, l2_norm_clip=1.0, noise_multiplier=0.01, expected_batch_size=64).dp_event()
        NonPrivateDpEvent()
    """

    def dp_event(self) -> dp_accounting.DpEvent:
        return dp_accounting.NonPrivateDpEvent()

    def step_tables(self, step: Step) -> None:
        tables = list(self.tables.values())
        moved = [_touched(step.move(table)) for table in tables]
        requests = [
            Request(table.number, ids, table.width, tf.fill([tf.size(ids), 1], step.noise_scale))
            for table, (ids, _) in zip(tables, moved)
        ]
        noise = self.noise.draw(requests, self.step_number)
        for table, (ids, move), drawn in zip(tables, moved, noise):
            table.step(ids, move + drawn[:, 0], step.learning_rate)


def _touched(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows that move; a padding id does not. Usually that is all of them, and nothing is copied."""
    ids, moves = slices.indices, slices.values
    touched = tf.reduce_any(tf.not_equal(moves, 0), axis=1)
    keep = lambda values: tf.boolean_mask(values, touched)  # noqa: E731
    return tf.cond(tf.reduce_all(touched), lambda: (ids, moves), lambda: (keep(ids), keep(moves)))
