"""EANA: embedding-aware noise addition. Only the rows that this batch read get noise.

    θ_i ← (1 − ηλ) θ_i − η (ĝ_i + n_i),    n_i ~ N(0, s² I),    for rows i that are read; other rows stay bit for bit

Guarantees:
- none that is formal: which rows moved shows what was in the batch. ε is reported as infinite.
- a data-dependent bound for one pass over the data with known counts: `tfdp_rec.privacy.eana_rdp`.
- what it hides in practice is measured, not proved: `tfdp_rec.audit`.

Which rows get noise goes by what was read and never by a value: a row whose gradients add up to exactly 0 (they cancel,
or their activations are dead) gets its noise as any other, since a row that stays as it was would show that sum. So
does a padding or masked id that is looked up. Momentum and weight decay act on the rows that were read only.

Reference:
    Ning et al., "EANA: Reducing Privacy Risk on Large-scale Recommendation Models", RecSys 2022.
"""

from __future__ import annotations

import keras

from tfdp_rec.core.claim.events import DpEvent, NonPrivateDpEvent
from tfdp_rec.core.mechanism.base import PrivateOptimizer, Step


@keras.saving.register_keras_serializable(package="tfdp_rec")
class EANA(PrivateOptimizer):
    """SGD with noise on the rows that the batch read. Not differentially private; see the module's text.

    Arguments as `PrivateOptimizer`.

    Example:
        >>> EANA(0.1, l2_norm_clip=1.0, noise_multiplier=0.01, expected_batch_size=64).dp_event()
        NonPrivateDpEvent()
    """

    def dp_event(self) -> DpEvent:
        return NonPrivateDpEvent()

    def step_tables(self, step: Step) -> None:
        moves = [(table, move.indices, move.values) for table in self.tables.values() for move in [step.move(table)]]
        for (table, ids, _), (noisy, _) in zip(moves, self.noisy_moves(step, moves), strict=True):
            table.step(ids, noisy, step.learning_rate)
