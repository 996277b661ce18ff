"""Exposure of planted canaries, epoch by epoch.

- Pending noise is settled before a loss is computed: what is measured is the model that would be released.
- Every canary and every reference is scored with the same public inputs (negatives), so that losses compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.audit import Canaries, exposure_extrapolation, exposure_interpolation
from tfdp_rec.core.ground.refused import refuse_below


def per_example_losses(
    model: keras.Model,
    features: Mapping[str, np.ndarray],
    shared: Mapping[str, np.ndarray] | None = None,
    batch_size: int = 1024,
) -> np.ndarray:
    """Each example's loss, float64 `[n]`, from the weights as released."""
    if hasattr(model, "settle"):
        model.settle()
    common = {name: tf.convert_to_tensor(values) for name, values in (shared or {}).items()}
    loss = tf.function(lambda batch: model.per_example_loss({**batch, **common}, training=False), autograph=False)
    data = tf.data.Dataset.from_tensor_slices(dict(features)).batch(batch_size)
    signature = {name: tf.TensorSpec([None, *v.shape[1:]], v.dtype) for name, v in data.element_spec.items()}
    compiled = loss.get_concrete_function(signature)
    return np.concatenate([compiled(batch).numpy() for batch in data]).astype(np.float64)


class Exposure(keras.callbacks.Callback):
    """Measures exposure at the end of epochs; adds the medians to the logs as `exposure_<repeats>`.

    `history` keeps, for each measurement, the epoch and the exposures of all canaries by repeat count.

    Args:
        canaries: Canaries planted in the training data by `Canaries.insert`.
        shared: Inputs all examples share, such as `{"negatives": ...}`; the same at every measurement.
        every: Number of epochs between measurements; the last epoch of a fit is always measured.
        extrapolate: Whether to measure by the fitted skew-normal rather than by rank.
        batch_size: Number of examples at a time.

    Raises:
        TypeError: `canaries` is not a `Canaries`; in `fit`, the model has no `per_example_loss`.
        ValueError: `every` is below 1.

    Reference:
        Carlini et al., The Secret Sharer, USENIX Security 2019.

    Example:
        >>> from tfdp_rec.audit import Canaries, Uniform
        >>> catalogue = {"context": Uniform(100, shape=(5,), low=1), "label": Uniform(100, low=1)}
        >>> canaries = Canaries.draw(catalogue, repeats=(1, 10), per_repeat=5, num_references=64)
        >>> callback = Exposure(canaries, shared={"negatives": np.arange(1, 100)}, every=5)
    """

    def __init__(
        self, canaries: Canaries, shared: Mapping[str, np.ndarray] | None = None, every: int = 1,
        extrapolate: bool = False, batch_size: int = 1024,
    ):
        super().__init__()
        if not isinstance(canaries, Canaries):
            raise TypeError(f"canaries must be a tfdp_rec.audit.Canaries, got {canaries!r}.")
        refuse_below(1, every=every)
        self.canaries, self.shared, self.every = canaries, dict(shared or {}), every
        self.extrapolate, self.batch_size = extrapolate, batch_size
        self.history: list[tuple[int, dict[int, np.ndarray]]] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not hasattr(self.model, "per_example_loss"):
            raise TypeError("Exposure needs a model with per_example_loss, such as tfdp_rec.PrivateModel.")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        last = epoch + 1 == (self.params or {}).get("epochs")
        if (epoch + 1) % self.every and not last:
            return
        exposures = self.measure()
        self.history.append((epoch, exposures))
        if logs is not None:
            logs.update({f"exposure_{count}": float(np.median(values)) for count, values in exposures.items()})

    def measure(self, model: keras.Model | None = None) -> dict[int, np.ndarray]:
        """Exposures by repeat count of the model that is being fitted, or of another."""
        model = model or self.model
        losses, references = (
            per_example_losses(model, features, self.shared, self.batch_size)
            for features in (self.canaries.features, self.canaries.references)
        )
        expose = exposure_extrapolation if self.extrapolate else exposure_interpolation
        return expose(self.canaries.by_repeats(losses), references)
