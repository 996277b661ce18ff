"""The doors: every method of a Keras model by which weights, or numbers computed from them, leave training.

Each settles pending noise before it opens, and says so by its decorator. Files and folders are whole or not there.
Metrics stay inside: they are computed from the training data and protected by nothing, and a saved state would carry
their totals.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfdp_rec.files import replacing
from tfdp_rec.training.ordinary_steps import warn_of_ordinary_steps
from tfdp_rec.training.release import Release


def settled(door: Callable[..., Any]) -> Callable[..., Any]:
    """A method by which something leaves training, or that forgets what is owed: pending noise is settled first."""

    @functools.wraps(door)
    def opened(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.release.settle_outside_steps()
        return door(self, *args, **kwargs)

    return opened


class ReleaseMethods:
    """Mix-in, ahead of `keras.Model`."""

    @functools.cached_property
    def release(self) -> Release:
        """This model's way out of training."""
        return Release(self)

    # Numbers computed from weights.

    @settled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras'."""
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    @settled
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras'."""
        return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    @settled
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras'."""
        return super().predict(*args, **kwargs)  # type: ignore[misc]

    @settled
    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras'."""
        return super().predict_on_batch(*args, **kwargs)  # type: ignore[misc]

    @settled
    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras'."""
        return super().test_on_batch(*args, **kwargs)  # type: ignore[misc]

    # Weights.

    @settled
    def get_weights(self) -> list[np.ndarray]:
        """As Keras'."""
        return super().get_weights()  # type: ignore[misc]

    @settled
    def get_state_tree(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Keras', but for the state of metrics."""
        tree = super().get_state_tree(*args, **kwargs)  # type: ignore[misc]
        tree.pop("metrics_variables", None)
        return tree

    @settled
    def save_own_variables(self, store: Any) -> None:
        """As Keras'; all that saves a model comes through here first, and finds its metrics as good as new."""
        for metric in _metrics_within(self.metrics):  # type: ignore[attr-defined]
            vars(metric)["save_own_variables"] = functools.partial(_save_as_new, metric)
        super().save_own_variables(store)  # type: ignore[misc]

    @settled
    def _trackable_children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Keras', for TensorFlow's checkpoints and SavedModels, but for metrics."""
        children = super()._trackable_children(*args, **kwargs)  # type: ignore[misc]
        return {name: child for name, child in children.items() if not _is_metric(child)}

    def __reduce__(self) -> Any:
        """As Keras', which saves through `save_own_variables`; a class made for a functional model is not looked up."""
        made: Any = super().__reduce__()
        kind: Any = getattr(type(self), "functional_of", type(self))
        return getattr(kind, made[0].__name__), *made[1:]

    def __deepcopy__(self, memo: Any) -> Any:
        """As Keras', which saves and loads; the copy trains under the plan of this model's optimizer."""
        reduced = self.__reduce__()
        copied = reduced[0](*reduced[1])
        plan = getattr(self.optimizer, "plan", None)  # type: ignore[attr-defined]
        if plan is not None:
            plan.accept(copied.optimizer)
        return copied

    def __copy__(self) -> Any:
        return copy.deepcopy(self)

    # Files.

    @settled
    def save(self, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; an interruption leaves the older file whole."""
        warn_of_ordinary_steps(self.privacy_history)  # type: ignore[attr-defined]
        with _whole(filepath, overwrite) as path:
            return super().save(path, overwrite, *args, **kwargs)  # type: ignore[misc]

    @settled
    def save_weights(self, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; an interruption leaves the older file whole."""
        with _whole(filepath, overwrite) as path:
            return super().save_weights(path, overwrite, *args, **kwargs)  # type: ignore[misc]

    @settled
    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; an interruption leaves the older folder whole."""
        warn_of_ordinary_steps(self.privacy_history)  # type: ignore[attr-defined]
        with self.release.leaving(), _as_new(self), _whole(filepath) as path:
            return super().export(path, *args, **kwargs)  # type: ignore[misc]

    # What would forget a debt.

    @settled
    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; what the weights before still owe is theirs."""
        return super().load_weights(*args, **kwargs)  # type: ignore[misc]

    @settled
    def set_weights(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; what the weights before still owe is theirs."""
        return super().set_weights(*args, **kwargs)  # type: ignore[misc]

    @settled
    def set_state_tree(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; what the weights before still owe is theirs."""
        return super().set_state_tree(*args, **kwargs)  # type: ignore[misc]


@contextlib.contextmanager
def _whole(filepath: Any, overwrite: bool = True) -> Iterator[Any]:
    """A name to write to, which takes the place of `filepath` when it is whole.

    Where Keras asks before it overwrites, it must see the true name; and what is no single file here (a cloud address,
    an open file, the index of a sharded save) is written as Keras does.
    """
    local = isinstance(filepath, (str, os.PathLike)) and "://" not in os.fspath(filepath)
    if not overwrite or not local or os.fspath(filepath).endswith(".json"):
        yield filepath
        return
    with replacing(filepath) as path:
        yield path


def _is_metric(child: Any) -> bool:
    several = child if isinstance(child, (list, tuple)) else [child]
    return bool(len(several)) and all(isinstance(one, keras.metrics.Metric) for one in several)


def _metrics_within(found: Any) -> Iterator[keras.metrics.Metric]:
    """Metrics, and those that they are made of."""
    for one in found:
        if isinstance(one, (list, tuple, set)):
            yield from _metrics_within(one)
        elif isinstance(one, dict):
            yield from _metrics_within(one.values())
        elif isinstance(one, keras.metrics.Metric):
            yield one
            yield from _metrics_within(vars(one).values())


def _save_as_new(metric: keras.metrics.Metric, store: Any) -> None:
    """What a metric without any data would save."""
    for number, variable in enumerate(metric.variables):
        store[str(number)] = np.zeros(variable.shape, variable.dtype)


@contextlib.contextmanager
def _as_new(model: Any) -> Iterator[None]:
    """The model's metrics without any data, for the length of the block."""
    values = [(variable, variable.numpy()) for variable in model.metrics_variables]
    model.reset_metrics()
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)
