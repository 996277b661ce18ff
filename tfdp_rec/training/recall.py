"""recall@k of a model that predicts the k best items, as a metric of `compile`.

    recall@k = |relevant ∩ {r_1 … r_k}| / |relevant|,  the mean over users with at least one relevant item

It is computed from users' data without noise, and no ε covers it: use it in `evaluate`, for users who agreed.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="tfdp_rec")
class RecallAtK(keras.metrics.Mean):
    """The share of a user's relevant items that are among the first k recommended ones.

    Targets are distinct ids `[batch]` or `[batch, m]`; predictions are ids `[batch, K]`, best first, as
    `CandidateScores.top_k` gives them. `evaluate` and validation show it; a training step predicts nothing.

    Args:
        k: Number of predictions that count; by default all.
        padding: Id that stands for no item in targets, such as 0 or ""; None if there is none.
        name: Name of the metric; by default "recall", or "recall_at_10" for k = 10.
        dtype: Data type of the metric.

    Raises:
        ValueError: k is not positive.

    Example:
        >>> recall = RecallAtK(k=2, padding=0)
        >>> recall.update_state([[7, 3], [5, 0]], [[3, 1, 7], [5, 2, 6]])  # of 7 and 3, one of two; of 5, one of one
        >>> float(recall.result())
        0.75
    """

    def __init__(self, k: int | None = None, padding: Any = None, name: str | None = None, dtype: Any = None):
        if k is not None and k < 1:
            raise ValueError(f"k must be positive, got {k!r}.")
        super().__init__(name or ("recall" if k is None else f"recall_at_{k}"), dtype)
        self.k, self.padding = k, padding

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        recommended = tf.convert_to_tensor(y_pred)
        relevant = tf.convert_to_tensor(y_true)
        relevant = relevant if relevant.dtype == recommended.dtype else tf.cast(relevant, recommended.dtype)
        relevant = tf.reshape(relevant, [tf.shape(recommended)[0], -1])
        there = tf.ones_like(relevant, tf.bool) if self.padding is None else relevant != self.padding
        found = tf.reduce_any(relevant[:, :, None] == recommended[:, None, : self.k], axis=2) & there
        hits, most = (tf.reduce_sum(tf.cast(each, tf.float32), axis=1) for each in (found, there))
        weight = tf.cast(most > 0, tf.float32)
        if sample_weight is not None:
            weight *= tf.reshape(tf.cast(sample_weight, tf.float32), [-1])
        return super().update_state(tf.math.divide_no_nan(hits, most), sample_weight=weight)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "k": self.k, "padding": self.padding}
