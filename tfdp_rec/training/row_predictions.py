"""A model's predictions of rows, each of which is read to depend on its own row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfdp_rec.core.sensitivity.step_reading import StepReading


class RowPredictions:
    """Predictions of the rows of some features, by models as they are released."""

    def __init__(self, features: Any):
        self._features = features

    def _rows(self) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(self._features).batch(1024)

    def trace(self, model: Any) -> Any:
        """The function of predictions; refused if one of them may depend on other rows."""

        # Not by way of `predict`: what is read is what is run.
        @tf.function(autograph=False)
        def predict(inputs: Any) -> tf.Tensor:
            reading = StepReading(model, inputs, ())
            found = model(inputs, training=False)
            reading.read_rows(found, "a prediction")
            return found

        return predict.get_concrete_function(self._rows().element_spec)

    def of(self, model: Any) -> NDArray[np.float64]:
        """The predictions, by a model whose noise is settled first."""
        model.settle()
        by_row = self.trace(model)
        return np.concatenate([by_row(batch).numpy() for batch in self._rows()]).astype(np.float64)
