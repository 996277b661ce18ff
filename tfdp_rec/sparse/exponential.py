"""Exponential selection: at every step, update m rows drawn by the exponential mechanism. A baseline.

  chosen = the m largest of e0 * (examples with a gradient at b) + Gumbel_b,    over every row b of every table
  θ_b ← θ_b - η (g_b + N(0, (σ C / B)^2))    for chosen b;  others stay bit for bit

Guarantees:
- (ε, δ)-DP of the weights after every step, and of which rows moved, for the composition of the gradients'
  `GaussianDpEvent(sigma)` and a Gaussian event that bounds the trade-off curve of the m draws
  (`draws.gumbel_noise_multiplier`).
- Work and memory grow with the rows read and chosen, never with the tables.

Each draw costs the same whether it finds a popular row or not, so that m must stay small; AdaFEST's one vote for all
rows does not have that price, which is what the comparison shows.

Reference:
    H. Zhang, I. Mironov, M. Hejazinia, Wide Network Learning with Differential Privacy, 2021; the baseline of
    B. Ghazi et al., 2023.
"""

from __future__ import annotations

from typing import Any, Unpack, overload

import keras
import tensorflow as tf

from tfdp_rec.core.claim.events import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent
from tfdp_rec.core.mechanism.arguments import Numbers, Planned
from tfdp_rec.core.mechanism.base import Setting
from tfdp_rec.core.sensitivity.engine import ClippedSum
from tfdp_rec.sparse import draws
from tfdp_rec.sparse.fest import SelectingOptimizer
from tfdp_rec.sparse.preselection import Preselection


@keras.saving.register_keras_serializable(package="tfdp_rec")
class ExponentialSelectionSGD(SelectingOptimizer):
    """Private SGD on m rows a step, drawn by the exponential mechanism.

    Args:
        learning_rate: Learning rate: a number or a Keras schedule.
        num_survivors: Number m of rows that are chosen, over all tables together.
        selection_epsilon: Cost e0 of each of the m draws.
        **settings: Settings of `PrivateOptimizer` without momentum and weight decay, and `preselection`: the rows among
            which to choose, or None for all.

    Raises:
        ValueError: for values out of range, more survivors than rows, momentum or weight decay.

    Example:
        >>> optimizer = ExponentialSelectionSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=256,
        ...                                     num_survivors=100, selection_epsilon=0.1)
        >>> [round(event.noise_multiplier, 2) for event in optimizer.dp_event().events]
        [1.6, 1.1]
    """

    selection_epsilon = Setting()  # e0, what each draw costs

    @overload
    def __init__(
        self, learning_rate: Any, *, num_survivors: int, selection_epsilon: float,
        preselection: Preselection | None = ..., **settings: Unpack[Numbers],
    ) -> None: ...
    @overload
    def __init__(
        self, learning_rate: Any, *, num_survivors: int, selection_epsilon: float,
        preselection: Preselection | None = ..., **settings: Unpack[Planned],
    ) -> None: ...
    def __init__(self, learning_rate: Any, *, num_survivors: int, selection_epsilon: float, **settings: Any):
        if int(num_survivors) != num_survivors or num_survivors < 1:
            raise ValueError(f"num_survivors must be a positive integer, got {num_survivors!r}.")
        super().__init__(learning_rate, **settings)
        self._num_survivors, self.selection_epsilon = int(num_survivors), selection_epsilon

    @property
    def num_survivors(self) -> int:
        """m, the number of draws that a step makes and pays for; a compiled step would not see a change."""
        return self._num_survivors

    def dp_event(self) -> DpEvent:
        """Both looks at the batch: the draws and the gradients."""
        if self.noise_multiplier == 0:
            return NonPrivateDpEvent()
        selecting = draws.gumbel_noise_multiplier(self.selection_epsilon, self.num_survivors)
        return ComposedDpEvent(
            [GaussianDpEvent(selecting), GaussianDpEvent(self.noise_multiplier)]
        )

    def build_tables(self) -> None:
        super().build_tables()
        if self.tables and self.num_survivors > self.space.size:
            raise ValueError(f"num_survivors={self.num_survivors} is more than the tables' {self.space.size} rows.")

    def choose(self, clipped: ClippedSum) -> dict[str, tf.Tensor]:
        unclipped = float("inf")  # a draw's cost depends on the largest change of one count, which is 1
        votes = draws.contribution_counts(*self.find_touches(clipped), self.space.size, unclipped)
        epsilon = tf.constant(self.selection_epsilon, tf.float64)
        return self.space.rows(draws.top_survivors(votes, self.num_survivors, epsilon, self.bits))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_survivors": self.num_survivors}
