"""Training checkpoints: states from which training continues.

A checkpoint is a settled state: all noise that rows owe is drawn before it is written, so that it holds what a release
would hold at that step, beside what only training needs. It is one file, `NNNNNN-step-S.training-checkpoint`, that no
Keras function loads, readable by its owner alone. Keep it as private as the data: under correlated noise it holds the
buffers, with which noise that was released can be subtracted. It holds no noise key.

- It is complete or not there: written under another name, synced, renamed; the one before it stays until then.
- A step is paid for in the ledger before it is made. A run that was killed goes on from its last checkpoint, and the
  steps since then stay spent, whoever has looked at them. So a checkpoint needs a ledger, unless no ε is claimed.
- A state that leaves training, as at the end of `fit`, of whatever kind, is in a checkpoint first.
- Correlated noise is paid for once, for one course of its plan. So a copy or an older checkpoint is refused by its id
  in the ledger (`core/claim/spending.py`), steps are made in `fit` alone, and callbacks that may read weights within an
  epoch are refused. Where no checkpoint can be written the model is erased: nothing leaves of which none knows.

Layout: a zip archive of `training_checkpoint.json` and the raw little-endian values of each variable, in chunks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import secrets
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.entries import Entries
from tfdp_rec.core.claim.events import NonPrivateDpEvent
from tfdp_rec.core.claim.ledger import Ledger, Mark
from tfdp_rec.core.ground.files import hold, open_atomically, row_chunks
from tfdp_rec.core.ground.keras_internals import begin_at_epoch
from tfdp_rec.core.ground.withheld_rows import find_withheld, rows_of
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.mechanism.checks import regularizer_decay
from tfdp_rec.core.mechanism.kept import allow_steps, is_cut_short, kept_variables, restoration
from tfdp_rec.core.mechanism.tables import scatter

SUFFIX = ".training-checkpoint"
_HEADER, _VERSION = "training_checkpoint.json", 4
_NAME = re.compile(rf"(\d+)-step-(\d+){re.escape(SUFFIX)}$")
_MAY_DIFFER = ("name", "learning_rate", "noise", "secure", "dense_optimizer")  # none of these touches the guarantee
_CHUNK_VALUES = 1 << 22
_OWN_STOP = "the resumed epoch has all its steps"  # a value of `stop_training`, which is true; others set True


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Place at which a training continues.

    Attributes:
        step: Number of steps made; also the number of batches used of a seeded sampling (`position`).
        epoch: Number of the epoch that continues, as `fit` counts them.
        steps_in_epoch: Number of steps of that epoch that are made; `fit` makes the others.
    """

    step: int
    epoch: int
    steps_in_epoch: int


