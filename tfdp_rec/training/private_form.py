"""A private model on the layers of a plain one, which trains the same weights."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import compile_arguments, functional_class, hand_strategy
from tfdp_rec.training.arrays import has_text
from tfdp_rec.training.model import PrivateModel, PrivateTraining
from tfdp_rec.training.ordinary_steps import note_uncounted_steps, uncounted_steps, watch
from tfdp_rec.training.private_step import OPTIONS

OF_COMPILE = ("loss", "loss_weights", "metrics", "weighted_metrics")
PLAIN = (keras.Sequential, functional_class())
"""Classes of models that are all that their layers are."""

# A model that is made private again gives the same private model, with the history of the weights that they share.
_MADE: weakref.WeakKeyDictionary[keras.Model, Any] = weakref.WeakKeyDictionary()


def private_form(model: Any, data: Any) -> Any:
    """The model itself if it trains privately, or one on the same layers; its earlier steps are in the history."""
    if isinstance(model, PrivateTraining):
        return model
    if type(model) not in PLAIN:
        raise TypeError(
            f"{type(model).__name__} is a class of its own: put tfdp_rec.PrivateTraining first among its bases, "
            f"{add_mixin(type(model))}, and call make_private again."
        )
    if model not in _MADE or _own_layers(model) != _own_layers(_MADE[model]):  # a Sequential model may have changed
        watched = model in _MADE
        _MADE[model] = make_private_model(model, data)
        hand_strategy(model, _MADE[model])
        if not watched:
            watch(model)  # its own optimizer would train the same weights without privacy
    note_uncounted_steps(_MADE[model], uncounted_steps(model, model.optimizer if model.compiled else None))
    return _MADE[model]


def add_mixin(kind: type) -> str:
    """The line that a class begins with once the mix-in of private training is its first base."""
    libraries = {"keras": "keras.", "tensorflow_recommenders": "tfrs."}
    bases = [libraries.get(base.__module__.split(".")[0], "") + base.__name__ for base in kind.__bases__]
    return f"class {kind.__name__}(tfdp_rec.PrivateTraining, {', '.join(bases)})"


def input_names(model: Any) -> list[str] | None:
    """Names of the inputs of a model that is made of layers; None of others."""
    functional: Any = functional_class()
    return [each.name for each in model.inputs] if isinstance(model, functional) else None


def _own_layers(model: keras.Model) -> list[int]:
    return [id(layer) for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]


def make_private_model(model: Any, data: Any) -> PrivateModel:
    """A model on the layers of a plain one."""
    if type(model) is keras.Sequential:
        first = tf.nest.flatten(data)[0]
        # Its own input is float32 by default, which does not distinguish ids above 2^24.
        dtype = "string" if has_text(first) else keras.backend.standardize_dtype(first.dtype)
        outputs = inputs = keras.Input(first.shape[1:], dtype=dtype)
        for layer in model.layers:
            outputs = layer(outputs)
        return PrivateModel(inputs, outputs, name=model.name)
    return PrivateModel(model.input, model.output, name=model.name)


def compile_options(model: keras.Model) -> dict[str, Any]:
    """The loss and metrics that a model was compiled with, themselves: functions have no form that is read back."""
    given = compile_arguments(model) if model.compiled else {}
    if given and isinstance(model, PrivateTraining):
        given |= model.private_step.options
    return {name: given[name] for name in (*OF_COMPILE, *OPTIONS) if given.get(name) is not None}
