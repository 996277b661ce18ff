"""Predictions of which each depends on its own row alone: they are read as they are traced, like a private loss."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp_rec.core.sensitivity.step_reading import StepReading


def predictions_by_row(model: Any, spec: Any) -> Any:
    """A traced function from inputs to the model's predictions; refused if one may depend on other rows or batches."""

    # Not by way of `predict`: what is read is what is run.
    @tf.function(autograph=False)
    def predict(inputs: Any) -> tf.Tensor:
        reading = StepReading(model, inputs, ())
        found = model(inputs, training=False)
        reading.read_rows(found, "a prediction")
        return found

    return predict.get_concrete_function(spec)