class TrainingCheckpoint(keras.callbacks.Callback):
    """Writes training checkpoints during `fit`, and resumes from the last one.

    Args:
        directory: Directory of the checkpoints; made if missing. One training, one directory.
        every: Number of steps between checkpoints; None for the ends of epochs alone.
        accountant: Accountant of the training, with a ledger; None for a mechanism that claims no ε.

    Raises:
        ValueError: `every` is not positive; in `fit` and `resume`, the accountant has no ledger; in `fit`, the last
            checkpoint of the directory is not the one that was resumed from or written, or another process trains with
            the directory.
        TypeError: In `fit` and `resume`, the model was not compiled with a mechanism of this package.

    Example:
        >>> import keras, os, tempfile, tfdp_rec
        >>> inputs = keras.Input([4])
        >>> model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
        >>> optimizer = tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=8)
        >>> model.compile(optimizer=optimizer, loss="mse")
        >>> sampling, folder = tfdp_rec.data.PoissonSampling(num_units=1000, expected_batch_size=8), tempfile.mkdtemp()
        >>> accountant = tfdp_rec.privacy.Accountant(
        ...     optimizer.dp_event(), sampling, delta=1e-4, ledger=os.path.join(folder, "ledger.jsonl")
        ... )
        >>> checkpoint = TrainingCheckpoint(os.path.join(folder, "training"), every=100, accountant=accountant)
        >>> checkpoint.resume(model) is None  # nothing there yet: train from the beginning
        True
    """

    keeps_off_weights = True  # this one settles by itself (`release_methods.add_release_callback`)

    def __init__(
        self, directory: str | os.PathLike[str], every: int | None = None, accountant: Accountant | None = None
    ):
        super().__init__()
        if every is not None and (int(every) != every or every < 1):
            raise ValueError(f"every must be a positive number of steps or None, got {every!r}.")
        self.directory = os.path.abspath(directory)
        self.every, self.accountant = every, accountant
        self._resumed: Resumed | None = None
        self._epoch, self._to_skip = 0, 0
        self._epoch_began: int | None = None  # number of steps made before the present epoch; None between epochs
        self._checked = 0  # number of steps when the last checkpoint was written, or the fit began
        self._names: tuple[str, ...] = ()  # of the last checkpoint, and of one that is being written
        self._trained: Any = None  # the model whose states are kept
        self._saved: Any = None  # the state of the last checkpoint

    # Hooks of fit.

    def on_train_begin(self, logs: Any = None) -> None:
        self._begin(self.model)
        self._refuse_others()
        if self.accountant is not None:
            self.accountant.follow(self.model)
        self._to_skip = self._resumed.steps_in_epoch if self._resumed else 0
        if self._resumed is not None:
            begin_at_epoch(self.model, self._resumed.epoch)
        self._checked = self._steps()
        self._keep(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        begin_at_epoch(self.model, None)
        self._epoch, self._epoch_began = epoch, self._steps() - self._to_skip
        self._resumed = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.every is not None and self._steps() - self._checked >= self.every:
            self.save()
        # A resumed epoch ends early by the steps that were made before.
        all_made = self._to_skip and self._steps_in_epoch >= (self.params.get("steps") or float("inf"))
        if all_made and not self.model.stop_training:
            self.model.stop_training = _OWN_STOP

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.model.stop_training is _OWN_STOP:
            self.model.stop_training = False
        self._epoch, self._epoch_began, self._to_skip = epoch + 1, None, 0
        self.save()

    def on_train_end(self, logs: Any = None) -> None:
        begin_at_epoch(self.model, None)  # the next fit begins where its caller says
        self._resumed = None

    # The keeper of an optimizer's states.

    @property
    def steps_ahead(self) -> float:
        """Number of steps until the next checkpoint, as far as it is known: no more are paid for ahead."""
        steps = (self.params or {}).get("steps") or math.inf
        return min(steps - self._steps_in_epoch, (self.every or math.inf) - (self._steps() - self._checked))

    def save_before_release(self, optimizer: PrivateOptimizer) -> None:
        """Writes the present state, which is settled, unless the last checkpoint is of it."""
        if self._is_kept(optimizer):
            return
        if is_cut_short(optimizer):
            raise RuntimeError(
                "A step was cut short, so that weights and noise no longer belong together. Make the model anew and "
                f"resume from the last checkpoint in {self.directory}, which is of the steps before."
            )
        try:
            self.save()
        except OSError as problem:
            if optimizer.correlates_noise:
                raise
            warnings.warn(  # each step is paid for: what leaves is told
                f"No training checkpoint could be written ({problem}): the training goes on from the one before.",
                stacklevel=2,
            )

    def erase_unkept(self, optimizer: PrivateOptimizer) -> None:
        """Erases a state of a plan of noise that no checkpoint knows, where a release has failed."""
        # A plan is paid for once, and goes on from its checkpoint. Dense weights are not withheld.
        if optimizer.correlates_noise and not self._is_kept(optimizer):
            _erase_weights(self.model)

    def _is_kept(self, optimizer: PrivateOptimizer) -> bool:
        # Whether the last checkpoint is of an optimizer's state; one that the model has left makes no further step.
        self.set_model(self._trained)  # Keras gives a callback other models, with which it was refused
        present = optimizer is self.model.optimizer
        return not present or (self._state() == self._saved and not is_cut_short(optimizer))

    def _keep(self, model: Any) -> None:
        self._trained, model.optimizer.keeper = model, self

    # Saving.

    def save(self) -> str:
        """Writes a checkpoint of the present state, settled; returns its path."""
        if self._trained is None:
            raise ValueError("A TrainingCheckpoint saves a model that it was given: call resume(model), or fit, first.")
        optimizer = self.model.optimizer
        hold(self.directory)
        self._refuse_others()
        self._keep(self.model)
        self.model.private_weights.settle()
        older = self._paths()
        number = 1 + max((int(_NAME.search(path).group(1)) for path in older), default=0)  # type: ignore[union-attr]
        path = os.path.join(self.directory, f"{number:06d}-step-{self._steps()}{SUFFIX}")
        state, id = self._state(), secrets.token_hex(8)
        self._names = (*self._names[-1:], os.path.basename(path))
        with open_atomically(path, "wb", private=True) as whole, zipfile.ZipFile(whole, "w") as archive:
            archive.writestr(_HEADER, json.dumps(self._header(id), indent=1))
            for name, variable in _variables(self.model):
                with archive.open(name, "w", force_zip64=True) as file:
                    file.writelines(_chunks(variable))
            self._note(optimizer, id, done=False)
        self._names, optimizer.state_id = self._names[-1:], id
        self._note(optimizer, id)
        for path_before in older:
            os.remove(path_before)
        self._saved, self._checked = state, self._steps()
        return path

    def _note(self, optimizer: PrivateOptimizer, id: str, done: bool = True) -> None:
        if self.accountant is not None and optimizer.correlates_noise:
            payments = self.accountant.spending.payments
            payments.note_checkpoint(optimizer.training_id, optimizer.state_id, id, done)

    def _header(self, id: str) -> dict[str, Any]:
        optimizer = self.model.optimizer
        return {
            "format": "tfdp_rec training checkpoint",
            "version": _VERSION,
            "training": optimizer.training_id,
            "state": id,
            **_identity(self.model, optimizer),
            "regularizers": _decays(optimizer),
            "variables": [[name, v.shape.as_list(), v.dtype.name] for name, v in _variables(self.model)],
            "step": self._steps(),
            "epoch": self._epoch,
            "steps_in_epoch": self._steps_in_epoch,
            "steps_per_epoch": (self.params or {}).get("steps"),
            "history": optimizer.privacy_history.snapshot().dumps(),
            "mark": None if self.ledger is None else dataclasses.asdict(self.ledger.mark),
        }

    def _steps(self) -> int:
        return int(self.model.optimizer.iterations.numpy())

    @property
    def _steps_in_epoch(self) -> int:
        # The number of steps of the present epoch that are made; an optimizer compiled since counts its own alone.
        return 0 if self._epoch_began is None else max(0, self._steps() - self._epoch_began)

    def _state(self) -> Any:
        # What tells one state of a plan from another; a failed step counts, too.
        return self._steps(), self.model.optimizer.privacy_history.snapshot().dumps()

    def _begin(self, model: Any) -> None:
        optimizer = getattr(model, "optimizer", None)
        if not isinstance(optimizer, PrivateOptimizer):
            raise TypeError(
                f"TrainingCheckpoint needs a private optimizer such as tfdp_rec.LazyDPSGD, got {optimizer!r}."
            )
        if self.ledger is None and not isinstance(optimizer.dp_event(), NonPrivateDpEvent):
            raise ValueError(
                "TrainingCheckpoint needs a ledger, which knows the steps that a killed run has made since its last "
                "checkpoint: TrainingCheckpoint(..., accountant=accountant), whose accountant or PrivatePlan was made "
                "with ledger=."
            )
        self._refuse_other(model)
        hold(self.directory)
        for name in os.listdir(self.directory) if os.path.isdir(self.directory) else []:
            if name.startswith(".") and name.endswith(SUFFIX):  # what a killed process had begun to write
                os.remove(os.path.join(self.directory, name))

    def _refuse_others(self) -> None:
        # A checkpoint of another callback, process or model would be replaced, and with it what was spent there.
        last = self.latest()
        if last is None:
            return
        if os.path.basename(last) not in self._names:
            raise ValueError(
                f"{last} is of an earlier training, or of another model, whose privacy cost would be forgotten: call "
                "resume(model) before fit, or use another directory."
            )
        self._refuse_other(self.model)

    def _refuse_other(self, model: Any) -> None:
        if self._trained not in (None, model):
            raise ValueError(
                f"{self.directory} is of another model than the one in training: give each model a TrainingCheckpoint "
                "and a directory of its own."
            )

    @property
    def ledger(self) -> Ledger | None:
        """The ledger of its accountant, if there is one."""
        return None if self.accountant is None else self.accountant.spending.payments.ledger

    def _paths(self) -> list[str]:
        names = os.listdir(self.directory) if os.path.isdir(self.directory) else []
        found = sorted((int(m.group(1)), name) for name in names if (m := _NAME.match(name)))
        return [os.path.join(self.directory, name) for _, name in found]

    # Resuming.

    def latest(self) -> str | None:
        """The path of the last checkpoint, or None."""
        return (self._paths() or [None])[-1]  # type: ignore[list-item]

    def resume(self, model: Any) -> Resumed | None:
        """Restores a model, its optimizer and its history from the last checkpoint; None if there is none.

        Then call `fit` with the same arguments: it continues in the epoch of the checkpoint. Batches of a sampling with
        a seed continue at `position=resumed.step`; without a seed they are drawn afresh.

        Args:
            model: Model, built, and compiled with a mechanism made with the same arguments.

        Raises:
            ValueError: The checkpoint is of another mechanism, other settings or other tables; both values are named.
        """
        self._begin(model)
        optimizer, path = model.optimizer, self.latest()
        if path is None:
            self._trained = model
            self.set_model(model)
            return None
        with _open(path) as archive:
            header = json.loads(archive.read(_HEADER))
            self._check(header, model, optimizer)
            if self.accountant is not None and optimizer.correlates_noise:
                self.accountant.spending.payments.refuse_superseded(header["training"], header["state"])
            # What was spent first: an interruption on the way lets nothing out that is not told.
            optimizer.privacy_history.merge(Entries.loads(header["history"]))
            if not is_cut_short(optimizer):  # the rows that stand here owe by marks that are now replaced
                model.private_weights.settle()
            variables = dict(_variables(model))
            with restoration(optimizer):
                for name, _, _ in header["variables"]:
                    with archive.open(name) as file:
                        _read(variables[name], file)
            for variable in (*model.variables, *optimizer.variables):
                if (places := find_withheld(variable)) is not None:
                    places.publish()  # the file's rows, which owe nothing: a step measures them
        self.set_model(model)
        self._keep(model)
        optimizer.training_id, optimizer.state_id = header["training"], header["state"]
        if self.accountant is not None:
            self.accountant.set_event(optimizer.dp_event())  # of the plan that goes on
            self.accountant.follow(model)
        self._names, self._saved = (os.path.basename(path),), self._state()
        self._resumed = _read_position(header)
        self._epoch, self._epoch_began = self._resumed.epoch, self._steps() - self._resumed.steps_in_epoch
        allow_steps(optimizer, False)  # till fit
        if optimizer.correlates_noise:
            self.save()  # under another id, so that no copy of the directory is resumed from now on
        return self._resumed

    def _check(self, header: dict[str, Any], model: Any, optimizer: PrivateOptimizer) -> None:
        if not model.built:
            raise ValueError("Build the model before resuming: call model.prepare(batch) with any batch.")
        _refuse_difference("version", header["version"], _VERSION)
        mine = json.loads(json.dumps(_identity(model, optimizer), default=str))
        for what in ("mechanism", "settings", "tables"):
            _refuse_difference(what, header[what], mine[what])
        if not optimizer.built:
            model.private_tables.build(header["table_numbers"])
        _refuse_difference("table_numbers", header["table_numbers"], model.private_tables.numbers)
        _refuse_difference("regularizers of tables", header["regularizers"], _decays(optimizer))
        mine_now = {name: [v.shape.as_list(), v.dtype.name] for name, v in _variables(model)}
        theirs = {name: [shape, kind] for name, shape, kind in header["variables"]}
        _refuse_difference("variables", theirs, mine_now)
        if self.ledger is not None and header["mark"]:  # the ledger holds no less than it did then
            self.ledger.refuse_without(Mark(**header["mark"]))


def _open(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as problem:
        raise ValueError(f"{path} is damaged ({problem}): bring back a copy of the last checkpoint.") from problem


def _identity(model: Any, optimizer: PrivateOptimizer) -> dict[str, Any]:
    # What must be the same when training continues: mechanism, constructor's settings, weights' shapes.
    config = optimizer.get_config()
    weights = model.trainable_variables
    return {
        "mechanism": keras.saving.get_registered_name(type(optimizer)),
        "settings": {k: v for k, v in config.items() if k not in _MAY_DIFFER},
        "tables": {f"weights {i}": list(v.shape) for i, v in enumerate(weights) if len(v.shape) == 2},
        "table_numbers": model.private_tables.numbers,
    }


def _decays(optimizer: PrivateOptimizer) -> dict[str, float]:
    # The decay of each table that has one of its own, by its number.
    found = {f"weights {table.number}": regularizer_decay(table.variable) for table in optimizer.tables.values()}
    return {name: decay for name, decay in found.items() if decay}


def _variables(model: Any) -> Iterator[tuple[str, tf.Variable]]:
    # Names and TensorFlow variables of all that training depends on; metrics start anew with every epoch.
    metrics = {id(v) for v in model.metrics_variables}
    for kind, variables in (("model", model.variables), ("optimizer", model.optimizer.variables)):
        kept = [v for v in variables if id(v) not in metrics]
        yield from ((f"{kind}/{i}", rows_of(v)) for i, v in enumerate(kept))
    yield from ((f"kept/{name}", v) for name, v in kept_variables(model.optimizer).items())


def _chunks(variable: tf.Variable) -> Iterator[bytes]:
    # A variable's values, some rows at a time.
    if not variable.shape.rank:
        yield variable.numpy().tobytes()
        return
    for start, end in row_chunks(variable.shape.as_list(), _CHUNK_VALUES):
        yield tf.gather(variable, tf.range(start, end)).numpy().tobytes()


def _read(variable: tf.Variable, file: Any) -> None:
    # Reads what `_chunks` wrote.
    kind = np.dtype(variable.dtype.as_numpy_dtype)
    _fill(variable, lambda number: np.frombuffer(file.read(number * kind.itemsize), kind))
    if file.read(1):
        raise ValueError(f"'{variable.name}' has more values in the checkpoint than its shape {variable.shape} allows.")


def _fill(variable: tf.Variable, take: Callable[[int], np.ndarray]) -> None:
    # Gives a variable its next values, some rows at a time.
    shape = variable.shape.as_list()
    if not shape:
        variable.assign(take(1).reshape(shape))
        return
    width = math.prod(shape[1:])
    for start, end in row_chunks(shape, _CHUNK_VALUES):
        values = take((end - start) * width).reshape([end - start, *shape[1:]])
        scatter("Update", variable, tf.range(start, end), tf.constant(values))


def _erase_weights(model: Any) -> None:
    # Weights of a state that no checkpoint knows; no further step is made from them. Other models on them show NaN.
    model.optimizer.course.mark_unfinished(1)
    for _, variable in _variables(model):
        if variable.dtype.is_floating:
            kind = variable.dtype.as_numpy_dtype
            _fill(variable, lambda number, kind=kind: np.full(number, math.nan, kind))  # type: ignore[misc]


def _read_position(header: dict[str, Any]) -> Resumed:
    epoch, done, steps = header["epoch"], header["steps_in_epoch"], header["steps_per_epoch"]
    if steps and done >= steps:
        epoch, done = epoch + 1, 0
    return Resumed(header["step"], epoch, done)


def _refuse_difference(what: str, theirs: Any, mine: Any) -> None:
    if theirs == mine:
        return
    if isinstance(theirs, dict) and isinstance(mine, dict):
        keys = [k for k in {**theirs, **mine} if theirs.get(k) != mine.get(k)]
        difference = "; ".join(f"{k}: {theirs.get(k)} in the checkpoint, {mine.get(k)} here" for k in keys)
    else:
        difference = f"{theirs} in the checkpoint, {mine} here"
    raise ValueError(f"This training checkpoint is of another training ({what}): {difference}.")
