"""A head start: what counts tell of clicks or classes, beside which a model is trained.

    clicks     logit  = s · the model's own + b + offsets of the row's ids
    classes    logits = s · the model's own + offset of each class

Before the training, offsets are made of private sums of clicks by id (`sums.clicks`), or of noisy counts of classes.
They are not trained, and neither is the bias of the model's last layer: it would take most of each example's clip, to
learn what the counts have told. In training s is 1. Afterwards it is the one of `_SCALES`, or 0, under which labels of
units that were not trained on are most likely. The means over a unit's rows of

    g(s) = log p(label; s) − log p(label; 0),   within ±1,

divided by √(number of s), are a vector of at most 1 in ℓ₂; these are added up, with noise. Where no sum stands out of
the noise, s = 0: the training found nothing that is to be relied on, and the counts remain. On units that are trained
on, all of what it remembers of them would seem to be knowledge.

Guarantee: two Gaussian mechanisms beside the training, on the same units or fewer, which the plan pays for before them.
The second is about a model that is released already, whose predictions depend on their own row alone.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from scipy import special

from tfdp_rec.core.claim.entries import Use
from tfdp_rec.core.claim.events import GaussianDpEvent
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.core.ground.keras_internals import functional_class
from tfdp_rec.sums.clicks import ClickModel
from tfdp_rec.sums.fixed_point import ONE, release_sums, unit_sums
from tfdp_rec.training.generated_rows import values_of_inputs
from tfdp_rec.training.model import PrivateModel
from tfdp_rec.training.row_predictions import RowPredictions

COUNTS, CHOICE = "counts to begin at", "choice of what training added"
_COUNTS, _CHOICE = 0.1, 0.05  # shares of σ⁻²
_HELD_OUT = 10  # one unit of so many
_SCALES = (0.1, 0.3, 0.6, 1.0)
_CLEAR = 2.0  # deviations of its noise above which a gain is one
_RARE = 3.0  # deviations of its noise below which a class is counted with the others like it
_LEAST = 1e-7  # probability


class HeadStart:
    """The offsets of one model, and the choice of what its training adds to them.

    Args:
        private: Model of layers, not compiled.
        data: (x, y), as arrays.
        units: Number of each row's unit.
        held_out: Units that are not trained on.
        of_clicks: Whether labels are clicks; otherwise they are classes.
        from_logits: Whether the model's outputs are logits, and not probabilities.

    Attributes:
        model: Model on the same layers, with the offsets.

    Raises:
        ValueError: The model or its data have another form.
    """

    def __init__(
        self, private: Any, data: Any, units: NDArray[np.int64], held_out: NDArray[np.int64], of_clicks: bool,
        from_logits: bool,
    ):  # fmt: skip
        of_layers: bool = isinstance(private, functional_class())
        shape = tuple(private.output.shape) if of_layers and len(private.outputs) == 1 else ()
        if len(shape) != 2 or shape[1] != 1 and of_clicks:
            raise ValueError(
                "begin_at='counts' adds what counts tell to the logits of a model of layers that gives one logit a "
                f"row, [batch, 1], or one for each class, [batch, classes]: '{private.name}' gives {shape or 'others'}."
            )
        if not isinstance(data, tuple) or len(data) != 2 or np.size(data[1]) != len(data[1]):
            raise ValueError("begin_at='counts' takes data (x, y) without weights, with one label in each row of y.")
        self._of_clicks, self._classes, self._from_logits = of_clicks, int(shape[1]), from_logits
        self._data, self._units, self._held_out = data, units, np.isin(units, held_out)
        self._columns = _find_columns(private, data[0]) if of_clicks else []
        for layer in private.layers[-1:]:  # what counts tell of it would take most of each example's clip
            if isinstance(layer, keras.layers.Dense) and layer.use_bias:
                layer.bias.trainable = False
        own = private.output if from_logits else _logits_of(private.output, of_clicks)
        self._scaled = keras.layers.EinsumDense(
            "bk,k->bk", self._classes, bias_axes="k", kernel_initializer="ones", trainable=False, name="beside_counts",
        )  # fmt: skip
        self._tables = [
            keras.layers.Embedding(each.size, 1, embeddings_initializer="zeros", trainable=False, name=each.name)
            for each in self._columns
        ]
        rows = [table(each.input) for table, each in zip(self._tables, self._columns)]
        parts = [self._scaled(own), *(keras.layers.Reshape([1])(row) for row in rows)]
        outputs = keras.layers.Add()(parts) if len(parts) > 1 else parts[0]
        if not from_logits:
            outputs = keras.layers.Activation("sigmoid" if of_clicks else "softmax")(outputs)
        self.model = PrivateModel(private.input, outputs, name=private.name)
        self._is_chosen = False

    def __reduce__(self) -> Any:
        raise TypeError("A PrivateFit that begins at counts cannot be copied: a copy would release its choice again.")

    def price(self, epsilon: float, delta: float) -> list[Use]:
        """What the plan is to pay for."""
        whole = noise_of_one_release(epsilon, delta)
        self._noise, self._noise_of_choice = whole / _COUNTS**0.5, whole / _CHOICE**0.5
        return [Use(GaussianDpEvent(self._noise), COUNTS), Use(GaussianDpEvent(self._noise_of_choice), CHOICE)]

    def begin(self) -> None:
        """Counts the rows of the units that are trained on, after the plan has paid."""
        labels, units = self._labels_of(~self._held_out), self._units[~self._held_out]
        if self._of_clicks:
            counted = ClickModel({each.name: each.size for each in self._columns}, noise_multiplier=self._noise)
            counted.fit({each.name: each.ids[~self._held_out] for each in self._columns}, labels, unit=units)
            right = counted.reliability
            for table in self._tables:
                table.embeddings.assign(right.scale * counted.weights[table.name,][:, None])
            self._scaled.bias.assign([right.scale * special.logit(counted.rate) + right.offset])
        else:
            known = (labels >= 0) & (labels < self._classes)
            cells, ones = labels[known].astype(np.int64), np.ones((int(known.sum()), 1), np.int64)
            counts = release_sums(unit_sums(units[known], cells, ones, self._classes)[:, 0], self._noise)
            self._scaled.bias.assign(log_shares(counts, self._noise))

    def end(self, model: Any) -> None:
        """Chooses s for the trained model by the other units, once."""
        if self._is_chosen:
            return
        self._is_chosen, likely = True, []
        for scale in (0.0, *_SCALES):
            self._scaled.kernel.assign(np.full(self._classes, scale))
            likely.append(self._log_likelihoods(self.predictions.of(model)))
        gains = np.nan_to_num(np.array(likely[1:]) - likely[0], nan=-1.0).T
        noisy = release_sums(gain_sums(gains, self._units[self._held_out]), self._noise_of_choice)
        best = int(noisy.argmax())
        chosen = _SCALES[best] if noisy[best] > _CLEAR * self._noise_of_choice else 0.0
        self._scaled.kernel.assign(np.full(self._classes, chosen))

    @functools.cached_property
    def predictions(self) -> RowPredictions:
        """Of the rows of units that are not trained on, as they are now."""
        return RowPredictions(tf.nest.map_structure(lambda array: array[self._held_out], self._data[0]))

    def _labels_of(self, rows: NDArray[np.bool_]) -> NDArray[Any]:
        return self._data[1].reshape(-1)[rows]

    def _log_likelihoods(self, predicted: NDArray[np.float64]) -> NDArray[np.float64]:
        labels = self._labels_of(self._held_out)
        if self._of_clicks:
            logits = predicted[:, 0] if self._from_logits else special.logit(np.clip(predicted[:, 0], 0.0, 1.0))
            return special.log_expit(np.where(labels == 1, logits, -logits))
        logs = special.log_softmax(predicted, axis=1) if self._from_logits else np.log(np.maximum(predicted, _LEAST))
        known = (labels >= 0) & (labels < self._classes)
        return logs[np.arange(len(logs)), np.where(known, labels, 0).astype(np.int64)]


class _Column(NamedTuple):
    name: str
    input: Any
    ids: NDArray[np.int64]
    size: int


def _find_columns(private: Any, features: Any) -> list[_Column]:
    """The inputs that hold one id a row, whose values the model's layers tell."""
    specs = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), features)
    inputs, by_name = private.inputs, {each.name: each for each in private.inputs}
    if isinstance(features, dict) and features.keys() == by_name.keys():
        inputs = [by_name[name] for name in sorted(features)]
    found = [
        _Column(f"counts_{number}", each, ids.reshape(-1), int(values.max()) + 1)
        for number, (each, ids, values) in enumerate(
            zip(inputs, tf.nest.flatten(features), values_of_inputs(private, specs))
        )
        if values is not None and ids.dtype.kind in "iu" and ids.size == len(ids)
    ]
    if not found:
        raise ValueError(
            "begin_at='counts' counts clicks by inputs that hold one id a row, a whole number that an Embedding takes, "
            f"and '{private.name}' has none: leave it out."
        )
    return found


