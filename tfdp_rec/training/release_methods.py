"""The methods of a Keras model by which weights, or numbers computed from them, leave training.

Each releases the weights first (`core/mechanism/weights.py`), and so does a callback at the end of an epoch, ahead of
any that may look at weights. Weights leave with the privacy history and without the totals of metrics, which are
computed from training data without noise, and begin anew. Files and folders are written completely or not at all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.claim.entries import SAVED_AS, Entries, warn_of_ordinary_steps
from tfdp_rec.core.claim.meter import Meter, meters_of
from tfdp_rec.core.ground.files import is_address, replace_atomically
from tfdp_rec.core.ground.keras_internals import layers_within, metrics_variables, register_save_check
from tfdp_rec.core.mechanism.weights import PrivateWeights, owners_of

_LOGS_ONLY = (
    keras.callbacks.ModelCheckpoint,  # it saves through the model's own methods
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.TerminateOnNaN,
)  # not what sets the learning rate: at a release tables begin to follow a lower one (`core/mechanism/row_debts.py`)


def release_outside_steps(model: Any) -> None:
    """Releases a model's weights, except within a step and while a graph is traced."""
    if tf.executing_eagerly():
        for owner in owners_of(model):
            owner.release_outside_steps()


def release_first(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with pending noise settled before it, for releases and for replacing weights that owe noise."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        release_outside_steps(self)
        return method(self, *args, **kwargs)

    return call


def _release_then(name: str, counts: bool = False) -> Any:
    # Keras' method of that name, settled; `counts` if it leaves metrics with data in them.
    def call_keras(self: Any, *args: Any, **kwargs: Any) -> Any:
        with empty_metrics_at_end(self) if counts else contextlib.nullcontext():
            return getattr(super(ReleaseMethods, self), name)(*args, **kwargs)

    call_keras.__name__, call_keras.__doc__ = name, "As Keras', after pending noise was applied."
    return release_first(call_keras)


class ReleaseMethods:
    """Mix-in, ahead of `keras.Model`, whose methods settle before weights leave or are replaced."""

    privacy_history: Meter | None = None  # entries of the model's steps, under all its optimizers

    @functools.cached_property
    def private_weights(self) -> PrivateWeights:
        """The owner of the model's tables; of several models, if they share one."""
        return PrivateWeights(self)

    __call__ = _release_then("__call__")
    evaluate = _release_then("evaluate", counts=True)
    predict = _release_then("predict")
    predict_on_batch = _release_then("predict_on_batch")
    test_on_batch = _release_then("test_on_batch", counts=True)
    get_weights = _release_then("get_weights")
    load_weights = _release_then("load_weights")
    set_weights = _release_then("set_weights")

    # State.

    @release_first
    def get_state_tree(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Keras', with the privacy history, and without the state of metrics."""
        tree = super().get_state_tree(*args, **kwargs)  # type: ignore[misc]
        tree.pop("metrics_variables", None)
        history = self.saved_history()
        return tree if history is None else {**tree, SAVED_AS: history.to_array()}

    @release_first
    def set_state_tree(self, state_tree: Any) -> None:
        """As Keras'; a saved privacy history is added to the present one."""
        if SAVED_AS in state_tree:  # ahead of weights, which may not all fit
            self.open_history().merge(Entries.from_array(state_tree[SAVED_AS]))
        super().set_state_tree({key: value for key, value in state_tree.items() if key != SAVED_AS})  # type: ignore[misc]
        if SAVED_AS in state_tree:
            self.open_history().note_restore()

    @release_first
    def save_own_variables(self, store: Any) -> None:
        """As Keras', with the privacy history."""
        empty_metrics(self)  # every way to save a model calls this method first, and saves its metrics later
        super().save_own_variables(store)  # type: ignore[misc]
        history = self.saved_history()
        if history is not None:
            store[SAVED_AS] = history.to_array()

    def load_own_variables(self, store: Any) -> None:
        """As Keras'; a saved privacy history is added to the present one."""
        if SAVED_AS in store.keys():  # first: skip_mismatch=True passes over what follows an error
            self.open_history().merge(Entries.from_array(store[SAVED_AS]))
        super().load_own_variables({key: store[key] for key in store.keys() if key != SAVED_AS})  # type: ignore[misc]

    def saved_history(self) -> Entries | None:
        """The entries of all steps that are in the weights: of this model, and of others on its layers."""
        weights = self.weights  # type: ignore[attr-defined]
        if self.privacy_history is None and any(meters_of(variable) for variable in weights):
            self.privacy_history = Meter()
        if self.privacy_history is None:
            return None
        self.privacy_history.add_weights(weights)
        return self.privacy_history.snapshot()

    def open_history(self) -> Meter:
        """The history to which saved entries are added."""
        if self.privacy_history is None:  # loaded without being compiled
            self.privacy_history = Meter()
        # Other models on these layers have spent it too. An optimizer declares them once built, which may be never.
        self.privacy_history.attach(self.weights)  # type: ignore[attr-defined]
        return self.privacy_history

    @functools.cached_property
    def checkpointed_history(self) -> CheckpointedHistory:
        """The privacy history's place in TensorFlow's checkpoints."""
        return CheckpointedHistory(self)

    @release_first
    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """As Keras', for TensorFlow's checkpoints and SavedModels, without metrics; checkpoints have the history."""
        children = super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]
        found = {name: child for name, child in children.items() if not _is_metric(child)}
        return found | {SAVED_AS: self.checkpointed_history} if save_type == "checkpoint" else found

    def __reduce__(self) -> Any:
        """As Keras', which saves through `save_own_variables`."""
        # Pickle finds a class by its name, and `_functional`'s (model.py) has none.
        made: Any = super().__reduce__()
        kind: Any = getattr(type(self), "functional_of", type(self))
        return getattr(kind, made[0].__name__), *made[1:]

    def __deepcopy__(self, memo: Any) -> Any:
        """As Keras', which saves and loads; the copy trains under the plan of this model's optimizer."""
        # A plan is not saved. Without it the copy could make steps beyond the planned ones.
        reduced = self.__reduce__()
        copied = reduced[0](*reduced[1])
        plan = getattr(self.optimizer, "plan", None)  # type: ignore[attr-defined]
        if plan is not None:
            plan.accept(copied.optimizer)
        return copied

    def __copy__(self) -> Any:
        return copy.deepcopy(self)

    # Files.

    @release_first
    def save(self, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; an interruption leaves an older file as it was."""
        warn_of_ordinary_steps(self.privacy_history)  # type: ignore[attr-defined]
        with _open_whole(filepath, overwrite) as path:
            return super().save(path, overwrite, *args, **kwargs)  # type: ignore[misc]

    @release_first
    def save_weights(self, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; an interruption leaves an older file as it was."""
        with _open_whole(filepath, overwrite) as path:
            return super().save_weights(path, overwrite, *args, **kwargs)  # type: ignore[misc]

    @release_first
    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; an interruption leaves an older folder as it was."""
        warn_of_ordinary_steps(self.privacy_history)  # type: ignore[attr-defined]
        said = io.StringIO()  # Keras names the temporary path
        empty_metrics(self)
        with self.private_weights.exporting(), _open_whole(filepath) as path:
            with contextlib.redirect_stdout(said):
                found = super().export(path, *args, **kwargs)  # type: ignore[misc]
        print(said.getvalue().replace(os.fspath(path), os.fspath(filepath)), end="", flush=True)
        return found


class CheckpointedHistory(tf.train.experimental.PythonState):
    """A model's privacy history in `tf.train.Checkpoint`, which restores weights and steps past Keras' methods."""

    def __init__(self, model: Any):
        self.model = model

    def serialize(self) -> str:
        """The history as text; empty if there is none."""
        history = self.model.saved_history()
        return "" if history is None else history.dumps()

    def deserialize(self, string_value: str) -> None:
        """Adds a saved history to the present one."""
        text = tf.compat.as_text(string_value)
        if text:
            self.model.open_history().merge(Entries.loads(text))


def _open_whole(filepath: Any, overwrite: bool = True) -> contextlib.AbstractContextManager[Any]:
    # A temporary name, which replaces `filepath` after the writing. Keras must see the true name where it asks before
    # overwriting; a cloud address, an open file and the index of a sharded save are no single file here.
    local = isinstance(filepath, (str, os.PathLike)) and not is_address(filepath)
    whole = overwrite and local and not os.fspath(filepath).endswith(".json")
    return replace_atomically(filepath) if whole else contextlib.nullcontext(filepath)


def _refuse_lost_history(root: Any, hdf5: bool) -> None:
    # A private model writes its history where it writes its own variables. No other model or layer does.
    carried: set[int] = set()
    if not hdf5:
        carriers = [part for part in _layers_of(root) if isinstance(part, ReleaseMethods)]
        carried = {id(variable) for part in carriers for variable in part.weights}  # type: ignore[attr-defined]
    lost = [variable for variable in getattr(root, "weights", []) if id(variable) not in carried]
    if any(meter.snapshot() for variable in lost for meter in meters_of(variable)):
        what = "An HDF5 file" if hdf5 else f"A file or copy of {type(root).__name__} '{root.name}'"
        raise ValueError(
            f"{what} would not hold the privacy history of its weights, so that a private training that continues from "
            "it would be told too small an epsilon. Save the private model, or a tfdp_rec.PrivateModel of these "
            "layers, as .keras or .weights.h5; or export it for serving."
        )


def _layers_of(root: Any) -> Iterable[keras.layers.Layer]:
    return layers_within(root) if isinstance(root, keras.layers.Layer) else ()


register_save_check(_refuse_lost_history)


def _is_metric(child: Any) -> bool:
    several = child if isinstance(child, (list, tuple)) else [child]
    return bool(len(several)) and all(isinstance(one, keras.metrics.Metric) for one in several)


class _SettleAtEpochEnd(keras.callbacks.Callback):

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.settle()
        empty_metrics(self.model)


def empty_metrics(model: Any) -> None:
    """Sets a model's metrics, and those of its layers, to their first values."""
    # A layer may read its metric, and any part of the model be exported. A metric's own reset may keep something.
    for variable in metrics_variables(model):
        variable.assign(keras.ops.zeros(variable.shape, variable.dtype))
    model.reset_metrics()


@contextlib.contextmanager
def empty_metrics_at_end(model: Any) -> Iterator[None]:
    """A block after which the metrics of a private model hold nothing of what was computed in it."""
    try:
        yield
    finally:
        if model.is_private:
            empty_metrics(model)


def add_release_callback(callbacks: list[Any]) -> list[Any]:
    """The callbacks of a fit, with a settling one ahead of them if any of them may look at weights."""
    if all(type(c) in _LOGS_ONLY or getattr(c, "keeps_off_weights", False) for c in callbacks):
        return callbacks
    return [_SettleAtEpochEnd(), *callbacks]
