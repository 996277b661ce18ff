"""A model's own `per_example_loss`, wherever Keras would compute a compiled loss from predictions.

    loss = mean over the examples of per_example_loss(batch)

It is what `evaluate` and validation show, and what an ordinary optimizer trains, as it is what a mechanism trains.
A model that overrides `compute_loss` besides is evaluated, and trained by ordinary optimizers, by that. One that
overrides `compute_loss` alone is trained privately by the losses that it averages, as its graph tells
(`independence/loss_terms.py`).

Metrics come from two places. Those given to `compile` compare the batch's targets with what the model's call gave while
the loss was computed. A loss that does without a call (a retrieval model predicts ids, and learns by scores) has them
in evaluation alone, which calls the model for them. Those that a model holds itself, it updates itself, in its loss.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping.batches import batch_size, hide_batch_axis, map_examples
from tfdp_rec.clipping.step_reading import StepReading
from tfdp_rec.independence import by_example
from tfdp_rec.keras_internals import compiled_metrics, loss_tracker
from tfdp_rec.refused import NotPrivate
from tfdp_rec.training.batch import Batch, parts_of

_LIBRARIES = ("keras", "tensorflow_recommenders")
_DEFAULT = "tfdp_rec.training.model"  # whose per_example_loss is that of a compiled loss


def has_own_loss_alone(model: Any) -> bool:
    """Whether a model has a `per_example_loss` of its own, and no `compute_loss` beside it."""
    return is_own(model, "per_example_loss") and not is_own(model, "compute_loss")


def averages_its_loss(model: Any) -> bool:
    """Whether what is known of a model's loss is a `compute_loss` of its own."""
    return is_own(model, "compute_loss") and not is_own(model, "per_example_loss")


def averaged_losses(model: Any, data: Any, training: bool) -> tf.Tensor:
    """The losses `[batch]` whose sum or mean a `compute_loss` is, read off its graph; eagerly, one after the other."""
    if tf.executing_eagerly():
        number = int(batch_size(data, model.shared_inputs))
        return tf.stack([_alone(model, data, n, training) for n in range(number)]) if number else tf.zeros([0])
    data = hide_batch_axis(data, model.shared_inputs)
    reading = StepReading(model, data, model.shared_inputs)
    loss = tf.convert_to_tensor(_computed(model, data, training))
    return by_example(reading.walk_to(loss), loss)


def _alone(model: Any, data: Any, number: int, training: bool) -> tf.Tensor:
    """One example's loss: of a sum or a mean, that of a batch of it alone."""
    one = map_examples(lambda t: t[number : number + 1], data, model.shared_inputs)
    return tf.convert_to_tensor(_computed(model, one, training))


def _computed(model: Any, data: Any, training: bool) -> Any:
    """As Keras calls `compute_loss`, or as TFRS does."""
    inputs = inspect.signature(model.compute_loss).parameters
    if "y_pred" not in inputs:
        return model.compute_loss(data, training=training)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = model(x, training=training)
    told = {"training": training} if "training" in inputs or "kwargs" in inputs else {}
    return model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **told)


def refuse_unsaid_loss(model: Any) -> None:
    """A TFRS model without any loss of its own cannot have one from `compile`."""
    kind = type(model)
    own = is_own(model, "per_example_loss") or is_own(model, "compute_loss")
    if not own and kind.compute_loss is not keras.Model.compute_loss:
        raise NotPrivate(
            f"{kind.__name__} says nothing of its loss: def per_example_loss(self, data, training=True) gives each "
            "example's, of shape [batch]."
        )


def refuse_no_loss(model: Any) -> None:
    """Without a loss of its own, a model has one from `compile`."""
    if model._loss is None:
        raise ValueError(f"{type(model).__name__} needs compile(loss=...) or a per_example_loss(data, training).")


def is_own(model: Any, method: str) -> bool:
    """Whether a model's class has a method that is neither a library's nor the default."""
    module = getattr(getattr(type(model), method), "__module__", None) or ""
    return module != _DEFAULT and module.split(".")[0] not in _LIBRARIES


# Steps.


def evaluation_step(model: Any, examples: Any) -> dict[str, Any]:
    """A step of `evaluate`."""
    losses = model.private_step.losses(Batch(examples), training=False)
    found = model.private_step.take_predictions()
    if found is None and compiled_metrics(model) is not None and _has_call(model):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(parts_of(examples))
        found = x, y, None if y is None else model(x, training=False), sample_weight
    return logs_of(model, losses, found)


def ordinary_step(model: Any, examples: Any) -> dict[str, Any]:
    """A step of an ordinary optimizer: the mean loss and what regularises the weights, neither clipped nor noised."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    with tf.GradientTape() as tape:
        losses = model.private_step.losses(Batch(examples))
        total = (mean_of(losses) + sum(tf.cast(one, losses.dtype) for one in model.losses)) / replicas
        total = model.optimizer.scale_loss(total)
    weights = model.trainable_weights
    model.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights))
    return logs_of(model, losses, model.private_step.take_predictions())


def mean_of(losses: tf.Tensor) -> tf.Tensor:
    """The mean; of no examples, zero."""
    return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.cast(tf.size(losses), losses.dtype))


# What is shown.


def logs_of(model: Any, losses: tf.Tensor, found: Any, whole: bool = True) -> dict[str, Any]:
    """Loss and metrics so far, this step's included."""
    loss_tracker(model).update_state(mean_of(losses), sample_weight=tf.cast(tf.size(losses), tf.float32))
    if whole and compiled_metrics(model) is not None:
        _refuse_nothing_to_compare(model, found)
    if found is None:
        seen = {metric.name for metric in getattr(compiled_metrics(model), "metrics", ())}
        return {name: value for name, value in model.get_metrics_result().items() if name not in seen}
    x, y, y_pred, sample_weight = found
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _refuse_nothing_to_compare(model: Any, found: Any) -> None:
    kind = type(model).__name__
    if found is None and not _has_call(model):
        raise ValueError(
            f"compile(metrics=...) compares targets with what {kind} predicts, and it predicts nothing: def call(self, "
            "inputs) says what; or leave metrics out, and update some of the model's own in per_example_loss."
        )
    if found is not None and found[1] is None:
        raise ValueError(
            f"compile(metrics=...) compares predictions with targets, and the batches have none: give {kind} data as "
            "(x, y); or leave metrics out, and update some of the model's own in per_example_loss."
        )


def refuse_no_call(model: Any) -> None:
    """A model may train without predicting anything; asked for predictions, it says what they take."""
    kind = type(model)
    if not _has_call(model):
        raise NotImplementedError(
            f"{kind.__name__} predicts nothing yet: def call(self, inputs) says what, for calling it, predict and "
            "export; training and evaluate go by per_example_loss alone."
        )


def _has_call(model: Any) -> bool:
    return type(model).call is not keras.Model.call
