"""Refusal of overridden steps that keep private numbers, and of predictions that depend on metrics.

The loss is read by `core/sensitivity`. A model may also override `test_step`, `predict_step` or `compute_metrics`, or
predict from one of its metrics, and so release numbers that were computed from the batch without clipping and noise.
When a step is traced, all its writes are read; when predictions are traced, all their inputs, too. What runs eagerly is
traced once to be read. A `train_step` of a model's own is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import (
    handles_of,
    loss_tracker,
    metrics_container,
    metrics_variables,
    random_states,
    resource_key,
)
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.data_flow import refuse_metrics_read, refuse_writes
from tfdp_rec.training.own_loss import is_own


def read_step(model: Any, name: str, step: Callable[..., Any], data: Any) -> Any:
    """The results of a model's `train_step`, `test_step` or `predict_step`; of a private model, its writes are read."""
    if not model.is_private:
        return step(model, data)
    if tf.executing_eagerly():
        if name == "train_step":  # whose loss is read in a graph
            _refuse_unread(model)
        else:
            _read_in_graph(model, name, data, lambda data: read_step(model, name, step, data))
        return step(model, data)
    if name != "predict_step":
        refuse_hidden_metrics(model)
    graph: Any = tf.compat.v1.get_default_graph()
    start = len(graph.get_operations())
    # In new containers where it evaluates, as in training: TFRS' guides pop the labels out of them.
    results = step(model, data if name == "train_step" else tf.nest.map_structure(lambda leaf: leaf, data))
    may = handles_of(model.metrics_variables)
    drawing = model.private_step.microbatch_size is not None and not is_own(model, "get_metrics_result")
    if name == "train_step" and drawing:
        # How often parts have drawn tells the batch's size, until the last of them ends: then the seeds are replaced.
        may += handles_of(random_states(model))
    refuse_writes(f"The model's {name}", graph, start, _tensors(data), may, _names_of(model))
    return results


def refuse_own_step(model: Any, base: type) -> None:
    """Refuses a model whose training step is not that of the base class of private models."""
    # Nothing reads what stands around a step. By identity: a wrapped method has the name of what it wraps.
    kind, given = type(model), vars(model)
    ours = {name: getattr(base, name) for name in ("train_step", "make_train_function")}
    for name, own in {**ours, "train_function": given.get("_own_function")}.items():
        found = given.get(name, getattr(kind, name, None))
        if found is not None and found is not own:
            raise NotPrivate(
                f"{kind.__name__} has a {name} of its own{line_of(found)}, which could mix the examples of a batch "
                "or let them decide whether a step is made. Leave it out: the loss belongs into per_example_loss, "
                "figures into compute_metrics, changes of rows into sampling.batches(fetch, map=function)."
            )


def refuse_hidden_metrics(model: Any) -> None:
    """Refuses a model whose `metrics` leave out Keras' own."""
    # Only what is among a model's metrics may hold numbers of the batch: those are reset, never saved, and followed.
    shown = type(model).metrics
    if getattr(shown, "fget", None) is keras.Model.metrics.fget:
        return
    own = (loss_tracker(model), metrics_container(model))
    if any(one is not None and not any(one is each for each in model.metrics) for one in own):
        raise NotPrivate(
            f"{type(model).__name__} overrides metrics{line_of(getattr(shown, 'fget', None))}, and hides Keras' own: "
            "its mean of the loss, and what compile was given. A private step writes to them, and they would not be "
            "reset. Leave the property out, since Keras finds metrics that are attributes of the model; or return "
            "super().metrics, which has them all."
        )


def line_of(function: Any) -> str:
    """The file and line of a function of the user's, in words; "" if they are not known."""
    code = getattr(getattr(function, "__func__", function), "__code__", None) if callable(function) else None
    return f" in {code.co_filename}:{code.co_firstlineno}" if code else ""


def _refuse_unread(model: Any) -> None:
    if is_own(model, "compute_metrics"):
        raise NotPrivate(
            f"{type(model).__name__} overrides compute_metrics, whose writes can be read in a graph alone: leave "
            "run_eagerly=True out."
        )


def _read_in_graph(model: Any, name: str, given: Any, function: Callable[..., Any]) -> None:
    # What runs eagerly has no graph: one trace is read, once for a form of the data and the metrics that there are.
    metrics = frozenset(resource_key(handle) for handle in handles_of(metrics_variables(model)))
    given = tf.nest.map_structure(_as_tensor, given)
    forms = tf.nest.map_structure(lambda leaf: (leaf.dtype, leaf.shape.rank) if tf.is_tensor(leaf) else leaf, given)
    known = vars(model).setdefault("read_in_graph", set())
    if (key := (name, str(forms), metrics)) not in known:
        tf.function(function, autograph=False).get_concrete_function(given)
        known.add(key)


def _names_of(model: Any) -> dict[Any, str]:
    return {resource_key(handle): v.path for v in model.variables for handle in handles_of([v])}


def predictions_read(model: Any, call: Any, args: Any, kwargs: Any) -> Any:
    """`call(*args, **kwargs)` outside a step, refused if it reads the model's metrics, or keeps what it is given."""
    if any(isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten((args, kwargs))):
        return call(*args, **kwargs)  # a model around this one is only being made
    if tf.executing_eagerly():
        _read_in_graph(model, "call", (args, kwargs), lambda given: predictions_read(model, call, *given))
        return call(*args, **kwargs)
    metrics, graph = handles_of(metrics_variables(model)), tf.compat.v1.get_default_graph()
    start = len(graph.get_operations())
    outputs = call(*args, **kwargs)
    refuse_writes("The model's call", graph, start, _tensors((args, kwargs)), metrics, _names_of(model))
    refuse_metrics_read(graph, start, _tensors(outputs), metrics)
    return outputs


def _as_tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if hasattr(leaf, "shape") else leaf


def _tensors(nest: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if tf.is_tensor(leaf)]
