"""DP-FTRL: DP-SGD whose noise is correlated from step to step. The slow one, on all rows at every step.

    θ ← (1 − ηλ) θ − η (ĝ + s n_t),    n = C⁻¹ z on all rows,    s = σ C / B

Guarantees:
- the weights after every step, all of them together, are one Gaussian mechanism: (ε, δ)-DP for the event
  `correlation.dp_event(σ)`, for batches in a fixed order, under zero-out adjacency, no sampling needed.

Reference:
    Kairouz et al., "Practical and private (deep) learning without sampling or shuffling", 2021.
    Dvijotham et al., "Efficient and near-optimal noise generation for streaming differential privacy", 2024.
"""

from __future__ import annotations

import keras

from tfdp_rec.optimizers.correlated import CorrelatedOptimizer
from tfdp_rec.optimizers.dp_sgd import DPSGD


@keras.saving.register_keras_serializable(package="tfdp_rec")
class DPFTRL(CorrelatedOptimizer, DPSGD):
    """Differentially private SGD with correlated noise on every weight, for data in a fixed order.

    Arguments as `PrivateOptimizer`, and correlation: a `tfdp_rec.privacy.Correlation`.

    Example:
        >>> from tfdp_rec.privacy import optimised_correlation
        >>> plan = optimised_correlation(steps=600, separation=100)
        >>> settings = {"l2_norm_clip": 1.0, "noise_multiplier": 4.0, "expected_batch_size": 256}
        >>> DPFTRL(0.1, correlation=plan, **settings).dp_event().event == plan.dp_event(4.0)
        True
    """