def hold_out(units: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of the units that are trained on, and of the others: a public choice, by number alone."""
    order = np.random.default_rng(0).permutation(units)
    return order[units // _HELD_OUT :], order[: units // _HELD_OUT]


def gain_sums(gains: NDArray[np.float64], owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums over units of the mean of their rows' gains `[rows, k]`, in grid steps, without noise: at most 1 in ℓ₂."""
    most = math.isqrt(ONE * ONE // gains.shape[1])
    each = np.trunc(np.clip(gains, -1.0, 1.0) * most).astype(np.int64)
    rows = np.bincount(owners)
    added = np.zeros((len(rows), gains.shape[1]), np.int64)
    np.add.at(added, owners, each)
    return (np.sign(added) * (np.abs(added) // np.maximum(rows, 1)[:, None])).sum(axis=0)


def _logits_of(outputs: Any, of_clicks: bool) -> Any:
    likely = keras.ops.clip(outputs, _LEAST, 1 - _LEAST)
    return keras.ops.log(likely) - keras.ops.log(1 - likely) if of_clicks else keras.ops.log(likely)


def log_shares(counts: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """Shrunken logarithm of each class's share: classes that do not stand out of the noise have their mean."""
    rare = counts <= _RARE * noise
    mean = max(counts[rare].sum(), noise * max(rare.sum(), 1) ** 0.5) / max(rare.sum(), 1)
    found = np.where(rare, mean, counts)
    return np.log(found / found.sum())
