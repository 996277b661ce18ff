"""A head start: what counts tell of clicks or classes, beside which a model is trained.

    clicks     logit  = s · the model's own + b + offsets of the row's ids
    classes    logits = s · the model's own + offset of each class

Before the training, offsets are made of noisy counts: of rows with a click and without by id, or of classes. They are
not trained, and neither is the bias of the model's last layer: it would take most of each example's clip, to
learn what the counts have told. In training s is 1. Afterwards it is the one of `_SCALES`, or 0, under which labels of
units that were not trained on are most likely. The means over a unit's rows of

    g(s) = log p(label; s) − log p(label; 0),   within ±1,

divided by √(number of s), are a vector of at most 1 in ℓ₂; these are added up, with noise. Where no sum stands out of
the noise, s = 0: the training found nothing that is to be relied on, and the counts remain. On units that are trained
on, all of what it remembers of them would seem to be knowledge.

**How much counts cost.** With n units, V values of all inputs and σ the noise of one release of the whole budget, the
noise of a usual count, n/2V, is to be a quarter of what chance does to it, in variance: a share of 8 V σ²/n of σ⁻²,
within 2% and 90%, or 70% by Rényi divergences, which tell a larger ε of it.

**Offsets of clicks.** A unit adds its rows of each value, with a click and without, to two counts. In each of k inputs
all its numbers are divided by the root of k times their squares' sum: together 1 in ℓ₂. `log_odds` makes offsets of
them; scale and offset of their sum are corrected by counts by predicted logit (`sums.reliability`), for a fiftieth of
their σ⁻². Units that choose are counted, too: what counts remember of their labels speaks against the training.

Guarantee: two Gaussian mechanisms beside the training, on the same units or fewer, which the plan pays for before them.
The second is about a model that is released already, whose predictions depend on their own row alone.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from scipy import special

from tfdp_rec.core.claim.entries import Use
from tfdp_rec.core.claim.events import GaussianDpEvent
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.core.ground.keras_internals import functional_class
from tfdp_rec.sums.clicks import RELIABILITY
from tfdp_rec.sums.fixed_point import ONE, release_sums, unit_sums
from tfdp_rec.sums.reliability import private_reliability
from tfdp_rec.training.generated_rows import layers_of_inputs
from tfdp_rec.training.model import PrivateModel
from tfdp_rec.training.row_predictions import RowPredictions

COUNTS, CHOICE = "counts to begin at", "choice of what training added"
_LEAST_COUNTS, _MOST_COUNTS, _MOST_BY_RDP, _CHOICE = 0.02, 0.9, 0.7, 0.05  # shares of σ⁻²
_NOISY = 0.25  # variance by noise of a usual count, in that by chance
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
        predictions: Of the rows by which is chosen.

    Raises:
        ValueError: The model or its data have another form.
    """

    def __init__(self, private: Any, data: Any, units: Any, held_out: Any, of_clicks: bool, from_logits: bool):
        of_layers: bool = isinstance(private, functional_class())
        shape = tuple(private.output.shape) if of_layers and len(private.outputs) == 1 else ()
        labelled = isinstance(data, tuple) and len(data) == 2 and np.size(data[1]) == len(data[1])
        if not labelled or len(shape) != 2 or shape[1] != 1 and of_clicks:
            raise ValueError(
                "begin_at='counts' takes data (x, y) without weights, with one label a row, and a model of layers that "
                f"gives one logit a row, [batch, 1], or one a class, [batch, classes]; '{private.name}' gives {shape}."
            )
        self._of_clicks, self._from_logits, self._classes = of_clicks, from_logits, int(shape[1])
        self._labels, self._units, self._held_out = data[1].reshape(-1), units, np.isin(units, held_out)
        self._columns = _find_columns(private, data[0]) if of_clicks else []
        self.predictions = RowPredictions(tf.nest.map_structure(lambda array: array[self._held_out], data[0]))
        if not of_clicks and not np.isin(self._labels, np.arange(self._classes)).all():
            raise ValueError(f"Labels must be whole numbers from 0 to {self._classes - 1}, one for each class.")
        self._last = private.layers[-1]
        self._scaled = keras.layers.EinsumDense(
            "bk,k->bk", self._classes, bias_axes="k", kernel_initializer="ones", trainable=False,
            name=f"beside_counts_{len(private.layers)}",
        )  # fmt: skip
        parts = [self._scaled(private.output if from_logits else _logits_of(private.output, of_clicks))]
        parts += [keras.layers.Reshape([1])(table(of_rows)) for table, of_rows, _ in self._columns]
        outputs = keras.layers.Add()(parts) if len(parts) > 1 else parts[0]
        if not from_logits:
            outputs = keras.layers.Activation("sigmoid" if of_clicks else "softmax")(outputs)
        self.model, self._is_chosen = PrivateModel(private.input, outputs, name=private.name), False

    def price(self, epsilon: float, delta: float, unit: str, accountant: str = "pld") -> list[Use]:
        """What the plan is to pay for, for units of that name."""
        whole = noise_of_one_release(epsilon, delta)
        values = sum(table.input_dim for table, *_ in self._columns) or self._classes
        needed = 2 * whole**2 * values / (_NOISY * (1 + self._units.max()))
        most = _MOST_COUNTS if accountant == "pld" else _MOST_BY_RDP
        share = float(np.clip(needed, _LEAST_COUNTS, most))
        self._noise, self._noise_of_choice = whole / share**0.5, whole / _CHOICE**0.5
        priced = ((self._noise, COUNTS), (self._noise_of_choice, CHOICE))
        return [Use(GaussianDpEvent(noise), label, unit=unit) for noise, label in priced]

    def freeze_bias(self) -> None:
        """Freezes what counts tell better, and what would take most of each example's clip."""
        if isinstance(self._last, keras.layers.Dense) and self._last.use_bias:
            self._last.bias.trainable = False

    def begin(self) -> None:
        """Counts all rows, after the plan has paid."""
        if self._of_clicks:
            return self._count_clicks()
        labels, ones = self._labels.astype(np.int64), np.ones((len(self._labels), 1), np.int64)
        counts = release_sums(unit_sums(self._units, labels, ones, self._classes)[:, 0], self._noise)
        self._scaled.bias.assign(log_shares(counts, self._noise))

    def _count_clicks(self) -> None:
        """Offsets by noisy counts of rows with a click and without, by value; their scale by predicted logit."""
        parts = len(self._columns)
        noise, logits = (parts / (1 - RELIABILITY)) ** 0.5 * self._noise, np.zeros(len(self._labels))
        entries = np.stack([self._labels == 1, self._labels != 1], axis=1).astype(np.int64)
        found = []
        for table, _, ids in self._columns:
            known, size = (0 <= ids) & (ids < table.input_dim), int(table.input_dim)
            sums = unit_sums(self._units[known], ids[known].astype(np.int64), entries[known], size, 1, parts)
            found.append((size, log_odds(parts**0.5 * release_sums(sums, noise / parts**0.5), noise)))
            logits += np.append(found[-1][1][0], 0.0)[np.where(known, ids, -1)]
        common = min(found, key=lambda each: each[0])[1][1]  # of the column with the least noise
        right = private_reliability(
            logits + common, self._labels, noise_multiplier=self._noise / RELIABILITY**0.5, unit=self._units
        )
        for (table, *_), (_, (offsets, _)) in zip(self._columns, found):
            table.embeddings.assign(right.scale * offsets[:, None])
        self._scaled.bias.assign([right.scale * common + right.offset])

    def end(self, model: Any) -> None:
        """Chooses s for the trained model by the other units, once; 0 if it is cut off."""
        if self._is_chosen:
            return
        self._is_chosen, chosen, likely = True, 0.0, []
        try:
            for scale in (0.0, *_SCALES):
                self._scaled.kernel.assign(np.full(self._classes, scale))
                likely.append(self._log_likelihoods(self.predictions.of(model)))
            gains = np.nan_to_num(np.array(likely[1:]) - likely[0], nan=-1.0).T
            noisy = release_sums(gain_sums(gains, self._units[self._held_out]), self._noise_of_choice)
            if noisy.max() > _CLEAR * self._noise_of_choice:
                chosen = _SCALES[noisy.argmax()]
        finally:
            self._scaled.kernel.assign(np.full(self._classes, chosen))

    def _log_likelihoods(self, predicted: NDArray[np.float64]) -> NDArray[np.float64]:
        of = keras.losses.binary_crossentropy if self._of_clicks else keras.losses.sparse_categorical_crossentropy
        labels = self._labels[self._held_out, None]
        return -np.asarray(of(labels, predicted, from_logits=self._from_logits), np.float64)


