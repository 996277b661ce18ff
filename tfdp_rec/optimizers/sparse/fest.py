"""FEST: update only rows that were chosen once, before training.

  θ_b ← θ_b - η (g_b + N(0, (σ C / B)^2))    for chosen b;  others stay bit for bit

Guarantees:
- (ε, δ)-DP of the weights after every step, for `GaussianDpEvent(sigma)` a step and, once, the event of the
  choice (`events_before_training`).
- Which rows move does not depend on the batch: work grows with the chosen rows, whichever are read.

Reference:
    B. Ghazi et al., Sparsity-Preserving Differentially Private Training of Large Embedding Models, NeurIPS 2023.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import ClippedSum
from tfdp_rec.optimizers.sparse.base import SelectingOptimizer
from tfdp_rec.optimizers.sparse.preselection import Preselection


@keras.saving.register_keras_serializable(package="tfdp_rec")
class FEST(SelectingOptimizer):
    """DP-SGD confined to rows chosen before training.

    Args:
        learning_rate: Learning rate: a number or a Keras schedule.
        preselection: The rows that are trained.
        **settings: Settings of `PrivateOptimizer` without momentum and weight decay.

    Raises:
        ValueError: for values out of range, momentum or weight decay.

    Example:
        >>> chosen = Preselection({"items/embeddings": [3, 1, 4]}, noise_multiplier=20.0)
        >>> optimizer = FEST(
        ...     0.1, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=256, preselection=chosen)
        >>> optimizer.events_before_training()
        [(GaussianDpEvent(noise_multiplier=20.0), 'pre-selection of 3 rows (...)')]
    """

    def __init__(self, learning_rate: Any, *, preselection: Preselection, **settings: Any):
        if preselection is None:
            raise ValueError("FEST needs the rows it is confined to: preselection=Preselection(...).")
        super().__init__(learning_rate, preselection=preselection, **settings)

    def choose(self, clipped: ClippedSum) -> dict[str, tf.Tensor]:
        return {path: self.space.all_rows(path) for path in self.tables}
