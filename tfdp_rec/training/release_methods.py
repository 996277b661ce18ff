"""The methods of a Keras model by which weights, or numbers computed from them, leave training.

Each settles pending noise first, by its decorator `settled`. Files and folders are written completely or not at all.
Metrics are never saved with their totals: these are computed from training data without noise.
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


def settled(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with pending noise settled before it, for releases and for replacing weights that owe noise."""

    @functools.wraps(method)
    def settled_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.release.settle_outside_steps()
        return method(self, *args, **kwargs)

    return settled_first


class ReleaseMethods:
    """Mix-in, ahead of `keras.Model`, whose methods settle before weights leave."""

    @functools.cached_property
    def release(self) -> Release:
        """The model's `Release`."""
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
        """As Keras', without the state of metrics."""
        tree = super().get_state_tree(*args, **kwargs)  # type: ignore[misc]
        tree.pop("metrics_variables", None)
        return tree

    @settled
    def save_own_variables(self, store: Any) -> None:
        """As Keras'; every way to save a model calls this first, after which its metrics save zeros."""
        for metric in _metrics_within(self.metrics):  # type: ignore[attr-defined]
            vars(metric)["save_own_variables"] = functools.partial(_save_zeros, metric)
        super().save_own_variables(store)  # type: ignore[misc]

    @settled
    def _trackable_children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Keras', for TensorFlow's checkpoints and SavedModels, without metrics."""
        children = super()._trackable_children(*args, **kwargs)  # type: ignore[misc]
        return {name: child for name, child in children.items() if not _is_metric(child)}

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

    @settled
    def save(self, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; an interruption leaves an older file as it was. HDF5 has no place for the history."""
        _refuse_legacy(filepath)
        warn_of_ordinary_steps(self.privacy_history)  # type: ignore[attr-defined]
        with _replaced(filepath, overwrite) as path:
            return super().save(path, overwrite, *args, **kwargs)  # type: ignore[misc]

    @settled
    def save_weights(self, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; an interruption leaves an older file as it was."""
        with _replaced(filepath, overwrite) as path:
            return super().save_weights(path, overwrite, *args, **kwargs)  # type: ignore[misc]

    @settled
    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; an interruption leaves an older folder as it was."""
        warn_of_ordinary_steps(self.privacy_history)  # type: ignore[attr-defined]
        with self.release.leaving(), _without_metric_data(self), _replaced(filepath) as path:
            return super().export(path, *args, **kwargs)  # type: ignore[misc]

    # Replacing weights that may owe noise.

    @settled
    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras', after the weights to be replaced got their noise."""
        return super().load_weights(*args, **kwargs)  # type: ignore[misc]

    @settled
    def set_weights(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras', after the weights to be replaced got their noise."""
        return super().set_weights(*args, **kwargs)  # type: ignore[misc]

    @settled
    def set_state_tree(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras', after the weights to be replaced got their noise."""
        return super().set_state_tree(*args, **kwargs)  # type: ignore[misc]


@contextlib.contextmanager
def _replaced(filepath: Any, overwrite: bool = True) -> Iterator[Any]:
    # A temporary name, which replaces `filepath` after the writing. Keras must see the true name where it asks before
    # overwriting; a cloud address, an open file and the index of a sharded save are no single file here.
    local = isinstance(filepath, (str, os.PathLike)) and "://" not in os.fspath(filepath)
    if not overwrite or not local or os.fspath(filepath).endswith(".json"):
        yield filepath
        return
    with replacing(filepath) as path:
        yield path


def _refuse_legacy(filepath: Any) -> None:
    if str(filepath).endswith((".h5", ".hdf5")):
        raise ValueError(
            f"{filepath}: a model in HDF5 has no place for the privacy history, so that a training that continues from "
            "it would be told too small an epsilon. Save it as .keras."
        )


def _is_metric(child: Any) -> bool:
    several = child if isinstance(child, (list, tuple)) else [child]
    return bool(len(several)) and all(isinstance(one, keras.metrics.Metric) for one in several)


def _metrics_within(found: Any) -> Iterator[keras.metrics.Metric]:
    # Metrics may contain metrics.
    for one in found:
        if isinstance(one, (list, tuple, set)):
            yield from _metrics_within(one)
        elif isinstance(one, dict):
            yield from _metrics_within(one.values())
        elif isinstance(one, keras.metrics.Metric):
            yield one
            yield from _metrics_within(vars(one).values())


def _save_zeros(metric: keras.metrics.Metric, store: Any) -> None:
    for number, variable in enumerate(metric.variables):
        store[str(number)] = np.zeros(variable.shape, variable.dtype)


@contextlib.contextmanager
def _without_metric_data(model: Any) -> Iterator[None]:
    # A SavedModel holds the metrics' variables as they are while it is traced.
    values = [(variable, variable.numpy()) for variable in model.metrics_variables]
    model.reset_metrics()
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)
