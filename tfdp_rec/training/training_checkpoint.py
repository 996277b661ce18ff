"""Training checkpoints: states from which training continues, not models to release.

Rows in a training checkpoint may still owe noise, and its marks say how much. It is one file,
`NNNNNN-step-S.training-checkpoint`, that no Keras function loads, readable by its owner alone. Keep it as private as
the data.

- It does not settle: pending noise stays pending, and is drawn after resuming. It holds no noise key. (Tables that
  several models train are settled first: what the others owe is in no file of this model.)
- It is complete or not there: written under another name, synced, renamed; the one before it stays until then.
- A release is never forgotten. Whenever weights are about to leave training (by an evaluation, `ModelCheckpoint`,
  `model.save`, at the end of an epoch or of any fit), the settled state is checkpointed first, as long as the last
  checkpoint is there. Otherwise a run killed after a release would resume from before it, draw other noise for the same
  gradients, and count its steps once where two releases had spent them; and a checkpoint that was resumed and released
  k times would give its pending noise k times, to be averaged away. For the same reason a copy of the directory, or an
  older checkpoint, is refused under a ledger (`core/claim/payments.py`). Callbacks that may read weights within an
  epoch by ways that cannot be seen are refused, as are steps outside of `fit`. The states are in docs/privacy-lazy.md.
- ε counts each step once, by the model's privacy history; a step that was cut short may have run, and is counted.

Layout: a zip archive of `training_checkpoint.json` and the raw little-endian values of each variable, in chunks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import secrets
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.entries import Entries
from tfdp_rec.core.claim.events import PlannedDpEvent
from tfdp_rec.core.claim.ledger import Ledger, Mark
from tfdp_rec.core.ground.files import hold, row_chunks, writing
from tfdp_rec.core.ground.keras_internals import begin_at_epoch
from tfdp_rec.core.ground.withheld_rows import held_rows
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.mechanism.checks import regularizer_decay
from tfdp_rec.core.mechanism.tables import scatter
from tfdp_rec.training.release import debts_of

SUFFIX = ".training-checkpoint"
_HEADER, _VERSION = "training_checkpoint.json", 3
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
        accountant: Accountant that follows the model; its records are kept and restored. With a ledger it notes each
            checkpoint there, so that a copy, or an older one, is refused.
        sampling: Sampling scheme, if there is no accountant to keep it.

    Raises:
        ValueError: `every` is not positive; in `fit`, the last checkpoint of the directory is not the one that was
            resumed from or written, or another process trains with the directory, or correlated noise has no ledger.
        RuntimeError: At a release, no checkpoint can be written of what would leave.
        TypeError: In `fit` and `resume`, the model was not compiled with a mechanism of this package.

    Example:
        >>> import keras, tempfile, tfdp_rec
        >>> inputs = keras.Input([4])
        >>> model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
        >>> optimizer = tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=8)
        >>> model.compile(optimizer=optimizer, loss="mse")
        >>> checkpoint = TrainingCheckpoint(tempfile.mkdtemp(), every=100)
        >>> checkpoint.resume(model) is None  # nothing there yet: train from the beginning
        True
    """

    keeps_off_weights = True  # this one wants them as they are (`release.settling_ahead`)

    def __init__(
        self, directory: str | os.PathLike[str], every: int | None = None, accountant: Accountant | None = None,
        sampling: Any = None,
    ):
        super().__init__()
        if every is not None and (int(every) != every or every < 1):
            raise ValueError(f"every must be a positive number of steps or None, got {every!r}.")
        self.directory = os.path.abspath(directory)
        self.every, self.accountant = every, accountant
        self._sampling = sampling if accountant is None else accountant.sampling
        self._resumed: Resumed | None = None
        self._epoch, self._to_skip = 0, 0
        self._epoch_began: int | None = None  # number of steps made before the present epoch; None between epochs
        self._saved: _State | None = None  # of the checkpoint that was last written or resumed from
        self._checked = 0  # number of steps when the last checkpoint was written, or the fit began
        self._last: _File | None = None
        self._kept: Any = None  # the model whose checkpoint that is
        self._resuming = False

    # Hooks of fit.

    def on_train_begin(self, logs: Any = None) -> None:
        self._refuse_plan_without_ledger(_private_optimizer(self.model))
        hold(self.directory)
        self._clean_up()
        self._refuse_others()
        if self.accountant is not None:
            self.accountant.follow(self.model)
        self._to_skip = self._resumed.steps_in_epoch if self._resumed else 0
        if self._resumed is not None:
            begin_at_epoch(self.model, self._resumed.epoch)
        self._checked = self._steps()
        self._guard_releases()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        begin_at_epoch(self.model, None)
        self._epoch, self._epoch_began = epoch, self._steps() - self._to_skip
        self._resumed = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.every is not None and self._steps() - self._checked >= self.every:
            self.save()
        # A resumed epoch ends early by the steps that were made before.
        all_made = self._to_skip and self._done >= (self.params.get("steps") or float("inf"))
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

    # A listener of `release.py`, from `fit` or `resume` on.

    @property
    def place(self) -> str:
        """The directory; a later callback for it replaces this one."""
        return os.path.realpath(self.directory)

    @property
    def is_needed(self) -> bool:
        """Whether a training can be resumed here; no more when the last checkpoint was removed."""
        return self._last is None or self._last.exists or self.latest() is not None

    @property
    def is_done(self) -> bool:
        """Whether the present state is in a checkpoint."""
        state = self._state()
        if _made_steps(self.model):
            return state == self._saved
        return self._saved is None or state.history == self._saved.history  # the model was compiled anew

    @property
    def steps_ahead(self) -> float:
        """Number of steps until the next checkpoint, as far as it is known."""
        steps = (self.params or {}).get("steps") or math.inf
        return min(steps - self._done, (self.every or math.inf) - (self._steps() - self._checked))

    def before_release(self) -> None:
        """Writes a checkpoint of the present state unless the last one is of it."""
        if not self.is_needed:  # what leaves is in no checkpoint: a copy of the last one does not continue from it
            if _made_steps(self.model) and not self.is_done:
                self._note(secrets.token_hex(8))
                self._saved = self._state()
            return
        if self._resuming:
            raise RuntimeError(
                f"The resumption from {self.directory} was interrupted, and each look at a part of a checkpoint would "
                "draw its noise anew: resume again."
            )
        if self.is_done:
            return
        if not _made_steps(self.model):
            raise RuntimeError(
                f"The model was compiled with {type(self.model.optimizer).__name__} and trained on, which no training "
                f"checkpoint keeps: remove {self.directory} if its training is done."
            )
        if self.model.optimizer.is_cut_short and self.latest() is not None:  # the last one can be gone on from
            raise RuntimeError(
                "A step was cut short, so that weights and noise no longer belong together. Make the model anew and "
                f"resume from {self.latest()}, which is of the steps before; or remove {self.directory} to release "
                "the model as it stands, from which no training continues."
            )
        self.save()

    # Saving.

    def save(self) -> str:
        """Writes a checkpoint of the present state, not settled; returns its path."""
        with self.model.release.in_reach():
            return self._save()

    def _save(self) -> str:
        hold(self.directory)
        self._refuse_others()
        _settle_shared(self.model)
        older = self._paths()
        number = 1 + max((int(_NAME.search(path).group(1)) for path in older), default=0)  # type: ignore[union-attr]
        path = os.path.join(self.directory, f"{number:06d}-step-{self._steps()}{SUFFIX}")
        state, id = self._state(), secrets.token_hex(8)
        with writing(path, "wb", private=True) as whole, zipfile.ZipFile(whole, "w") as archive:
            archive.writestr(_HEADER, json.dumps(self._header(id), indent=1))
            for name, variable in _variables(self.model):
                with archive.open(name, "w", force_zip64=True) as file:
                    file.writelines(_chunks(variable))
            self._note(id, done=False)
        self._last, self._kept = _File(path), self.model
        self._note(id)
        for path_before in older:
            os.remove(path_before)
        self._saved, self._checked = state, self._steps()
        return path

    def _note(self, id: str, done: bool = True) -> None:
        if self.accountant is not None:
            self.accountant.note_checkpoint(self.model.optimizer, id, done)
        if done:
            self.model.optimizer.state_id = id

    def _header(self, id: str) -> dict[str, Any]:
        optimizer = _private_optimizer(self.model)
        return {
            "format": "tfdp_rec training checkpoint, not a model to release: rows may still owe noise",
            "version": _VERSION,
            "training": optimizer.training_id,
            "state": id,
            **_identity(self.model, optimizer),
            "regularizers": _decays(optimizer),
            "variables": [[name, _shape(v), v.dtype.name] for name, v in _variables(self.model)],
            "step": self._steps(),
            "epoch": self._epoch,
            "steps_in_epoch": self._done,
            "steps_per_epoch": (self.params or {}).get("steps"),
            "history": optimizer.privacy_history.snapshot().dumps(),
            "carried": None if self.accountant is None else self.accountant.carried.dumps(),
            "mark": None if self._ledger is None else dataclasses.asdict(self._ledger.mark),
            "sampling": None if self._sampling is None else self._sampling.get_state(),
        }

    def _steps(self) -> int:
        return int(self.model.optimizer.iterations.numpy())

    @property
    def _done(self) -> int:
        # The number of steps of the present epoch that are made; an optimizer compiled since counts its own alone.
        return 0 if self._epoch_began is None else max(0, self._steps() - self._epoch_began)

    def _state(self) -> _State:
        history = self.model.saved_history()
        text = "" if history is None else history.dumps()
        if not _made_steps(self.model):
            return _State(text)
        optimizer = self.model.optimizer
        clock = optimizer.pending_variables.get("clock")
        clock = None if clock is None else int(clock.numpy())
        return _State(text, self._steps(), clock, getattr(optimizer, "releasable", True))

    def _refuse_others(self) -> None:
        # A checkpoint of another callback, process or model would be replaced, and with it what was spent there.
        last = self.latest()
        if last is None:
            return
        if self._last is None or os.path.basename(last) != os.path.basename(self._last.path) or not self._last.exists:
            raise ValueError(
                f"{last} is of an earlier training, or of another model, whose privacy cost would be forgotten: call "
                "resume(model) before fit, or use another directory."
            )
        if self._kept is not self.model:
            self.set_model(self._kept)  # whose releases this callback goes on to write
            raise ValueError(
                f"{last} is of another model than the one in training: give each model a TrainingCheckpoint and a "
                "directory of its own."
            )

    @property
    def _ledger(self) -> Ledger | None:
        payments = None if self.accountant is None else self.accountant.payments
        return None if payments is None else payments.ledger

    def _refuse_plan_without_ledger(self, optimizer: PrivateOptimizer) -> None:
        # Two that go on from copies of one checkpoint share the noise of its steps, and a ledger alone tells of copies.
        planned = isinstance(optimizer.dp_event(), PlannedDpEvent)
        if planned and self._ledger is None:
            raise ValueError(
                "Correlated noise goes on from its newest checkpoint alone, and only a ledger tells which that is: "
                "TrainingCheckpoint(..., accountant=accountant), whose accountant was made with ledger=."
            )

    def _paths(self) -> list[str]:
        names = os.listdir(self.directory) if os.path.isdir(self.directory) else []
        found = sorted((int(m.group(1)), name) for name in names if (m := _NAME.match(name)))
        return [os.path.join(self.directory, name) for _, name in found]

    def _clean_up(self) -> None:
        # A killed process leaves what it had begun to write.
        for name in os.listdir(self.directory) if os.path.isdir(self.directory) else []:
            if name.startswith(".") and name.endswith(SUFFIX):
                os.remove(os.path.join(self.directory, name))

    # Resuming.

    def latest(self) -> str | None:
        """The path of the last checkpoint, or None."""
        return (self._paths() or [None])[-1]  # type: ignore[list-item]

    def resume(self, model: Any) -> Resumed | None:
        """Restores a model, its optimizer and the accountant from the last checkpoint; None if there is none.

        Then call `fit` with the same arguments: it continues in the epoch of the checkpoint. Batches of a sampling with
        a seed continue at `position=resumed.step`; without a seed they are drawn afresh.

        Args:
            model: Model, built, and compiled with a mechanism made with the same arguments.

        Raises:
            ValueError: The checkpoint is of another mechanism, other settings or other tables; both values are named.
        """
        optimizer = _private_optimizer(model)
        self._refuse_plan_without_ledger(optimizer)
        hold(self.directory)
        path = self.latest()
        self._clean_up()
        self.set_model(model)
        if path is None:
            return None
        with model.release.in_reach(), _opened(path) as archive:
            header = json.loads(archive.read(_HEADER))
            self._check(header, model, optimizer)
            if self.accountant is not None:
                self.accountant.merge(Entries.loads(header["carried"] or header["history"]))
                self.accountant.refuse_superseded(header["training"], header["state"])
            # Until all of it stands here nothing leaves: each look would draw the pending noise anew.
            self._last, self._kept, self._saved, self._resuming = _File(path), model, None, True
            self._guard_releases()
            # What was spent, then what rows owe, then the weights: an interruption on the way lets nothing out that is
            # not told, or without its noise.
            optimizer.privacy_history.merge(Entries.loads(header["history"]))
            model.release.withhold()  # before rows come in that may owe noise
            # The weights that stand here owe by marks that are now replaced.
            if optimizer.is_cut_short:
                _erase_weights(model)
            else:
                optimizer.settle()
            variables, shapes = dict(_variables(model)), {name: shape for name, shape, _ in header["variables"]}

            def fill(names: Iterable[str]) -> None:
                for name in names:
                    with archive.open(name) as file:
                        _fill(variables[name], shapes[name], file)

            pending = [name for name in shapes if name.startswith("ledger/")]
            with optimizer.privacy_history.changing_plan():
                with optimizer.restore_pending():
                    fill(pending)
                fill(name for name in shapes if name not in pending)
            optimizer.training_id, optimizer.state_id = header["training"], header["state"]
            if self.accountant is not None:
                self.accountant.follow(model)
            self._resumed = _normalised(header)
            self._epoch, self._epoch_began = self._resumed.epoch, self._steps() - self._resumed.steps_in_epoch
            self._saved, self._resuming = self._state(), False
        if self._ledger is not None:
            self.save()  # under another id, so that no copy of the directory is resumed from now on
        return self._resumed

    def _guard_releases(self) -> None:
        # From now on what leaves the model is in a checkpoint first, whether or not a fit is going on, or one with this
        # callback.
        if self.model.optimizer.built:
            self.model.release.guard(self.model.optimizer)
        self.model.release.listen(self)

    def _check(self, header: dict[str, Any], model: Any, optimizer: PrivateOptimizer) -> None:
        if not model.built:
            raise ValueError("Build the model before resuming: call model.prepare(batch) with any batch.")
        _refuse_difference("version", header["version"], _VERSION)
        mine = json.loads(json.dumps(_identity(model, optimizer), default=str))
        for what in ("mechanism", "settings", "tables"):
            _refuse_difference(what, header[what], mine[what])
        if not optimizer.built:
            model.build_tables(header["table_numbers"])
        _refuse_difference("table_numbers", header["table_numbers"], model.table_numbers())
        _refuse_difference("regularizers of tables", header.get("regularizers", {}), _decays(optimizer))
        mine_now = {name: [_shape(v), v.dtype.name] for name, v in _variables(model)}
        theirs = {name: [shape, kind] for name, shape, kind in header["variables"]}
        for variables in (mine_now, theirs):
            for name in variables:
                if name.split("/")[:2] == ["ledger", "totals"]:
                    variables[name] = ["grows with the steps"]
        _refuse_difference("variables", theirs, mine_now)
        if self.accountant is None and header["carried"]:  # uses that are in no model's history
            raise ValueError(
                f"The training in {self.directory} was counted by an accountant, which may count more than the model "
                "carries: give TrainingCheckpoint an accountant."
            )
        if self._ledger is None and header["mark"]:  # the ledger may hold more than the checkpoint
            raise ValueError(
                f"The training in {self.directory} was counted in a ledger, which may hold more than the checkpoint: "
                "give TrainingCheckpoint the accountant of that ledger."
            )
        if self._ledger is not None and header["mark"]:
            self._ledger.refuse_without(Mark(**header["mark"]))
        if self._ledger is None and self._sampling is not None:  # a ledger prices steps by their own sampling
            self._sampling.set_state(header["sampling"] or {})


