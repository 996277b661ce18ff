"""Branches of a graph that stay functions where there is one device.

TensorFlow makes a conditional and all its branches part of the graph around it, a switch before each tensor and a merge
after it, so that operations of a branch can stand on several devices. In a private step most branches are rare: a row
that look-ahead has not announced, an infinity, totals that need more room. Before the first step the graph is optimised
with all of them, and in each step every switch is passed.

Where the processor is the only device nothing is gained by that. So a branch stays a function there, which is optimised
when it first runs: a step of a small model has half the operations. With a GPU, or servers, TensorFlow's way remains.

Of a branch that stays a function TensorFlow takes each operation as it stands. oneDNN's products, which it finds for
functions that are called, are a tenth faster: large products are a function within the branch (`wrap_in_call`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import keep_conditional, plain_calls


def has_gpu() -> bool:
    """Whether there is a GPU, on which few operations are more than few numbers."""
    return bool(tf.config.list_physical_devices("GPU"))


def choose(condition: tf.Tensor, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`then()` where the condition holds, and `otherwise()` where it does not, as `tf.cond`."""
    return _keep_whole(tf.cond(condition, then, otherwise))


def choose_from(branches: Sequence[Callable[[], Any]], number: tf.Tensor) -> Any:
    """The result of the branch of that number, as `tf.switch_case`."""
    return _keep_whole(tf.switch_case(number, list(branches)))


def wrap_in_call(branch: Callable[[], Any]) -> Callable[[], Any]:
    """A branch as the call of a function, which has no options of the graph optimizer (`shared_graphs.py`)."""

    def call() -> Any:
        with plain_calls():
            return tf.function(branch, autograph=False)()

    return call


def _keep_whole(results: Any) -> Any:
    if not tf.executing_eagerly() and len(tf.config.list_logical_devices()) == 1:
        keep_conditional(results)
    return results
