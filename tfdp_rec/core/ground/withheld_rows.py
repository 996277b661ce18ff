"""Withheld rows: rows that may owe noise, in a variable that only training steps read.

A compiled function that reads a table, such as a part of the model, a data pipeline or a `tf.function` over the layer,
holds the table's TensorFlow variable and reads it at every run. It may have been traced before the table was guarded,
and no check can be added to an existing graph. So the rows leave the variable while any of them may owe noise:

    a step       withhold: public -> private, in the step's own graph, before it reads a row
    a release    settle, then publish: private -> public

Layers and other functions have the variable `public`, which is empty while the rows are withheld, and not even of its
shape: a lookup then fails, and so does nearly all that reads the table whole. Only mechanisms and clipping rules use
`private` (`rows_of`). Rows move by reference: no value is copied, and memory does not grow.

How large they are is measured as they leave, while they are public: what is decided by that tells nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.branches import choose
from tfdp_rec.core.ground.graph_checks import HOST, require
from tfdp_rec.core.ground.keras_internals import resource
from tfdp_rec.core.ground.shared_graphs import SharedGraph

_NOTHING = [0] * 5  # a shape that no table has


class WithheldRows:
    """The public and private variables of one table, or of its rows' state."""

    def __init__(self, variable: keras.Variable):
        self._variable = variable
        self._graph: Any = lambda: None  # the graph that last got the operations of `withhold`
        self._optimizers: list[Any] = []  # those that may move the rows
        with tf.init_scope(), tf.device(self.public.device):
            rows = _read_by_reference(self.public.handle)
            self.private = tf.Variable(rows, trainable=variable.trainable, name="private_rows")
            _empty(self.private.handle)
        with tf.init_scope(), tf.device(HOST):
            # What mechanisms keep the values' sizes within; first the largest, as the rows were withheld.
            self.bound = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="bound")
            self._admitted = tf.Variable(0, trainable=False, dtype=tf.int64, name="admitted")  # number of optimizers

    @property
    def public(self) -> tf.Variable:
        """The variable that everything except a step reads."""
        return resource(self._variable)

    @property
    def rows(self) -> tf.Variable:
        """The variable with the rows: in a graph, which is a step's, the private one."""
        return self.private if not tf.executing_eagerly() or self.is_withheld else self.public

    @property
    def is_withheld(self) -> bool:
        """Whether the rows are in the private variable; for eager code."""
        return not _has_rows(self.public.handle)

    def admit(self, optimizer: Any) -> None:
        """Allows an optimizer, which the owner of the rows knows and settles for, to move them."""
        self._optimizers.append(optimizer)
        with tf.init_scope():
            self._admitted.assign(len(self._optimizers))

    def knows(self, optimizer: Any) -> bool:
        """Whether an optimizer may move the rows."""
        return any(optimizer is each for each in self._optimizers)

    def withhold(self) -> None:
        """Moves the rows to the private variable; once per graph, which settles for the optimizers known by then."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if graph is not None and self._graph() is graph:
            return
        move: Callable[..., Any] = _withhold
        if graph is not None:
            self._graph, move = weakref.ref(graph), _WITHHOLD
        known = tf.constant(len(self._optimizers), tf.int64)
        move(self.public.handle, self.private.handle, self.bound.handle, self._admitted.handle, known)

    def publish(self) -> None:
        """Moves the rows, none of which owes noise any more, to the public variable."""
        if self.is_withheld:
            _move(self.private.handle, self.public.handle)
        elif _has_rows(self.private.handle):  # an interruption has left the same rows in both
            _empty(self.private.handle)


def find_withheld(variable: keras.Variable) -> WithheldRows | None:
    """The `WithheldRows` of a variable; None if its rows are never withheld."""
    return vars(variable).get("withheld")


def rows_of(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable with the rows of a table, for steps, settling and training checkpoints."""
    places = find_withheld(variable)
    return resource(variable) if places is None else places.rows


def require_rows(variable: keras.Variable, sentence: str) -> None:
    """Makes a graph fail with a sentence, ahead of its reads of a table, if the table's rows are withheld."""
    with tf.control_dependencies(require(_has_rows(resource(variable).handle), sentence)):
        # Reads wait for operations that may write to the variable, of which TensorFlow takes this to be one.
        tf.raw_ops.DisableCopyOnRead(resource=resource(variable).handle)


def size_of(values: tf.Tensor) -> tf.Tensor:
    """The largest size of a number; NaN if one is."""
    return tf.maximum(tf.reduce_max(values), -tf.reduce_min(values))  # without a copy of their sizes


def largest_of(values: tf.Tensor) -> tf.Tensor:
    """The largest size of a number, float64; infinite if one is NaN."""
    size = tf.cast(size_of(values), tf.float64)
    return tf.where(tf.math.is_nan(size), tf.constant(math.inf, tf.float64), size)


def _has_rows(handle: tf.Tensor) -> tf.Tensor:
    shape = tf.raw_ops.VariableShape(input=handle)
    with tf.device(HOST):
        return tf.reduce_all(shape > 0)


def _read_by_reference(handle: tf.Tensor) -> tf.Tensor:
    # By reference; after a scatter TensorFlow would copy the values at every read.
    tf.raw_ops.DisableCopyOnRead(resource=handle)
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32, name="rows_by_reference")


def _withhold(public: tf.Tensor, private: tf.Tensor, bound: tf.Tensor, admitted: tf.Tensor, known: tf.Tensor) -> None:
    """Moves rows from one variable to another, and measures them on the way, if they are not there yet."""

    def move() -> tf.Tensor:
        # Without a rank the largest was sought along axes that are not there, where TensorFlow takes branches apart.
        rows = tf.ensure_shape(_read_by_reference(public), [None, None])
        largest = largest_of(rows)
        measured = tf.raw_ops.AssignVariableOp(resource=bound, value=largest)
        with tf.control_dependencies([] if measured is None else [measured]):
            _move(public, private)
        return tf.constant(True)

    def check_and_move() -> tf.Tensor:
        with tf.control_dependencies(require(is_known, _OLD_GRAPH)):
            return choose(_has_rows(public), move, lambda: tf.constant(False))

    with tf.device(HOST):
        is_known = tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=admitted, dtype=tf.int64) == known, [])
        acts = _has_rows(public) | ~is_known
    with tf.device(None):  # where the variables are, which need not be where it was traced
        choose(acts, check_and_move, lambda: tf.constant(False))


# By handles, so that it is traced once for all tables.
_WITHHOLD = SharedGraph(
    _withhold, input_signature=[*4 * [tf.TensorSpec([], tf.resource)], tf.TensorSpec([], tf.int64)]
)
_OLD_GRAPH = (
    "Another optimizer trains a table of this model since the graph of this step was traced, which settles nothing for "
    "it: make the tf.function anew, or train by fit or train_on_batch."
)


def _move(source: tf.Tensor, target: tf.Tensor) -> None:
    # In this order, so that an interruption in between loses nothing.
    tf.raw_ops.AssignVariableOp(resource=target, value=_read_by_reference(source))
    _empty(source)


def _empty(handle: tf.Tensor) -> None:
    none = tf.zeros(_NOTHING)
    if not tf.executing_eagerly():  # in a graph a known shape must be the variable's
        none = tf.compat.v1.placeholder_with_default(none, None)
    tf.raw_ops.AssignVariableOp(resource=handle, value=none)
