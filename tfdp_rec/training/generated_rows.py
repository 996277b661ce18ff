"""Rows of the form that a model takes, with labels of a known strength: what a rehearsal learns in place of the data.

Ids are drawn from what the model's own layers take, the rows of a table or the words of a vocabulary; other numbers
from a Gaussian. Each id has an effect of its own and a vector of a few tastes, and a row's score is

    s = effects of its columns + inner products of their tastes, with standard deviations `_EFFECTS` and `_TASTES`

Columns are the inputs, or the numbers of a single input. A click follows with probability 1 / (1 + exp(-s)). Classes
have effects and tastes as well, and one is drawn by the softmax of its effect and its inner product with the sum of
the columns' tastes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import layers_within
from tfdp_rec.core.sensitivity.recorder import replace_calls

_EFFECTS, _TASTES = 0.8, 2.5
_WIDTH = 4  # of a vector of tastes: with as many as a table is wide, models learned what people do not like by
_WORDS = 1000  # that a layer of hashes is given
_AT_ONCE = 2**22  # scores of classes
_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup)
_TAKE_IDS = (keras.layers.Embedding, *_LOOKUPS, keras.layers.Hashing, keras.layers.CategoryEncoding)


class GeneratedRows:
    """Features of rows, and what their labels are drawn from.

    Args:
        model: Model, whose layers say which ids there are.
        inputs: Nest of `tf.TensorSpec`, with the rows as first axis.
        number: Number of rows.
        rng: Source of randomness; nothing here is private.

    Raises:
        ValueError: An input is of whole numbers or text, and no layer says which there are.
    """

    def __init__(self, model: keras.Model, inputs: Any, number: int, rng: np.random.Generator):
        self._rng = rng
        columns = [
            self._column([number, *spec.shape[1:]], spec.dtype, values)
            for spec, values in zip(tf.nest.flatten(inputs), values_of_inputs(model, inputs))
        ]
        self.features = tf.nest.pack_sequence_as(inputs, [features for features, *_ in columns])
        # By row: effect and tastes, and the squares of each column's.
        self._total = np.sum([total for _, total, _ in columns], axis=0)
        self._squares = columns[0][2] if len(columns) == 1 else np.sum([total**2 for _, total, _ in columns], axis=0)

    def _column(
        self, shape: list[int], dtype: tf.DType, values: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Features, the sum of what their numbers say, and the sum of its squares."""
        total, squares = np.zeros([2, shape[0], 1 + _WIDTH])
        if values is None:
            features = self._rng.normal(size=shape)
            for numbers in features.reshape(len(features), -1).T:
                said = numbers[:, None] * self._rng.normal(size=1 + _WIDTH)
                total, squares = total + said, squares + said**2
        else:
            popularity = 1 / (np.arange(len(values)) + 0.1 * len(values) + 1)  # some ids are read more often
            drawn = self._rng.choice(len(values), size=shape, p=popularity / popularity.sum())
            features, table = values[drawn], self._rng.normal(size=[len(values), 1 + _WIDTH])
            for ids in drawn.reshape(len(drawn), -1).T:
                said = table[ids]
                total, squares = total + said, squares + said**2
            features = features.astype(str) if dtype == tf.string else features
        many = max(features[0].size if features.ndim > 1 else 1, 1)
        return features.astype(dtype.as_numpy_dtype), total / many**0.5, squares / many

    def clicks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The score of each row, the part of it that single ids have, and whether a click followed."""
        effects = _EFFECTS * _standardize(self._total[:, 0])
        scores = effects + _TASTES * _standardize((self._total**2 - self._squares)[:, 1:].sum(axis=1))
        return scores, effects, self._rng.random(len(scores)) < 1 / (1 + np.exp(-scores))

    def classes(self, number: int) -> tuple[Callable[[slice], np.ndarray], np.ndarray]:
        """A function from rows to the scores of all classes, and the class of each row."""
        tastes = self._total[:, 1:] / self._total[:, 1:].std() / _WIDTH**0.5
        effects, vectors = self._rng.normal(size=number), self._rng.normal(size=[_WIDTH, number])

        def scores(rows: slice) -> np.ndarray:
            return _EFFECTS * effects + _TASTES * (tastes[rows] @ vectors)

        step = max(1, _AT_ONCE // number)
        parts = [slice(start, start + step) for start in range(0, len(tastes), step)]
        drawn = [np.argmax(s + self._rng.gumbel(size=s.shape), axis=1) for s in map(scores, parts)]
        return scores, np.concatenate(drawn)


def _standardize(values: np.ndarray) -> np.ndarray:
    spread = values.std()
    return (values - values.mean()) / spread if spread > 1e-6 else np.zeros_like(values)


def layers_of_inputs(model: keras.Model, inputs: Any) -> list[list[keras.layers.Layer]]:
    """The layers that the ids of each input reach first: of a lookup and the table behind it, the lookup."""
    specs = tf.nest.flatten(inputs)
    taken_by: list[list[keras.layers.Layer]] = [[] for _ in specs]

    @tf.function(autograph=False)
    def forward(*leaves: tf.Tensor) -> Any:
        graph_inputs = {leaf.op: number for number, leaf in enumerate(leaves)}

        def run(layer: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            for tensor in tf.nest.flatten([args, kwargs]):
                for op in _origins(tensor) & graph_inputs.keys():
                    taken_by[graph_inputs[op]].append(layer)
            return original(*args, **kwargs)

        taking = [each for each in layers_within(model) if isinstance(each, _TAKE_IDS)]
        with replace_calls([(layer, functools.partial(run, layer)) for layer in taking]):
            return model(tf.nest.pack_sequence_as(inputs, leaves))

    forward.get_concrete_function(*(tf.TensorSpec(spec.shape, spec.dtype) for spec in specs))
    embeds = [bool(layers) and isinstance(layers[0], keras.layers.Embedding) for layers in taken_by]
    return [layers if embedded else layers[:1] for layers, embedded in zip(taken_by, embeds, strict=True)]


def values_of_inputs(model: keras.Model, inputs: Any) -> list[np.ndarray | None]:
    """What each input may hold, by the layers that take its ids; None for numbers that are none."""
    specs, taken_by = tf.nest.flatten(inputs), layers_of_inputs(model, inputs)
    found = [min(map(_values_of, layers), key=len, default=None) for layers in taken_by]
    for number, (spec, values) in enumerate(zip(specs, found)):
        if values is None and not spec.dtype.is_floating or values is not None and not len(values):
            raise ValueError(
                f"Input {number} of '{model.name}' is {spec.dtype.name}, and none of "
                f"{', '.join(kind.__name__ for kind in _TAKE_IDS)} with a size or vocabulary takes it: a rehearsal "
                "does not know its values."
            )
    return found


def _values_of(layer: Any) -> np.ndarray:
    if isinstance(layer, _LOOKUPS):
        return np.asarray(layer.get_vocabulary(include_special_tokens=False))
    if isinstance(layer, keras.layers.Hashing):
        return np.arange(min(layer.num_bins, _WORDS))
    size = layer.num_tokens if isinstance(layer, keras.layers.CategoryEncoding) else layer.input_dim
    return np.arange(1 if getattr(layer, "mask_zero", False) and size > 1 else 0, size)


def _origins(tensor: tf.Tensor) -> set[tf.Operation]:
    """The operations whose values a tensor is computed from, those whose shapes it is computed from left out."""
    found, left = set(), [tensor.op] if tf.is_symbolic_tensor(tensor) else []
    while left:
        found.add(operation := left.pop())
        if operation.type != "Shape":
            left += [each.op for each in operation.inputs if each.op not in found]
    return found
