"""Validation of a model: all that private training would refuse, before any training.

    report = tfdp_rec.validate(model, batch)
    print(report)            what is refused, and how each layer is clipped
    report.ok                whether a private step can be made

The refusals come from a trial of the step (`trial_step.py`), as do those of `make_private` and `fit`. If there are
none, examples are also run alone and among others (`numeric_checks.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import textwrap
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.mechanism.checks import recursion_of_table, refuse_on_table
from tfdp_rec.core.sensitivity import recorder as recording
from tfdp_rec.core.sensitivity.batches import open_specs, refuse_padding, tensors
from tfdp_rec.training.batch import examples_of
from tfdp_rec.training.lookahead import build_layers
from tfdp_rec.training.model import PrivateTraining, refuse_options
from tfdp_rec.training.numeric_checks import SingleExamples
from tfdp_rec.training.overridden_steps import refuse_hidden_metrics
from tfdp_rec.training.own_loss import find_own_losses, refuse_no_loss, refuse_unsaid_loss
from tfdp_rec.training.private_form import PLAIN, add_mixin, compile_options, make_private_model
from tfdp_rec.training.trial_step import Refusals, TrialStep

_WIDTH = 80
_UNREAD = "The loss was not read yet: correct this first, and validate again."


@dataclasses.dataclass(frozen=True)
class Clipped:
    """Clipping of one layer's weights.

    Attributes:
        layer: Name of the layer.
        kind: Name of its class.
        way: Description of the clipping, in a few words.
    """

    layer: str
    kind: str
    way: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of `validate`.

    Attributes:
        model: Name of the model.
        refusals: Reasons for a refusal, each with its way out.
        layers: Layers whose weights are clipped.
        unread: Reason why the loss was not read, or "".
        compared: Summary of the comparison with each example alone, or "".
    """

    model: str
    refusals: tuple[str, ...]
    layers: tuple[Clipped, ...]
    unread: str = ""
    compared: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is refused."""
        return not self.refusals

    def __str__(self) -> str:
        """The report on lines of 80 columns."""
        lines = [f"Model '{self.model}' {self._verdict()}"]
        for number, refusal in enumerate(self.refusals, 1):
            lines += ["", *_wrap(f"{number}. ", refusal)]
        if self.unread:
            lines += ["", *_wrap("", self.unread)]
        lines += ["", "How its layers are clipped:"] if self.layers else []
        for layer in self.layers:
            lines += _wrap("  ", f"{layer.layer} ({layer.kind}): {layer.way}")
        lines += ["", *_wrap("", self.compared)] if self.compared else []
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.ok:
            return "can be trained privately."
        several = "one reason" if len(self.refusals) == 1 else f"{len(self.refusals)} reasons"
        return f"cannot be trained privately, for {several}:"


def _wrap(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * max(len(head), 2))


def validate(model: keras.Model, batch: Any) -> Report:
    """All that private training would refuse of a model, layer by layer and table by table; nothing is trained.

    If nothing is refused, the loss is also run on batches that repeat the examples of this one, and on each example
    alone: give several examples that differ. `clipping.check` compares the gradients of weights as well.

    Args:
        model: Model with `PrivateTraining`, or a functional or Sequential one, with a loss; of a class of its own
            without `PrivateTraining`, only the layers are checked.
        batch: Batch of the training data.

    Returns:
        A report, to be printed, or asked whether it is `ok`.

    Example:
        >>> import keras, numpy as np, tfdp_rec
        >>> inputs = keras.Input([3])
        >>> hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(4, name="hidden")(inputs))
        >>> model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1, name="out")(hidden), name="small")
        >>> model.compile(loss="mse")
        >>> report = tfdp_rec.validate(model, (np.ones([2, 3]), np.ones([2, 1])))
        >>> report.ok
        False
        >>> print(report)
        Model 'small' cannot be trained privately, for one reason:
        <BLANKLINE>
        1. Layer 'norm' (BatchNormalization) mixes the examples of a batch; use
           LayerNormalization, or freeze it (trainable=False).
        <BLANKLINE>
        How its layers are clipped:
          hidden (Dense): closed form, 16 weights
          out (Dense): closed form, 5 weights
    """
    batch = examples_of(batch)
    of_batch = _check_batch(batch)
    if type(model) in PLAIN and not of_batch:
        plain, model = model, make_private_model(model, tf.nest.map_structure(np.asarray, tensors(batch)))
        model.compile(**compile_options(plain))
    before = [*_check_model(model), *of_batch]
    if before:
        trial = TrialStep(model)
        return _report(model, trial, [*before, *trial.refusals], unread=_UNREAD)
    batch = tensors(batch)
    with contextlib.suppress(NotPrivate):  # the trial repeats the refusal
        build_layers(model, open_specs(batch, model.shared_inputs))
    model.settle()  # no example then settles a row, which no gradient goes through
    trial = TrialStep(model)
    with model.private_weights.in_step():
        trial.read(batch)
        alone = SingleExamples(model, batch) if not trial.refusals else None
    model.settle()  # examples were run on withheld rows, which are published again
    hidden = Refusals()
    with hidden.note(error=ValueError):
        refuse_hidden_metrics(model)
    refusals = [*trial.refusals, *(alone.refusals if alone else ()), *_check_tables(model, trial.tables), *hidden]
    return _report(model, trial, refusals, compared=alone.summary if alone else "")


def _check_model(model: keras.Model) -> list[str]:
    # Refusals of `compile`.
    if not isinstance(model, PrivateTraining):
        kind = type(model).__name__
        return [
            f"{kind} has no private step: make it with tfdp_rec.PrivateModel(inputs, outputs), or put the mix-in "
            f"first, {add_mixin(type(model))}."
        ]
    found = Refusals()
    with found.note(error=ValueError):
        refuse_options(model, {})
    if not find_own_losses(model):
        with found.note(error=ValueError):  # the first of the two
            refuse_unsaid_loss(model)
            refuse_no_loss(model)
    return list(found)


def _check_batch(batch: Any) -> list[str]:
    found = Refusals()
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            with found.note(error=ValueError):
                refuse_padding(leaf)
    return list(found)


def _check_tables(model: keras.Model, tables: set[str]) -> list[str]:
    # Refusals of any mechanism, and of the one that the model is compiled with: the first of each table.
    found = Refusals()
    for variable in model.trainable_variables:
        if variable.path in tables:
            with found.note(error=ValueError):
                refuse_on_table(variable)
                if isinstance(model.optimizer, PrivateOptimizer):
                    recursion_of_table(model.optimizer, variable)
    return list(found)


def _report(
    model: keras.Model, trial: TrialStep, refusals: list[str], unread: str = "", compared: str = ""
) -> Report:
    refused = set(trial.refusals.values())
    layers = [
        Clipped(unit.layer.name, type(unit.layer).__name__, _way(unit, trial.tables))
        for unit in trial.units
        if unit.rule is not None and unit.layer.name not in refused
    ]
    return Report(model.name, tuple(dict.fromkeys(refusals)), tuple(layers), unread, compared)


def _way(unit: recording.Unit, tables: set[str]) -> str:
    # How the layer is clipped, and its numbers of weights.
    ways, weights = [unit.rule.way], 0  # type: ignore[union-attr]
    for variable in unit.layer.trainable_variables:
        if variable.path in tables:
            rows, *width = variable.shape
            ways.append(f"table of {rows:,} rows of {' x '.join(map(str, width))}")
        else:
            weights += math.prod(variable.shape)
    return ", ".join([*ways, *([f"{weights:,} weights"] if weights else [])])
