"""A model's own `per_example_loss`, in the places where Keras computes a compiled loss from predictions.

    loss = mean over the examples of per_example_loss(batch)

Mechanisms and ordinary optimizers train this loss, and `evaluate` and validation show it. If a model overrides
`compute_loss` as well, evaluation and ordinary optimizers use that. If it overrides `compute_loss` alone, mechanisms
train the losses that it averages, which are read from its graph (`core/sensitivity/independence/loss_terms.py`).

Compiled metrics compare the batch's targets with the result of the model's call within the loss. If the loss makes no
call (a retrieval model predicts ids, and learns by scores), they are shown in evaluation alone, which calls the model.
A model's own metrics are updated by its loss.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import loss_tracker, metrics_container
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.batches import batch_size, hide_batch_axis, map_examples
from tfdp_rec.core.sensitivity.independence import find_terms
from tfdp_rec.core.sensitivity.recorder import refuse_added_losses
from tfdp_rec.core.sensitivity.step_reading import StepReading
from tfdp_rec.training.batch import Batch, parts_of

_LIBRARIES = ("keras", "tensorflow_recommenders")
_DEFAULT = "tfdp_rec.training.model"  # module of `PrivateTraining`


def find_own_losses(model: Any) -> list[str]:
    """The methods by which a model gives its loss itself: `per_example_loss`, `compute_loss`, both or none."""
    return [name for name in ("per_example_loss", "compute_loss") if is_own(model, name)]


def read_averaged_losses(model: Any, data: Any, training: bool) -> tf.Tensor:
    """The losses `[batch]` whose sum or mean a `compute_loss` returns, read from its graph; eagerly, one by one."""
    if tf.executing_eagerly():
        number = int(batch_size(data, model.shared_inputs))
        return tf.stack([_alone(model, data, n, training) for n in range(number)]) if number else tf.zeros([0])
    data = hide_batch_axis(data, model.shared_inputs)
    reading = StepReading(model, data, model.shared_inputs)
    loss = tf.convert_to_tensor(_compute_loss(model, data, training))
    return find_terms(reading.walk_to(loss), loss)


def _alone(model: Any, data: Any, number: int, training: bool) -> tf.Tensor:
    # A sum or mean over one example is its loss.
    one = map_examples(lambda t: t[number : number + 1], data, model.shared_inputs)
    return tf.convert_to_tensor(_compute_loss(model, one, training))


def _compute_loss(model: Any, data: Any, training: bool) -> Any:
    # TFRS gives `compute_loss` the batch, Keras its parts. In new containers: TFRS' guides pop the labels out of them.
    data = tf.nest.map_structure(lambda leaf: leaf, data)
    inputs = inspect.signature(model.compute_loss).parameters
    if "y_pred" not in inputs:
        return model.compute_loss(data, training=training)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = model(x, training=training)
    options = {"training": training} if "training" in inputs or "kwargs" in inputs else {}
    return model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **options)


def refuse_unsaid_loss(model: Any) -> None:
    """Refuses a TFRS model without a loss of its own, which `compile` cannot give it."""
    kind = type(model)
    if not find_own_losses(model) and kind.compute_loss is not keras.Model.compute_loss:
        raise NotPrivate(
            f"{kind.__name__} has no loss: define per_example_loss(self, data, training=True), which returns each "
            "example's, of shape [batch]."
        )


def refuse_no_loss(model: Any, x: Any = None) -> None:
    """Refuses a model without a loss, its own or from `compile`; if it adds one when it is called, by that."""
    if model._loss is not None:
        return
    if x is not None and _has_call(model):
        with contextlib.suppress(Exception):  # whatever else is wrong with the call comes second
            model(x, training=True)
        refuse_added_losses(model)
    raise ValueError(
        f"{type(model).__name__} has no loss: give compile(loss=...), or define per_example_loss(self, data, "
        "training=True), which returns each example's, of shape [batch]."
    )


def refuse_nothing_to_train(model: Any) -> None:
    """Refuses a model whose weights are all frozen, or that has none."""
    if not model.trainable_variables:
        had = f"{len(model.weights)} weights, all of them frozen" if model.weights else "no weights"
        raise ValueError(
            f"{type(model).__name__} has nothing to train: it has {had} (trainable=False). Leave a layer trainable; a "
            "model that is only to predict needs no training, private or other."
        )


def is_own(model: Any, method: str) -> bool:
    """Whether a model's class has a method that is neither a library's nor that of `PrivateTraining`."""
    module = getattr(getattr(type(model), method), "__module__", None) or ""
    return module != _DEFAULT and module.split(".")[0] not in _LIBRARIES


# Steps.


def evaluation_step(model: Any, examples: Any) -> dict[str, Any]:
    """A step of `evaluate`."""
    losses = model.private_step.losses(Batch(examples), training=False)
    found = model.private_step.take_predictions()
    if found is None and metrics_container(model) is not None and _has_call(model):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(parts_of(examples))
        found = x, y, None if y is None else model(x, training=False), sample_weight
    return logs_of(model, *mean_of(losses), found)


def ordinary_step(model: Any, examples: Any) -> dict[str, Any]:
    """A step of an ordinary optimizer, on the mean loss and the regularization."""
    # Keras sums the gradients of replicas, so that each contributes its share.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    with tf.GradientTape() as tape:
        losses = model.private_step.losses(Batch(examples))
        total = (mean_of(losses)[0] + sum(tf.cast(one, losses.dtype) for one in model.losses)) / replicas
        total = model.optimizer.scale_loss(total)
    weights = model.trainable_weights
    model.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights))
    return logs_of(model, *mean_of(losses), model.private_step.take_predictions())


def mean_of(losses: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The mean loss, 0 for no examples, and the number of examples."""
    number = tf.cast(tf.size(losses), losses.dtype)
    return tf.math.divide_no_nan(tf.reduce_sum(losses), number), number


# Logs.


def logs_of(model: Any, loss: tf.Tensor, number: tf.Tensor, found: Any, at_once: bool = True) -> dict[str, Any]:
    """Loss and metrics of the epoch so far, with this step's mean loss and (x, y, y_pred, sample_weight)."""
    loss_tracker(model).update_state(loss, sample_weight=tf.cast(number, tf.float32))
    if at_once and metrics_container(model) is not None:
        _refuse_nothing_to_compare(model, found)
    if found is None:  # the loss called no model, or part by part: compiled metrics have nothing to compare
        seen = {metric.name for metric in getattr(metrics_container(model), "metrics", ())}
        return {name: value for name, value in model.get_metrics_result().items() if name not in seen}
    x, y, y_pred, sample_weight = found
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _refuse_nothing_to_compare(model: Any, found: Any) -> None:
    kind = type(model).__name__
    if found is None and not _has_call(model):
        raise ValueError(
            f"compile(metrics=...) compares targets with predictions, and {kind} predicts nothing: define call(self, "
            "inputs); or leave metrics out, and update metrics of the model's own in per_example_loss."
        )
    if found is not None and found[1] is None:
        raise ValueError(
            f"compile(metrics=...) compares predictions with targets, and the batches have none: give {kind} data as "
            "(x, y); or leave metrics out, and update metrics of the model's own in per_example_loss."
        )


def refuse_no_call(model: Any) -> None:
    """Refuses to call a model without a `call`, which may be trained all the same."""
    kind = type(model)
    if not _has_call(model):
        raise NotImplementedError(
            f"{kind.__name__} predicts nothing: define call(self, inputs) for calling it, predict and export; "
            "training and evaluate use per_example_loss alone."
        )


def _has_call(model: Any) -> bool:
    return type(model).call is not keras.Model.call
