"""Validation of a model: all that private training would refuse, before any training.

    report = tfdp_rec.validate(model, batch)
    print(report)            what is refused, and how each layer is clipped
    report.ok                whether a private step can be made

The refusals come from the reading of the traced loss that a private step uses (`training/trial_step.py`). If there are
none, examples are also run alone and among others (`training/single_examples.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import textwrap
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.mechanism.checks import recursion_of_table, refuse_on_table
from tfdp_rec.core.sensitivity.batches import open_specs, refuse_padding, tensors
from tfdp_rec.core.sensitivity.recorder import Unit, units_and_refusals
from tfdp_rec.training.batch import examples_of
from tfdp_rec.training.lookahead import build_layers
from tfdp_rec.training.model import PrivateTraining, refuse_options
from tfdp_rec.training.own_loss import is_own, refuse_no_loss, refuse_unsaid_loss
from tfdp_rec.training.single_examples import SingleExamples
from tfdp_rec.training.trial_step import TrialStep

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
        model: Model with `PrivateTraining` and a loss; of another Keras model, only the layers are checked.
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
    before = [*_check_model(model), *_check_batch(batch)]
    if before or not isinstance(model, PrivateTraining):
        units = units_and_refusals(model)
        refused = {unit.refusal: unit.layer.name for unit in units if unit.rule is None}
        return _report(model, [*before, *refused], units, set(), set(refused.values()), _UNREAD)
    batch = tensors(batch)
    with contextlib.suppress(NotPrivate):  # the trial repeats the refusal
        build_layers(model, open_specs(batch, model.shared_inputs))
    loss = functools.partial(model.per_example_loss, training=True)
    model.settle()  # no example then settles a row, which no gradient goes through
    with model.private_weights.in_step():
        trial = TrialStep(model, loss).read(batch)
        alone = SingleExamples(model, loss, batch) if not trial.refusals else None
    model.settle()  # examples were run on withheld rows, which are published again
    refusals = [*trial.refusals, *(alone.refusals if alone else ()), *_check_tables(model, trial.tables)]
    report = _report(model, refusals, trial.units, trial.tables, set(trial.refusals.values()))
    return dataclasses.replace(report, compared=alone.summary if alone else "")


def _check_model(model: keras.Model) -> list[str]:
    # Refusals of `compile`.
    if not isinstance(model, PrivateTraining):
        kind = type(model).__name__
        return [
            f"{kind} has no private step: make it with tfdp_rec.PrivateModel(inputs, outputs), or put the mix-in "
            f"first, class {kind}(tfdp_rec.PrivateTraining, keras.Model)."
        ]
    own = is_own(model, "per_example_loss") or is_own(model, "compute_loss")
    loss = [] if own else [*_catch_refusal(refuse_unsaid_loss, model), *_catch_refusal(refuse_no_loss, model)]
    return [*_catch_refusal(refuse_options, model, {}), *loss[:1]]


def _check_batch(batch: Any) -> list[str]:
    found: dict[str, None] = {}
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            found |= dict.fromkeys(_catch_refusal(refuse_padding, leaf))
    return list(found)


def _check_tables(model: keras.Model, tables: set[str]) -> list[str]:
    # Refusals of any mechanism, and of the one that the model is compiled with.
    several = [v for v in model.trainable_variables if v.path in tables]
    found = {v.path: _catch_refusal(refuse_on_table, v) for v in several}
    if isinstance(model.optimizer, PrivateOptimizer):
        found |= {v.path: _catch_refusal(recursion_of_table, model.optimizer, v) for v in several if not found[v.path]}
    return [said for saids in found.values() for said in saids]


def _catch_refusal(refuse: Any, *args: Any) -> list[str]:
    try:
        refuse(*args)
    except (NotPrivate, ValueError) as refusal:
        return [str(refusal)]
    return []


def _report(
    model: keras.Model, refusals: list[str], units: list[Unit], tables: set[str], refused: set[str], unread: str = ""
) -> Report:
    layers = [
        Clipped(unit.layer.name, type(unit.layer).__name__, _way(unit, tables))
        for unit in units
        if unit.rule is not None and unit.layer.name not in refused
    ]
    return Report(model.name, tuple(dict.fromkeys(refusals)), tuple(layers), unread)


def _way(unit: Unit, tables: set[str]) -> str:
    # How the layer is clipped, and its numbers of weights.
    ways = [unit.rule.way]  # type: ignore[union-attr]
    for variable in unit.layer.trainable_variables:
        if variable.path in tables:
            rows, *width = variable.shape
            ways.append(f"table of {rows:,} rows of {' x '.join(map(str, width))}")
    others = [v for v in unit.layer.trainable_variables if v.path not in tables]
    weights = sum(math.prod(v.shape) for v in others)
    return ", ".join([*ways, *([f"{weights:,} weights"] if weights else [])])