@dataclasses.dataclass(frozen=True)
class _State:
    # What changes when the weights do. The number of steps alone may fall, by another optimizer or older weights.
    history: str  # of all models that train the weights
    steps: int | None = None  # of the optimizer; None if it has made none
    clock: int | None = None  # of what is pending, which counts failed steps, too
    settled: bool = True


class _File:
    """A checkpoint's file, which is there until it is removed, wherever it is moved to."""

    def __init__(self, path: str):
        self.path, self._open = path, open(path, "rb")  # noqa: SIM115

    @property
    def exists(self) -> bool:
        if os.path.lexists(self.path) and os.path.samestat(os.lstat(self.path), os.fstat(self._open.fileno())):
            return True
        if os.fstat(self._open.fileno()).st_nlink == 0:
            return False
        raise RuntimeError(
            f"{self.path} was moved, and a training that is resumed from it would not know of later releases: move it "
            "back, or remove it if the training is done."
        )

    def __del__(self) -> None:
        self._open.close()


def _made_steps(model: Any) -> bool:
    # Whether the model's optimizer may have made private steps.
    return isinstance(model.optimizer, PrivateOptimizer) and bool(model.optimizer.built)


def _settle_shared(model: Any) -> None:
    # What other models owe to shared tables is in no checkpoint of this one.
    own = model.optimizer
    tables = [table.variable for table in own.tables.values()]
    if any(other is not own for table in tables for other in debts_of(table)):
        model.release.settle_all_models()