def _find_columns(private: Any, features: Any) -> list[tuple[Any, Any, NDArray[np.int64]]]:
    """Of each input that holds one id a row: a table of offsets, the input, and the ids."""
    specs = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), features)
    inputs, by_name = private.inputs, {each.name: each for each in private.inputs}
    if isinstance(features, dict) and features.keys() == by_name.keys():
        inputs = [by_name[name] for name in sorted(features)]  # as a nest is flattened
    number = len(private.layers)  # names that no layer has, also of a model that has begun at counts before
    found: list[tuple[Any, Any, NDArray[np.int64]]] = []
    for each, ids, layers in zip(inputs, map(np.squeeze, tf.nest.flatten(features)), layers_of_inputs(private, specs)):
        # Not ids behind a lookup, which admits others than it knows: the table of offsets would refuse their rows.
        sizes = [layer.input_dim for layer in layers if isinstance(layer, keras.layers.Embedding)]
        if sizes and len(sizes) == len(layers) and ids.dtype.kind in "iu" and ids.ndim == 1:
            name = f"counts_{number + len(found)}"
            table = keras.layers.Embedding(min(sizes), 1, "zeros", trainable=False, name=name)
            found.append((table, each, ids))
    if not found:
        raise ValueError(
            "begin_at='counts' counts clicks by inputs that hold one id a row, a whole number that an Embedding takes "
            f"as it is, and '{private.name}' has none: leave it out."
        )
    return found


