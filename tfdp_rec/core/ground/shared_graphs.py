"""Graphs that all models of a process use, so that they are traced and compiled once.

Their calls have no options of the graph optimizer, which might be another thread's, or those of long ago: where a call
stays one, in a branch, a product of fewer bits would not be seen by the canaries of the step around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import plain_calls

_made: list[SharedGraph] = []


class SharedGraph:
    """A `tf.function` that is made when a module is loaded and used by all models."""

    def __init__(self, function: Callable[..., Any], **options: Any):
        self._make = functools.partial(tf.function, function, autograph=False, **options)
        self._graph = self._make()
        _made.append(self)

    def __call__(self, *tensors: Any) -> Any:
        with plain_calls():
            return self._graph(*tensors)

    @staticmethod
    def trace_all_anew() -> None:
        """Has all of them traced again, as for a cluster: its workers have no function of before the connection."""
        for each in _made:
            each._graph = each._make()