@contextlib.contextmanager
def _opened(path: str) -> Iterator[zipfile.ZipFile]:
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as problem:
        raise ValueError(f"{path} is damaged ({problem}): bring back a copy of the last checkpoint.") from problem
    with archive:
        yield archive


def _private_optimizer(model: Any) -> PrivateOptimizer:
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, PrivateOptimizer):
        raise TypeError(f"TrainingCheckpoint needs a private optimizer such as tfdp_rec.LazyDPSGD, got {optimizer!r}.")
    return optimizer


def _identity(model: Any, optimizer: PrivateOptimizer) -> dict[str, Any]:
    # What must be the same when training continues: mechanism, constructor's settings, weights' shapes.
    config = optimizer.get_config()
    weights = model.trainable_variables
    return {
        "mechanism": keras.saving.get_registered_name(type(optimizer)),
        "settings": {k: v for k, v in config.items() if k not in _MAY_DIFFER},
        "tables": {f"weights {i}": list(v.shape) for i, v in enumerate(weights) if len(v.shape) == 2},
        "table_numbers": model.table_numbers(),
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
        yield from ((f"{kind}/{i}", held_rows(v)) for i, v in enumerate(kept))
    # By the table's number: Keras numbers the layers of a process, so that a path may differ in the next one.
    numbers = {f"marks/{path}": f"marks/{table.number}" for path, table in model.optimizer.tables.items()}
    yield from ((f"ledger/{numbers.get(name, name)}", v) for name, v in model.optimizer.pending_variables.items())


def _shape(variable: tf.Variable) -> list[int]:
    # The present shape: that of the totals grows.
    return [int(size) for size in tf.shape(variable)]


def _chunks(variable: tf.Variable) -> Iterator[bytes]:
    # A variable's values, some rows at a time.
    if not variable.shape.rank:
        yield variable.numpy().tobytes()
        return
    for start, end in row_chunks(_shape(variable), _CHUNK_VALUES):
        yield tf.gather(variable, tf.range(start, end)).numpy().tobytes()


def _fill(variable: tf.Variable, shape: list[int], file: Any) -> None:
    # Reads what `_chunks` wrote.
    kind = np.dtype(variable.dtype.as_numpy_dtype)
    if not shape or variable.shape.as_list() != shape:
        variable.assign(np.frombuffer(file.read(), kind).reshape(shape))
        return
    width = int(np.prod(shape[1:], dtype=np.int64))
    for start, end in row_chunks(shape, _CHUNK_VALUES):
        values = np.frombuffer(file.read((end - start) * width * kind.itemsize), kind)
        scatter("Update", variable, tf.range(start, end), tf.constant(values.reshape([end - start, *shape[1:]])))
    if file.read(1):
        raise ValueError(f"'{variable.name}' has more values in the checkpoint than its shape {shape} allows.")


def _erase_weights(model: Any) -> None:
    # Weights that owe noise which cannot be paid any more.
    for name, variable in _variables(model):
        if name.startswith("ledger/") or not variable.dtype.is_floating:
            continue
        shape = _shape(variable)
        if not shape:
            variable.assign(tf.zeros_like(variable))
        for start, end in row_chunks(shape, _CHUNK_VALUES) if shape else ():
            scatter("Update", variable, tf.range(start, end), tf.zeros([end - start, *shape[1:]], variable.dtype))


def _normalised(header: dict[str, Any]) -> Resumed:
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
