"""`make_private`: from a Keras model and arrays to a private training, in one call.

    private = tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=256, epochs=5)
    private.fit()
    private.model.export("servable")

The call combines these parts:

    units        the rows of the data; or users, of whom each batch has one row each, drawn anew each time
    sampling     PoissonSampling: every unit is in a batch with probability batch size / number of units
    plan         PrivatePlan: the least noise with which all steps cost at most ε
    optimizer    the mechanism with the plan's settings, in place of the model's optimizer
    fit          on the sampling's batches, with the plan's budget
    reliability  if asked for, one count of clicks by prediction afterwards, which corrects predictions (`sums`)
    head start   if asked for, counts before, and a choice afterwards of how much of the training stays
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import threading
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Never, Unpack

import keras
import numpy as np
import tensorflow as tf
from scipy import special

from tfdp_rec import optimizers
from tfdp_rec.core.claim.entries import Use
from tfdp_rec.core.claim.events import GaussianDpEvent
from tfdp_rec.core.claim.schemes import PoissonSampling
from tfdp_rec.core.ground.keras_internals import functional_class, layers_within
from tfdp_rec.core.ground.refused import NotPrivate, refuse_below
from tfdp_rec.core.mechanism.arguments import Options
from tfdp_rec.core.mechanism.noise_walk import first_dense_optimizer, first_rate
from tfdp_rec.core.sensitivity.weights import Auto
from tfdp_rec.datasets.unit_ids import unit_numbers
from tfdp_rec.mechanisms import MECHANISMS
from tfdp_rec.sums.fixed_point import check_noise
from tfdp_rec.sums.reliability import LABEL, Reliability, private_reliability
from tfdp_rec.training.arrays import (
    arrays_of,
    has_text,
    is_among,
    look_at_numbers,
    number_of_rows,
    rows_of_units,
    warn_of_own_ids,
    warn_of_users,
)
from tfdp_rec.training.callback_checks import list_callbacks
from tfdp_rec.training.head_start import HeadStart, hold_out
from tfdp_rec.training.model import PrivateModel
from tfdp_rec.training.own_loss import find_own_losses
from tfdp_rec.training.private_form import OF_COMPILE, compile_options, input_names, private_form
from tfdp_rec.training.private_plan import PrivatePlan
from tfdp_rec.training.private_step import OPTIONS
from tfdp_rec.training.rehearsal import Rehearsal, rehearse
from tfdp_rec.training.row_predictions import RowPredictions
from tfdp_rec.training.signal import choose_batches

_EXTREME = (
    "Clipping keeps the order of predictions and makes probabilities too extreme: make_private(..., reliability=30.0) "
    "keeps some of epsilon for a correction (private.reliability())."
)
_BELOW = (
    "Where ids have few rows, a training may end below what counts tell: make_private(..., begin_at='counts') begins "
    "at them, and stays there if training adds nothing."
)
_NEARLY_ALL = 0.8  # of the signal: more batches would change little
_SMALL = 1e-3  # a rate that every mechanism accepts, until the model's tables are known
_TAKE_TEXT = tuple(
    getattr(keras.layers, name) for name in ("StringLookup", "TextVectorization", "Hashing", "HashedCrossing")
)
_ITS_OWN = "the data and the size of batches are those of make_private, which the noise was computed for"
_GIVEN_BEFORE = dict.fromkeys(("x", "y", "batch_size"), _ITS_OWN) | {
    "validation_split": "it would take rows of the training data. Hold rows out before make_private, and give them as "
    "validation_data=(x, y)",
    "class_weight": "give make_private (x, y, sample_weight), with each row's weight by its class",
    "sample_weight": "give make_private (x, y, sample_weight)",
}
_OF_FIT = frozenset(inspect.signature(keras.Model.fit).parameters)
_APART = "x and y are one argument, as in fit(): make_private(model, (x, y), ...)."
_OF_OPACUS = {"max_grad_norm": "l2_norm_clip", "target_epsilon": "epsilon", "target_delta": "delta"}
# What Keras would say of them, "not recognized", with all that they hold.
_REFUSED = {
    **{one: f"{one}= is an option of fit: make_private(...).fit({one}=...)." for one in _OF_FIT},
    **{one: f"make_private({one}=...) is refused: {why}." for one, why in _GIVEN_BEFORE.items()},
    **{one: f"{one}= is an option of compile: model.compile({one}=...) before make_private." for one in OF_COMPILE},
    **{one: f"{one}= is {ours}= here." for one, ours in _OF_OPACUS.items()},
    **dict.fromkeys(("x", "y"), _APART),
    "optimizer": "optimizer= is the mechanism's place: leave it out, or say how variables that are not tables are "
    "trained, dense_optimizer=keras.optimizers.Adam(1e-3).",
}


@dataclasses.dataclass(frozen=True, repr=False)
class PrivateFit:
    """A model that is ready for private training, with its plan and batches.

    Args:
        model: Private model, compiled.
        plan: Plan of the training.
        batches: Batches for `fit`.
        steps_per_epoch: Number of steps that draw each unit once, on average.
        epochs: Number of epochs that the plan is for.

    All else, such as `predict`, `evaluate`, `summary`, `save` and `export`, is the model's.
    """

    model: Any
    plan: PrivatePlan
    batches: tf.data.Dataset
    steps_per_epoch: int
    epochs: int
    _data: Any = None
    _release: _Release | None = None
    _make_ready: Any = None
    _start: HeadStart | None = None

    def __repr__(self) -> str:
        kind, sampling = type(self.model.optimizer).__name__, self.plan.sampling
        if not self.model.is_private:
            return f"<PrivateFit of '{self.model.name}', which {kind} trains now, without privacy>"
        return (
            f"<PrivateFit of '{self.model.name}': {kind}, epsilon {self.plan.epsilon:g} and delta "
            f"{self.plan.delta:g} for each of {sampling.num_units} {sampling.unit}s, {self.plan.steps} steps of "
            f"{sampling.expected_batch_size:g}, noise multiplier {self.plan.noise_multiplier:.3g}, "
            f"{self.share_of_signal:.0%} of the signal that epsilon allows>"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "model":  # a copy has none yet
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def share_of_signal(self) -> float:
        """The share of the signal that ε allows which this batch size and number of epochs reach."""
        return self.plan.share_of_signal

    @property
    def epsilon(self) -> float:
        """ε of the steps that were made; infinite if an ordinary optimizer made others on the same weights."""
        return math.inf if self.plan.accountant.spending.history.ordinary else self.plan.accountant.epsilon()

    def fit(self, callbacks: Any = None, *others: Any, **options: Any) -> Any:
        """Trains until the budget is spent; ε is in the logs.

        Args:
            callbacks: Callback, or list of callbacks, in addition to the budget.
            *others: Refused, if any: the data are those of `make_private`.
            **options: Options of Keras' `fit`, such as validation_data and verbose.

        Returns:
            Keras' history.
        """
        if others or not all(isinstance(each, keras.callbacks.Callback) for each in list_callbacks(callbacks)):
            raise TypeError(f"fit() takes no data: {_ITS_OWN}. Give callbacks and other options of Keras' fit by name.")
        for name in _GIVEN_BEFORE.keys() & options.keys():
            raise TypeError(f"fit({name}=...) is refused: {_GIVEN_BEFORE[name]}.")
        callbacks = list_callbacks(callbacks)
        watched = [type(each).__name__ for each in callbacks if str(getattr(each, "monitor", "")).startswith("val_")]
        if watched and is_among(options.get("validation_data"), self._data):
            raise NotPrivate(
                f"{watched[0]} would act on validation_data that are rows of the training data, which no noise "
                "protects there: hold rows out before make_private, or leave it out."
            )
        options = {"epochs": self.epochs, "steps_per_epoch": self.steps_per_epoch, **options}
        if options.get("verbose", "auto") != 0 and not int(self.model.optimizer.iterations):
            print(self._describe_signal())
            if self._release is None and _is_of_clicks(self.model._loss):
                print(_EXTREME)
            if self._start is None and (_is_of_clicks(self.model._loss) or _is_of_classes(self.model._loss)):
                print(_BELOW)
        if options["epochs"] - options.get("initial_epoch", 0) > self.epochs:
            warnings.warn(
                f"epochs={options['epochs']}, and make_private planned {self.epochs}: training ends with the budget. "
                "Give make_private(epochs=...), which the noise is computed for.",
                stacklevel=2,
            )
        history = self.model.fit(self.batches, callbacks=[self.plan.budget(), *callbacks], **options)
        if self._start and int(self.model.optimizer.iterations) >= self.plan.steps:
            self._start.end(self.model)
        return history

    def _describe_signal(self) -> str:
        sampling, share = self.plan.sampling, self.share_of_signal
        more = "" if share > _NEARLY_ALL else (
            "; make_private without batch_size and epochs chooses both, and rehearse() tells, without the data, what "
            "settings find of generated labels"
        )
        return (
            f"Batches of {sampling.expected_batch_size:,} x {self.epochs} epochs reach {share:.0%} of the signal that "
            f"epsilon = {self.plan.epsilon:g} allows with {sampling.num_units:,} {sampling.unit}s{more}."
        )

    def rehearse(self, verbose: Any = "auto") -> Rehearsal:
        """What these settings find of generated labels of a known strength; the data are not read, and no ε is spent.

        For models of layers whose loss is a binary or a sparse categorical cross-entropy. A new model of the same
        layers is trained twice, by Adam and with these settings, on batches of at most 1,024: about the time of the
        training. Weights that were loaded, sample weights and callbacks are left out. Noise is random: another call
        may differ by a tenth of the share, or by a quarter where ids have few rows.

        Args:
            verbose: 0 for no progress.

        Returns:
            What Adam and the mechanism find, and whether that is enough; `print` says it.

        Raises:
            ValueError: The model has another form, or the values of its inputs are not known.
        """
        loss, of_layers = self.model._loss, isinstance(self.model, functional_class())
        of_clicks = _is_of_clicks(loss)
        one_output = of_layers and hasattr(self.model.output, "shape")
        if not one_output or find_own_losses(self.model) or not (of_clicks or _is_of_classes(loss)):
            raise ValueError(
                "A rehearsal is for models of layers with one output, whose loss is a BinaryCrossentropy or a "
                "SparseCategoricalCrossentropy."
            )
        x, y = tf.nest.map_structure(lambda rows: tf.TensorSpec([None, *rows.shape[1:]], rows.dtype), self._data[:2])
        return rehearse(self.model, self.plan, x, y, loss, of_clicks, self._make_ready, verbose)

    def statement(self) -> str:
        """The guarantee of the training so far, as text."""
        return self.plan.accountant.statement()

    def reliability(self) -> Reliability:
        """How often a click followed where the trained model predicts one, and the correction of its logits.

        It is released once, about the model as it is when it is first asked for; `make_private(reliability=)` has paid
        for it.

        Raises:
            ValueError: `make_private` was not given `reliability`, or the model has made no step.
        """
        if self._release is None:
            raise ValueError(
                "The budget has no room for this release: make_private(..., reliability=30.0) keeps some for it. Or "
                "tfdp_rec.privacy.private_reliability(logits, clicks, noise_multiplier=, accountant=) charges it."
            )
        return self._release.of(self.model)


class _Release:
    """The one release that a plan pays for; copies of a `PrivateFit` share it."""

    def __init__(self, noise_multiplier: float, data: Any, unit: Any, from_logits: bool, name_of_unit: str):
        self._noise, self._from_logits = check_noise(noise_multiplier), from_logits
        self.predictions = RowPredictions(data[0])
        self.use = Use(GaussianDpEvent(self._noise), LABEL, unit=name_of_unit)
        # Kept as they are now: the caller's arrays may change, and with them whose rows are counted together.
        self._clicks = np.array(data[1]).reshape(-1)
        self._units = None if unit is None else unit_numbers(unit, len(self._clicks))
        self._made: Reliability | None = None
        self._one_at_a_time = threading.Lock()

    def __deepcopy__(self, memo: Any) -> _Release:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("A PrivateFit with a reliability cannot be pickled: a copy would release it again.")

    def of(self, model: Any) -> Reliability:
        """The answer: made for this model, or for the one that was asked for first."""
        with self._one_at_a_time:
            if self._made is None:
                if not int(model.optimizer.iterations):
                    raise ValueError("The model has made no step: fit() first, its predictions are what is corrected.")
                predicted = self.predictions.of(model).reshape(-1)
                logits = predicted if self._from_logits else special.logit(np.clip(predicted, 0.0, 1.0))
                # The plan has declared it: it is charged no second time.
                self._made = private_reliability(logits, self._clicks, noise_multiplier=self._noise, unit=self._units)
            return self._made


class Settings(Options, total=False):
    """Further settings of `make_private`: of `LazyDPSGD`, and of `PrivateModel.compile`."""

    l2_norm_clip: float | Auto
    aggregate_noise: bool
    microbatch_size: int | None
    diagnostics: bool
    adapted_to_public_data: bool


_SETTINGS = ("epsilon", "batch_size", "epochs", "delta", "accountant", *Settings.__annotations__)


def make_private(
    model: keras.Model, data: Any, *others: Never, epsilon: float | None = None, batch_size: int | None = None,
    epochs: int | None = None, learning_rate: Any = None, delta: float | None = None, unit: Any = None,
    mechanism: Any = "LazyDPSGD", accountant: str = "pld", reliability: float | None = None,
    plan: PrivatePlan | None = None, begin_at: Literal["counts"] | None = None, **settings: Unpack[Settings],
) -> PrivateFit:
    """Makes a model's training private.

    Guarantee: after `fit`, whether it is completed or interrupted, the model is (ε, δ)-differentially private for the
    given units, whose number is public.

    Args:
        model: Functional or Sequential model, compiled for its loss and metrics; or a model of your own class with
            `tfdp_rec.PrivateTraining` as first base. Its own weights are trained, not a copy.
        data: Arrays in a nest of tuples, lists and dicts, as for `fit` without validation: `(x, y)` or
            `(x, y, sample_weight)`, or the argument of the model's own `per_example_loss`. x may be a table of pandas
            or Polars, whose columns go to the inputs of their names.
        *others: Refused, if any: x and y are one argument.
        epsilon: Largest ε of the whole training; needed without a plan.
        batch_size: Expected number of units in a batch. By default, with `epochs`, chosen from the number of units and
            ε (`PrivateFit.share_of_signal`); up to 40 epochs of up to 8,192 units.
        epochs: Number of epochs, each of which draws every unit once on average; by default chosen, too.
        learning_rate: Float or Keras schedule of plain SGD. By default a first value from public settings: noise alone
            gives the rows of tables a length of 0.7 in all steps together, and variables that are not tables are moved
            by Adam, unless `dense_optimizer` is among the settings. Tuning finds better ones.
        delta: Probability δ; by default a tenth of 1 / units, rounded down to a power of ten.
        unit: Array with the user id of each row, if users are the privacy units; by default, and by "row", each row
            is a unit.
        mechanism: Mechanism that replaces the model's optimizer, "LazyDPSGD" or "DPSGD", or its class. For others,
            compile a `PrivateModel` with `tfdp_rec.<mechanism>(..., plan=tfdp_rec.PrivatePlan(...))`.
        l2_norm_clip: Clip C, by default 1; or "auto", C = 1 and every gradient scaled to nearly that length, as for
            `tfdp_rec.LazyDPSGD`.
        accountant: "pld", which is tight, or "rdp", which is quick.
        reliability: Noise multiplier, such as 30, of a release after training that corrects a click model's
            predictions (`PrivateFit.reliability`); ε includes it. None for no such release.
        plan: Plan of the training, such as one of `tfdp_rec.tune`, instead of epsilon, batch_size, epochs, delta and
            reliability; its clip is used where none is given.
        begin_at: "counts" for a model of clicks or classes that is never worse than counts, but by their noise: 2% to
            90% of σ⁻², the more the fewer units a value has, count clicks by each input of an Embedding, or classes.
            They are added to the logits of `PrivateFit.model`, which is a new model on the same layers, and not
            trained; nor is the bias of a last `Dense`, whose `trainable` becomes False. A tenth of the units, which are
            not trained on, decide how much of the training stays. The clip is "auto" if none is given.
        **settings: Further settings of the mechanism, such as momentum, and `microbatch_size`, `diagnostics` and
            `adapted_to_public_data` of `PrivateModel.compile`.

    Returns:
        The private model with its plan and batches, ready for `fit`.

    Raises:
        TypeError: The model is of a class without `tfdp_rec.PrivateTraining`, or the data are no arrays.
        ValueError: The arrays differ in their number of rows or do not fit the model, or a value is out of range.

    Example:
        >>> import keras, numpy as np, tfdp_rec
        >>> ids = np.arange(1000) % 50
        >>> model = keras.Sequential([keras.layers.Embedding(50, 4), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> private = tfdp_rec.make_private(model, (ids, ids[:, None] / 50.0), epsilon=3.0, batch_size=100, epochs=2,
        ...                                 learning_rate=0.5, accountant="rdp")
        >>> history = private.fit(verbose=0)
        >>> private.plan.delta, 2.9 < history.history["epsilon"][-1] <= 3.0
        (0.0001, True)
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"make_private takes a Keras model and then its data, make_private(model, (x, y), ...), got a "
            f"{type(model).__name__} first."
        )
    if others:
        raise TypeError(_APART)
    for name in settings:
        if name in _REFUSED:
            raise TypeError(_REFUSED[name])
        if near := [] if name in _SETTINGS else difflib.get_close_matches(name, _SETTINGS, 1, cutoff=0.8):
            raise TypeError(f"make_private takes no {name}=; did you mean {near[0]}=?")
    if epochs is not None and (not isinstance(epochs, (int, np.integer)) or epochs < 1):
        raise ValueError(f"epochs must be a whole number from 1, got {epochs!r}.")
    if isinstance(learning_rate, (int, float)):
        refuse_below(0, learning_rate=learning_rate)
    names = input_names(model)
    data = arrays_of(data, names, type(model) is keras.Sequential)
    rows = number_of_rows(data)
    units, pick = rows_of_units(unit, rows)
    if unit is None:
        warn_of_users(data, names, rows)
    unit = None if isinstance(unit, str) else unit
    if unit is not None:
        warn_of_own_ids(data, names, unit)
    name_of_unit = "row" if unit is None else "user"
    trained, held_out = hold_out(units) if begin_at else (np.arange(units), None)
    units = len(trained)
    if plan is not None:
        _refuse_other_plan(plan, units, name_of_unit, (epsilon, batch_size, epochs, delta, reliability, begin_at))
        batch_size = int(plan.sampling.expected_batch_size)
        epochs = math.ceil(plan.steps / math.ceil(units / batch_size))
    elif epsilon is None:
        raise TypeError("make_private needs epsilon=, the largest epsilon of the whole training.")
    else:
        delta = 10.0 ** math.floor(math.log10(0.1 / units) + 1e-9) if delta is None else delta
        if batch_size is None or epochs is None:
            values = sum(array.size for array in tf.nest.flatten(data)) // rows
            batch_size, epochs = choose_batches(units, values, epsilon, delta, batch_size, epochs)
        sampling = PoissonSampling(units, batch_size, unit=name_of_unit)
    steps_per_epoch = math.ceil(units / batch_size)
    kind = _mechanism(mechanism)
    _warn_of_earlier_steps(model)
    private, compiled = private_form(model, data), compile_options(model)
    further: dict[str, Any] = {**settings}
    compiled |= {name: further.pop(name) for name in OPTIONS if name in further}
    _refuse_unfit(private, compiled, data)
    compared = "loss" in compiled and not find_own_losses(private)
    look_at_numbers(data, private.inputs if names else None, compared, _is_of_clicks(compiled.get("loss")))
    start, loss = None, compiled.get("loss")
    if begin_at is not None:
        if begin_at != "counts" or find_own_losses(private) or not (_is_of_clicks(loss) or _is_of_classes(loss)):
            raise ValueError(
                "begin_at must be left out, or 'counts' for a model whose compiled loss is a BinaryCrossentropy or a "
                f"SparseCategoricalCrossentropy, got {begin_at!r}."
            )
        of_rows = np.arange(rows) if unit is None else unit_numbers(unit, rows)
        from_logits = bool(getattr(loss, "from_logits", False))
        start = HeadStart(private, data, of_rows, held_out, _is_of_clicks(loss), from_logits)
        private = start.model
    release = None
    if reliability is not None:
        release = _Release(reliability, data, unit, _click_loss(compiled, data, private), name_of_unit)
    if plan is None:
        assert epsilon is not None and delta is not None
        plan = PrivatePlan(
            sampling=sampling, epsilon=epsilon, delta=delta, steps=steps_per_epoch * epochs,
            l2_norm_clip=settings.get("l2_norm_clip", "auto" if start else 1.0), accountant=accountant,
            spent=[
                *([release.use] if release else []),
                *(start.price(epsilon, delta, name_of_unit, accountant) if start else []),
            ],
        )
    if learning_rate is None and further.get("table_rule") is not None:
        raise ValueError("table_rule= needs learning_rate=: there is a default for plain SGD alone.")

    def compile_for(model: PrivateModel, plan: PrivatePlan, dense: Any, options: dict[str, Any]) -> None:
        own = further | ({} if dense is None else {"dense_optimizer": dense})
        if learning_rate is None and "dense_optimizer" not in own:
            own["dense_optimizer"] = first_dense_optimizer(plan.steps, further.get("weight_decay") or 0.0)
        model.compile(kind(_SMALL if learning_rate is None else learning_rate, plan=plan, **own), **options)

    def prepare(model: PrivateModel, plan: PrivatePlan, batches: tf.data.Dataset) -> None:
        model.prepare(batches.element_spec)
        if learning_rate is None:  # known only now: it depends on the widths of tables, and so on the traced loss
            model.optimizer.learning_rate = first_rate(model.optimizer, plan.steps)

    def make_ready(model: PrivateModel, plan: PrivatePlan, batches: tf.data.Dataset) -> None:
        """As the training's own model is made ready, with an optimizer and without metrics of it."""
        dense = further.get("dense_optimizer")
        copied = type(dense).from_config(dense.get_config()) if isinstance(dense, keras.Optimizer) else None
        compile_for(model, plan, copied, {key: each for key, each in compiled.items() if "metrics" not in key})
        prepare(model, plan, batches)

    compile_for(private, plan, None, compiled)
    if release:
        release.predictions.trace(private)
    if start:
        start.freeze_bias()
        start.predictions.of(private)  # what fails for a row fails before it is paid for

    def fetch(drawn: np.ndarray) -> Any:
        chosen = pick(trained[drawn])  # once: features and labels are of the same rows
        return tf.nest.map_structure(lambda array: array[chosen], data)

    batches = plan.batches(fetch)
    prepare(private, plan, batches)
    if start:
        start.begin()
    return PrivateFit(private, plan, batches, steps_per_epoch, epochs, data, release, make_ready, start)


def _refuse_other_plan(plan: PrivatePlan, units: int, name_of_unit: str, others: tuple[Any, ...]) -> None:
    if any(each is not None for each in others):
        raise TypeError("plan= decides epsilon, batch_size, epochs, delta, reliability and begin_at: leave those out.")
    if not isinstance(plan.sampling, PoissonSampling) or (plan.sampling.num_units, plan.sampling.unit) != (
        units, name_of_unit,
    ):  # fmt: skip
        raise ValueError(
            f"The data are of {units:,} units, each a {name_of_unit}, and the plan of {plan.sampling.describe()}: plan "
            f'with tfdp_rec.data.PoissonSampling({units}, batch_size, unit="{name_of_unit}").'
        )


def _mechanism(name: Any) -> Any:
    known = {mechanism.class_name: mechanism for mechanism in MECHANISMS}
    asked = str(getattr(name, "__name__", name))  # the class itself, or its name in any case, as Keras takes "adam"
    name = next((each for each in known if each.lower() == asked.lower()), asked)
    if name not in known:
        raise ValueError(f"mechanism must be one of {', '.join(known)}, got {name!r}.")
    if not known[name].claims_epsilon:
        raise ValueError(f"{name} has no epsilon that noise could be computed for: compile with tfdp_rec.{name}(...).")
    if known[name].own:
        raise ValueError(
            f"{name} needs {', '.join(known[name].own)}, which make_private cannot choose: compile a "
            f"tfdp_rec.PrivateModel with tfdp_rec.{name}(..., plan=tfdp_rec.PrivatePlan(...))."
        )
    return getattr(optimizers, name)


def _refuse_unfit(private: Any, compiled: Mapping[str, Any], data: Any) -> None:
    # What Keras would say in the middle of the tracing, of data that the compiled loss or the layers cannot take.
    if "loss" in compiled and not find_own_losses(private) and not (isinstance(data, tuple) and len(data) in (2, 3)):
        raise ValueError("The compiled loss compares predictions with y: give make_private(model, (x, y), ...).")
    made_of_layers = isinstance(private, functional_class())
    if "loss" in compiled and not find_own_losses(private) and has_text(data[1:]):
        raise ValueError(
            "y holds text, and a loss compares numbers: give numbers, such as (labels == 'yes').astype('float32')."
        )
    if made_of_layers and has_text(data) and not any(isinstance(each, _TAKE_TEXT) for each in layers_within(private)):
        raise ValueError(
            "The data hold text, and the model has no layer that numbers it: begin with "
            "keras.layers.StringLookup(vocabulary=...), whose vocabulary is public, or give numbers."
        )


def _is_of_clicks(loss: Any) -> bool:
    named = isinstance(loss, str) and loss.replace("_", "").lower() == "binarycrossentropy"
    return named or isinstance(loss, keras.losses.BinaryCrossentropy)


def _is_of_classes(loss: Any) -> bool:
    named = isinstance(loss, str) and loss.replace("_", "").lower() == "sparsecategoricalcrossentropy"
    return named or isinstance(loss, keras.losses.SparseCategoricalCrossentropy)


def _click_loss(compiled: Mapping[str, Any], data: Any, model: Any) -> bool:
    """Whether a click model gives logits; refused now, rather than after the training, if it is none."""
    loss = compiled.get("loss")
    if not _is_of_clicks(loss):
        raise ValueError(
            "reliability= is for models of clicks, whose loss is keras.losses.BinaryCrossentropy; for others, "
            "tfdp_rec.privacy.private_reliability takes logits and clicks."
        )
    one_each = isinstance(data, tuple) and len(data) == 2 and getattr(data[1], "size", -1) == len(data[1])
    if not one_each or not np.isin(data[1], (0, 1)).all():
        raise ValueError("reliability= takes data (x, y) without weights, with one click, 0 or 1, in each row of y.")
    from_logits = bool(getattr(loss, "from_logits", False))
    last = [layer.name for layer in model.layers[-1:] if getattr(layer, "activation", 0) is keras.activations.linear]
    if last and not from_logits:
        raise ValueError(
            f"Layer '{last[0]}' gives logits, and the loss takes probabilities: "
            "loss=keras.losses.BinaryCrossentropy(from_logits=True)."
        )
    return from_logits


def _warn_of_earlier_steps(model: keras.Model) -> None:
    optimizer = model.optimizer if model.compiled else None
    steps = 0 if optimizer is None else int(keras.ops.convert_to_numpy(optimizer.iterations))  # of a strategy's, too
    if steps and not isinstance(model.optimizer, optimizers.PrivateOptimizer):
        warnings.warn(
            f"The model was trained before, for {steps} steps of {type(model.optimizer).__name__}. No epsilon covers "
            "those: if they used these data, begin with a new model.",
            stacklevel=3,
        )