def hold_out(units: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of the units that are trained on, and of the others: a public choice, by number alone."""
    if units < _HELD_OUT:
        raise ValueError(f"begin_at='counts' chooses by a tenth of the units: it needs at least ten, got {units}.")
    order = np.random.default_rng(0).permutation(units)
    return order[units // _HELD_OUT :], order[: units // _HELD_OUT]


def gain_sums(gains: NDArray[np.float64], owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums over units of the mean of their rows' gains `[rows, k]`, in grid steps, without noise: at most 1 in ℓ₂."""
    each = np.trunc(np.clip(gains, -1.0, 1.0) * math.isqrt(ONE * ONE // gains.shape[1])).astype(np.int64)
    rows = np.bincount(owners)
    added = np.zeros((len(rows), gains.shape[1]), np.int64)
    np.add.at(added, owners, each)
    return (np.sign(added) * (np.abs(added) // np.maximum(rows, 1)[:, None])).sum(axis=0)


def log_shares(counts: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """Logarithm of each class's share: classes that do not stand out of the noise have the mean of all such."""
    rare = counts <= _RARE * noise
    mean = max(counts[rare].sum(), noise * max(rare.sum(), 1) ** 0.5) / max(rare.sum(), 1)
    found = np.where(rare, mean, counts)
    return np.log(found / found.sum())


def log_odds(counts: NDArray[np.float64], noise: float) -> tuple[NDArray[np.float64], float]:
    """Of noisy counts `[values, 2]` of rows with a click and without: each value's offset, and the odds of all.

    Rates of values are as if drawn from a Gaussian, whose mean and covariance are what the counts' are beyond their
    noise and their own chance. A value's are the means of what remains likely once it is seen, above 0: where values
    have equally many rows without a click, it is ordered by its clicks alone.
    """
    mean = np.maximum(counts.mean(axis=0), noise / len(counts) ** 0.5)
    chance = np.diag(mean + noise**2)
    sizes, axes = np.linalg.eigh(np.cov(counts.T, bias=True) - chance)
    spread = (axes * np.maximum(sizes, 0.0)) @ axes.T
    towards = np.linalg.solve(spread + chance, spread)
    rates = mean + (counts - mean) @ towards
    deviation = np.sqrt(np.maximum(np.diag(spread - spread @ towards), _LEAST))
    z = rates / deviation
    rates += deviation * np.exp(-0.5 * z**2 - special.log_ndtr(z)) / math.sqrt(2 * math.pi)
    found = np.log(np.maximum(rates, 0.01 * mean))
    common = math.log(mean[0] / mean[1])
    return found[:, 0] - found[:, 1] - common, common


def _logits_of(outputs: Any, of_clicks: bool) -> Any:
    likely = keras.ops.clip(outputs, _LEAST, 1 - _LEAST)
    return keras.ops.log(likely) - keras.ops.log(1 - likely) if of_clicks else keras.ops.log(likely)
