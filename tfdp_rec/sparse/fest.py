"""FEST, which updates only rows that were chosen once, before training; and what mechanisms that choose rows share.

  θ_i ← θ_i - η (g_i + n_i),  n_i ~ N(0, s^2 I),  s = σ C / B,  for chosen rows i only; others stay bit for bit

A chosen row that no example read has gradient 0 and gets its noise all the same. Dropping the other rows of the clipped
sum is a projection that the data decide only through the choice, which is private by itself, so the sum's sensitivity
stays C. Rows that all examples of a batch share (public negatives) are public and need no choosing: they are always
among the chosen.

Momentum and weight decay would move rows that were not chosen, at every step, so they are refused; the dense variables
may have both, through `dense_optimizer`.

Guarantees of FEST:
- (ε, δ)-DP of the weights after every step, for `GaussianDpEvent(sigma)` a step and, once, the event of the choice
  (`events_before_training`).
- Which rows move does not depend on the batch: work grows with the chosen rows, whichever are read.

Reference:
    B. Ghazi et al., Sparsity-Preserving Differentially Private Training of Large Embedding Models, NeurIPS 2023.
"""

from __future__ import annotations

import abc
from typing import Any, Unpack, overload

import keras
import tensorflow as tf

from tfdp_rec.core.claim.entries import Use
from tfdp_rec.core.ground.branches import choose
from tfdp_rec.core.ground.keras_internals import resource
from tfdp_rec.core.mechanism import checks
from tfdp_rec.core.mechanism.arguments import Numbers, Planned
from tfdp_rec.core.mechanism.base import PrivateOptimizer, Step
from tfdp_rec.core.sensitivity.engine import ClippedSum
from tfdp_rec.sparse.draws import BucketSpace
from tfdp_rec.sparse.preselection import Preselection


class SelectingOptimizer(PrivateOptimizer, abc.ABC):
    """Base of the mechanisms that choose rows. Not for use by itself."""

    def __init__(self, learning_rate: Any, *, preselection: Preselection | None = None, **settings: Any):
        for option in ("momentum", "nesterov", "weight_decay"):
            if settings.get(option):
                raise ValueError(
                    f"{type(self).__name__} does not take {option}={settings[option]!r}: it would move rows that were "
                    "not chosen; give the dense variables a dense_optimizer that has it."
                )
        super().__init__(learning_rate, **settings)
        preselection = checks.deserialize(preselection)
        if preselection is not None and not isinstance(preselection, Preselection):
            raise TypeError(f"preselection must be a Preselection or None, got {preselection!r}.")
        self._preselection = preselection
        self._updated_values = self.add_variable((), dtype="int64", name="updated_values")

    @property
    def preselection(self) -> Preselection | None:
        """The rows that may be chosen at all, and what finding them cost."""
        return self._preselection

    @property
    def updated_values(self) -> int:
        """Number of table values that all steps so far have updated; as public as the choices are."""
        return int(self._updated_values.numpy())

    def events_before_training(self) -> list[Use]:
        """Uses of the data before the first step."""
        if self.preselection is None or self.preselection.noise_multiplier is None:
            return []
        return [self.preselection.use]

    def build_tables(self) -> None:
        sizes = {path: table.rows for path, table in self.tables.items()}
        self.space = BucketSpace(sizes, None if self.preselection is None else self.preselection.rows)

    @abc.abstractmethod
    def choose(self, clipped: ClippedSum) -> dict[str, tf.Tensor]:
        """Table path -> the rows that this step updates, ascending and distinct, shared rows apart."""

    def step_tables(self, step: Step) -> None:
        if not self.tables:
            return
        clipped = step.clipped
        chosen = {path: self._add_shared_rows(path, ids, clipped) for path, ids in self.choose(clipped).items()}
        moves = [(table, chosen[path], sum_at(step.move(table), chosen[path])) for path, table in self.tables.items()]
        for (table, ids, _), (noisy, _) in zip(moves, self.noisy_moves(step, moves), strict=True):
            table.step(ids, noisy, step.learning_rate)
            resource(self._updated_values).assign_add(tf.size(ids, tf.int64) * table.width)

    def _add_shared_rows(self, path: str, ids: tf.Tensor, clipped: ClippedSum) -> tf.Tensor:
        if path not in clipped.reads:
            return ids
        shared = clipped.reads[path].shared
        inside = tf.boolean_mask(shared, self.space.numbers(path, shared) >= 0)
        return choose(tf.size(inside) > 0, lambda: tf.sort(tf.unique(tf.concat([ids, inside], 0))[0]), lambda: ids)

    def find_touches(self, clipped: ClippedSum) -> tuple[tf.Tensor, tf.Tensor]:
        """(examples, buckets): which example read which bucket, over all tables; -1 for none."""
        examples, buckets = [tf.zeros([0], tf.int64)], [tf.zeros([0], tf.int64)]
        for path in self.tables:
            if path in clipped.reads:
                reads = clipped.reads[path]
                examples.append(reads.example)
                buckets.append(self.space.numbers(path, reads.ids))
            elif path in clipped.gradients:
                raise ValueError(
                    f"The clipped sum does not say which examples read '{path}', so no row can be chosen."
                )
        return tf.concat(examples, axis=0), tf.concat(buckets, axis=0)

    def bits(self, stream: int, numbers: tf.Tensor) -> tf.Tensor:
        """Random bits of this step, for the functions of `draws`."""
        return self.noise.bits(stream, numbers, self.step_number)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "preselection": checks.serialize(self.preselection)}


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

    @overload
    def __init__(self, learning_rate: Any, *, preselection: Preselection, **settings: Unpack[Numbers]) -> None: ...
    @overload
    def __init__(self, learning_rate: Any, *, preselection: Preselection, **settings: Unpack[Planned]) -> None: ...
    def __init__(self, learning_rate: Any, *, preselection: Preselection, **settings: Any):
        if preselection is None:
            raise ValueError("FEST needs the rows it is confined to: preselection=Preselection(...).")
        super().__init__(learning_rate, preselection=preselection, **settings)

    def choose(self, clipped: ClippedSum) -> dict[str, tf.Tensor]:
        return {path: self.space.all_rows(path) for path in self.tables}


def sum_at(slices: tf.IndexedSlices, ids: tf.Tensor) -> tf.Tensor:
    """`[n, width]`: the sum of the slices of each of the ascending, distinct ids; zero for an id without any."""
    indices = tf.cast(slices.indices, tf.int64)
    place = tf.searchsorted(ids, indices)  # len(ids) for what lies beyond them all, hence the -1 that no id equals
    wanted = tf.where(tf.gather(tf.concat([ids, [-1]], axis=0), place) == indices)[:, 0]
    return tf.math.unsorted_segment_sum(tf.gather(slices.values, wanted), tf.gather(place, wanted), tf.size(ids))
