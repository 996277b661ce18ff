"""AdaFEST: at every step, update only the rows that a noisy vote of this batch elects.

  counts = Σ_i [1 on the rows that example i has a gradient at]_C1      clipped over all tables together
  chosen = {b : counts_b + N(0, (s1 C1)^2) ≥ τ}                   over every row of every table
  θ_b ← θ_b - η ((Σ_i [grad_i]_C2)_b + N(0, (s2 C2)^2)) / B    for chosen b;  others stay bit for bit

Guarantees:
- (ε, δ)-DP of the weights after every step, and of which rows moved, for the composition of
  `GaussianDpEvent(s1)` and `GaussianDpEvent(s2)` on one batch, that is 1/s^2 = 1/s1^2 + 1/s2^2.
- Work and memory grow with the rows read and chosen, never with the tables (`draws.py`).

What τ trades: a high one keeps few rows, drops the gradients of rare ones and adds little noise; a low one keeps
strays, V Φ(-τ / (s1 C1)) a step. With `per_value` a table's threshold is τ · its width / the mean width of the tables:
a row of a wide table, which costs more values, needs more votes.

Reference:
    B. Ghazi et al., Sparsity-Preserving Differentially Private Training of Large Embedding Models, NeurIPS 2023.
"""

from __future__ import annotations

import warnings
from typing import Any, Unpack, overload

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.claim.events import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent
from tfdp_rec.core.mechanism import checks
from tfdp_rec.core.mechanism.arguments import Numbers, Planned
from tfdp_rec.core.mechanism.base import Setting
from tfdp_rec.core.sensitivity.engine import ClippedSum
from tfdp_rec.sparse import draws
from tfdp_rec.sparse.fest import SelectingOptimizer
from tfdp_rec.sparse.preselection import Preselection

_MANY_STRAYS = 0.1  # of all rows, at each step: then selection saves little


@keras.saving.register_keras_serializable(package="tfdp_rec")
class AdaFEST(SelectingOptimizer):
    """Private SGD that stays sparse by choosing rows with a noisy count. With a `preselection`, AdaFEST+.

    Args:
        learning_rate: Learning rate: a number or a Keras schedule.
        contribution_clip: C1, the bound on the norm of what an example adds to the counts. An example moves k rows:
            √(k) clips nothing, 1 gives each row the vote 1/√(k).
        contribution_noise_multiplier: Noise multiplier s1 of the counts.
        threshold: Positive threshold τ that a noisy count must reach.
        per_value: Whether thresholds are in proportion to the widths of the tables, τ being their mean.
        **settings: Settings of `PrivateOptimizer` without momentum and weight decay, and `preselection`: the rows among
            which to choose, or None for all. l2_norm_clip is C2, noise_multiplier is s2, both of the gradients.

    Raises:
        ValueError: for values out of range, momentum or weight decay.

    Example:
        >>> AdaFEST(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, contribution_clip=1.0,
        ...         contribution_noise_multiplier=3.0, threshold=12.0, expected_batch_size=256).dp_event()
        ComposedDpEvent(events=[GaussianDpEvent(noise_multiplier=3.0), GaussianDpEvent(noise_multiplier=1.0)])
    """

    # C1, the bound on the norm of what an example adds to the counts; s1, their noise in units of C1; τ.
    contribution_clip = Setting()
    contribution_noise_multiplier = Setting(checks.check_not_negative)
    threshold = Setting()

    @overload
    def __init__(
        self, learning_rate: Any, *, contribution_clip: float, contribution_noise_multiplier: float, threshold: float,
        per_value: bool = ..., preselection: Preselection | None = ..., **settings: Unpack[Numbers],
    ) -> None: ...
    @overload
    def __init__(
        self, learning_rate: Any, *, contribution_clip: float, contribution_noise_multiplier: float, threshold: float,
        per_value: bool = ..., preselection: Preselection | None = ..., **settings: Unpack[Planned],
    ) -> None: ...
    def __init__(
        self, learning_rate: Any, *, contribution_clip: float, contribution_noise_multiplier: float, threshold: float,
        per_value: bool = False, **settings: Any,
    ):
        super().__init__(learning_rate, **settings)
        self.contribution_clip, self.contribution_noise_multiplier = contribution_clip, contribution_noise_multiplier
        self.threshold, self.per_value = threshold, per_value

    @classmethod
    def with_total_noise(
        cls, learning_rate: Any, *, noise_multiplier: float, selection_fraction: float = 0.1, **kwargs: Any
    ) -> AdaFEST:
        """An AdaFEST as private as DP-SGD with one noise multiplier, a fraction of whose budget selects rows.

        Args:
            learning_rate: Learning rate: a number or a Keras schedule.
            noise_multiplier: Total noise multiplier s; s1 and s2 follow from 1/s1^2 = fraction/s^2, 1/s2^2 = (1 -
                fraction)/s^2.
            selection_fraction: Share of the budget 1/s^2 that the selection gets.
            **kwargs: Other arguments of the constructor.

        Example:
            >>> optimizer = AdaFEST.with_total_noise(
            ...     0.1, noise_multiplier=1.0, selection_fraction=0.2, l2_norm_clip=1.0, contribution_clip=1.0,
            ...     threshold=10.0, expected_batch_size=256)
            >>> round(optimizer.contribution_noise_multiplier, 3), round(optimizer.noise_multiplier, 3)
            (2.236, 1.118)
        """
        s1, s2 = draws.split_noise_multiplier(noise_multiplier, selection_fraction)
        return cls(learning_rate, noise_multiplier=s2, contribution_noise_multiplier=s1, **kwargs)

    def dp_event(self) -> DpEvent:
        """Both looks at the batch: the counts and the gradients."""
        multipliers = (self.contribution_noise_multiplier, self.noise_multiplier)
        if not all(multipliers):
            return NonPrivateDpEvent()
        return ComposedDpEvent([GaussianDpEvent(m) for m in multipliers])

    def build_tables(self) -> None:
        super().build_tables()
        stddev, widths = self.contribution_noise_multiplier * self.contribution_clip, np.ones(len(self.tables))
        if self.per_value:
            widths = np.array([table.width for table in self.tables.values()])
        self._shares = widths / widths.mean() if len(widths) else widths
        strays = 0.0
        if stddev:
            each = zip(self.space.table_sizes, self._shares)
            strays = sum(draws.expected_strays(size, stddev, share * self.threshold) for size, share in each)
        if strays > _MANY_STRAYS * self.space.size:
            warnings.warn(
                f"threshold={self.threshold} lets {strays:,.0f} of {self.space.size:,} rows through at every step by "
                f"noise alone (its standard deviation is {stddev:g}): private, but hardly sparse. Raise threshold.",
                stacklevel=2,
            )

    def choose(self, clipped: ClippedSum) -> dict[str, tf.Tensor]:
        clip = tf.constant(self.contribution_clip, tf.float64)
        votes = draws.contribution_counts(*self.find_touches(clipped), self.space.size, clip)
        stddev = clip * tf.constant(self.contribution_noise_multiplier, tf.float64)
        threshold, parts = tf.constant(self.threshold, tf.float64), None
        if self.per_value and self.tables:
            threshold, parts = threshold * tf.constant(self._shares, tf.float64), self.space.table_sizes
        return self.space.rows(draws.threshold_survivors(votes, stddev, threshold, self.bits, parts))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "per_value": self.per_value}
