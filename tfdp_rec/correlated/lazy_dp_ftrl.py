"""Lazy DP-FTRL: correlated noise, drawn for a row only when the row is next read, and for all rows at release.

A row's buffers are part of what it owes: together with its weight and velocity they are brought up to date in one
draw, exact in their joint distribution (`maps.py`). So data in a fixed order (shuffled files, logs) train at the cost
of what their batches read, and one number more a weight for each buffer.

Guarantees:
- the released weights have the distribution that DPFTRL's have: the same event for the whole training;
- not against an observer of the training: between releases unread rows lack noise, and the buffers are in memory.

Reference:
    Lim et al., "LazyDP: Co-Designing Algorithm-Software for Scalable Training of Differentially Private
    Recommendation Models", ASPLOS 2024, for the lazy settling of independent noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, overload

import keras
import tensorflow as tf

from tfdp_rec.core.mechanism.arguments import Numbers, Planned
from tfdp_rec.core.mechanism.correlated_noise import Correlation
from tfdp_rec.core.mechanism.lazy_dp_sgd import LazyDPSGD
from tfdp_rec.core.mechanism.pending import Owed, Pending, Replayed
from tfdp_rec.core.mechanism.row_debts import RowDebts
from tfdp_rec.core.mechanism.rules import Recursion, Rows
from tfdp_rec.core.mechanism.tables import Operations, Table, recursion_of
from tfdp_rec.core.mechanism.weight_bound import WeightBound
from tfdp_rec.correlated.dp_ftrl import CorrelatedOptimizer
from tfdp_rec.correlated.maps import Correlated


class BoundOfPlan(WeightBound):
    """The bound of weights under correlated noise, which cancels over the steps, while rounding errors add up."""

    @property
    def room(self) -> float:
        return super().room * min(1.0, 4.0 / self.optimizer.correlation.steps**0.5)


class DebtsWithBuffers(RowDebts):
    """What rows owe of correlated noise: a settled row's buffers are those of the present step, too."""

    bound_kind = BoundOfPlan

    def make_pending(self, recursion: Recursion) -> Pending:
        kind = Correlated if self.optimizer.aggregate_noise else Replayed
        return kind(recursion, self.optimizer.correlation.strategy)

    def settle_rows(self, rows: Mapping[str, tf.Tensor], now: tf.Tensor, by_mark: Owed | None = None) -> None:
        with self.optimizer.course.whole():
            super().settle_rows(rows, now, by_mark)

    def read_rows(self, table: Table, ids: tf.Tensor) -> Rows:
        return (*super().read_rows(table, ids), *self.optimizer.course.buffers.read(table.path, ids))

    def write_rows(self, table: Table, ids: tf.Tensor, values: Rows) -> Operations:
        own, buffers = 1 + recursion_of(table).has_velocity, self.optimizer.course.buffers
        return buffers.write(table.path, values[own:], ids) + super().write_rows(table, ids, values[:own])


@keras.saving.register_keras_serializable(package="tfdp_rec")
class LazyDPFTRL(CorrelatedOptimizer, LazyDPSGD):
    """DP-FTRL whose step costs what its batch reads: same released model, same event, noise drawn when it falls due.

    Arguments as `LazyDPSGD`, and correlation: the plan of the noise, a `tfdp_rec.privacy.Correlation`.

    Example:
        >>> from tfdp_rec.privacy import optimised_correlation
        >>> plan = optimised_correlation(steps=600, separation=100)
        >>> settings = {"l2_norm_clip": 1.0, "noise_multiplier": 4.0, "expected_batch_size": 256}
        >>> LazyDPFTRL(0.1, correlation=plan, **settings).dp_event().event == plan.dp_event(4.0)
        True
    """

    @overload
    def __init__(
        self, learning_rate: Any, *, correlation: Correlation, aggregate_noise: bool = ..., **settings: Unpack[Numbers]
    ) -> None: ...
    @overload
    def __init__(
        self, learning_rate: Any, *, correlation: Correlation = ..., aggregate_noise: bool = ...,
        **settings: Unpack[Planned],
    ) -> None: ...
    def __init__(self, learning_rate: Any, **settings: Any):
        super().__init__(learning_rate, **settings)

    debts_kind = DebtsWithBuffers
