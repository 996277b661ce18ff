"""Validation of a model: all that private training would refuse, before any training.

    report = tfdp_rec.validate(model, batch)
    print(report)            what is refused, and how each layer is clipped
    report.ok                whether a private step can be made

The refusals come from a *trial step*: the traced loss of a private step, read as a step reads it, and never run. A
private step is refused at the first fault. A trial step runs a refused layer without a rule, skips a rule that refuses,
takes an operation at fault for what it should have been, and collects all refusals on the way. If there are none,
examples are also run alone and among others (`training/numeric_checks.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.mechanism.checks import recursion_of_table, refuse_on_table
from tfdp_rec.core.sensitivity import recorder as recording
from tfdp_rec.core.sensitivity.batches import batch_size, hide_batch_axis, open_specs, refuse_padding, tensors
from tfdp_rec.core.sensitivity.engine import check_losses, factors_of, refuse_uncovered, shared_inputs
from tfdp_rec.core.sensitivity.step_reading import StepReading
from tfdp_rec.training.batch import examples_of
from tfdp_rec.training.lookahead import build_layers
from tfdp_rec.training.model import PrivateTraining, refuse_options
from tfdp_rec.training.numeric_checks import SingleExamples
from tfdp_rec.training.own_loss import find_own_losses, refuse_no_loss, refuse_unsaid_loss

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
    if before:
        trial = _TrialStep(model)
        return _report(model, trial, [*before, *trial.refusals], unread=_UNREAD)
    batch = tensors(batch)
    with contextlib.suppress(NotPrivate):  # the trial repeats the refusal
        build_layers(model, open_specs(batch, model.shared_inputs))
    model.settle()  # no example then settles a row, which no gradient goes through
    trial = _TrialStep(model)
    with model.private_weights.in_step():
        trial.read(batch)
        alone = SingleExamples(model, batch) if not trial.refusals else None
    model.settle()  # examples were run on withheld rows, which are published again
    refusals = [*trial.refusals, *(alone.refusals if alone else ()), *_check_tables(model, trial.tables)]
    return _report(model, trial, refusals, compared=alone.summary if alone else "")


class _Refusals(dict[str, str]):
    """Sentences of refusals, each with the name of the layer that it is about, or ""."""

    @contextlib.contextmanager
    def note(self, layer: str = "", error: type[Exception] = NotPrivate) -> Iterator[None]:
        """Ends a block at a refusal, and notes it."""
        try:
            yield
        except error as refusal:
            self.setdefault(str(refusal), layer)


class _TrialStep:
    """All refusals of a private step: `units` recorded or refused, `refusals` with layers' names, `tables` by path."""

    def __init__(self, model: keras.Model):
        self._model, self._shared = model, shared_inputs(model)
        self._known: list[Any] = []  # operations of layers that are refused
        self.units = recording.units_and_refusals(model)
        self.refusals = _Refusals({unit.refusal: unit.layer.name for unit in self.units if unit.rule is None})
        self.tables: set[str] = set()

    def read(self, batch: Any) -> None:
        """Tries the step on a batch, of which nothing is computed."""
        tf.function(self._trace, autograph=False).get_concrete_function(open_specs(batch, self._shared))

    def _trace(self, batch: Any) -> tf.Tensor:
        batch = hide_batch_axis(batch, self._shared)
        size, losses = batch_size(batch, self._shared), None
        with recording.secret_seeds(self._model):
            reading = StepReading(self._model, batch, self._shared)
            with self.refusals.note():
                recording.refuse_duplicate_paths(self._model)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                recorder = recording.Recording(self._model, tape, recording.settle_nothing)
                runs = [(unit.layer, functools.partial(self._run, recorder, unit)) for unit in self.units]
                # Checked under the tape: later operations have no gradient.
                with recording.replace_calls(runs), recorder.outside, self.refusals.note():
                    found = self._model.per_example_loss(batch, training=True)
                    with self.refusals.note(error=ValueError):
                        losses = check_losses(found, size)
            self._check_forward_pass(recorder)
            if losses is not None:  # None if the losses themselves are refused
                self._read_gradients(recorder, reading, losses)
        return size

    def _run(
        self, recorder: recording.Recording, unit: recording.Unit, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if unit.rule is not None:
            with self.refusals.note(unit.layer.name):
                return recorder.run(unit, original, args, kwargs)
        graph: Any = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        with recorder.outside.stop_recording():
            output = original(*args, **kwargs)
        if unit.rule is None:
            self._known += graph.get_operations()[start:]
        return output

    def _check_forward_pass(self, recorder: recording.Recording) -> None:
        refused = [unit.layer for unit in self.units if unit.layer.name in self.refusals.values()]
        weights = [*recorder.direct, *(v for layer in refused for v in layer.trainable_variables)]
        self.tables = set(recorder.tables())
        with self.refusals.note():
            recording.refuse_added_losses(self._model)
        with self.refusals.note():
            recorder.refuse_reads_outside()
        with self.refusals.note():
            recording.refuse_unrecorded(self._model, recorder.calls, weights)

    def _read_gradients(self, recorder: recording.Recording, reading: StepReading, losses: tf.Tensor) -> None:
        gradients, direct = recorder.differentiate(losses)
        size = tf.shape(losses)[0]
        found, read = reading.refusals(recorder.calls, losses, gradients, self._known)
        for refusal in found:
            self.refusals.setdefault(str(refusal), "")
        for one in read:
            with self.refusals.note(one.call.layer.name):
                refuse_uncovered([one.call], {variable.path for variable, _ in factors_of(one, size, reading)})
        for variable, gradient in zip(recorder.direct, direct):
            with self.refusals.note():
                reading.shares(variable, gradient)


def _check_model(model: keras.Model) -> list[str]:
    # Refusals of `compile`.
    if not isinstance(model, PrivateTraining):
        kind = type(model).__name__
        return [
            f"{kind} has no private step: make it with tfdp_rec.PrivateModel(inputs, outputs), or put the mix-in "
            f"first, class {kind}(tfdp_rec.PrivateTraining, keras.Model)."
        ]
    found = _Refusals()
    with found.note(error=ValueError):
        refuse_options(model, {})
    if not find_own_losses(model):
        with found.note(error=ValueError):  # the first of the two
            refuse_unsaid_loss(model)
            refuse_no_loss(model)
    return list(found)


def _check_batch(batch: Any) -> list[str]:
    found = _Refusals()
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            with found.note(error=ValueError):
                refuse_padding(leaf)
    return list(found)


def _check_tables(model: keras.Model, tables: set[str]) -> list[str]:
    # Refusals of any mechanism, and of the one that the model is compiled with: the first of each table.
    found = _Refusals()
    for variable in model.trainable_variables:
        if variable.path in tables:
            with found.note(error=ValueError):
                refuse_on_table(variable)
                if isinstance(model.optimizer, PrivateOptimizer):
                    recursion_of_table(model.optimizer, variable)
    return list(found)


def _report(
    model: keras.Model, trial: _TrialStep, refusals: list[str], unread: str = "", compared: str = ""
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
