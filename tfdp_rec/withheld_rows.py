"""Rows that may owe noise, kept where nothing but a training step reads them.

What is compiled to read a table holds on to the table's TensorFlow variable, and reads it whenever it runs: a part of
the model, a data pipeline, a `tf.function` over the layer, whether it was traced before the table was guarded or after.
No check can be put into a graph that exists already. So the rows leave the variable while any of them may owe noise:

    a step       withhold: public -> private, in the step's own graph, before it reads a row
    a release    settle, then publish: private -> public

`public` is the variable that everything else knows; while the rows are withheld it has none. A graph that looks rows up
then fails, and one that reads the table whole finds no row. `private` is known to the mechanisms and the clipping rules
alone (`held_rows`). Rows move by reference: no value is copied, and memory does not grow.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.demands import demand
from tfdp_rec.keras_internals import resource


class WithheldRows:
    """Where the rows of one table are."""

    def __init__(self, variable: keras.Variable):
        self._variable = variable
        self._graph: Any = lambda: None  # the graph that last got the operations of `withhold`
        with tf.init_scope(), tf.device(self.public.device):
            self.private = tf.Variable(_taken_from(self.public), trainable=variable.trainable, name="private_rows")
            _empty(self.private)

    @property
    def public(self) -> tf.Variable:
        """The variable that everything but a step reads."""
        return resource(self._variable)

    @property
    def rows(self) -> tf.Variable:
        """The variable that has the rows: in a graph, which is a step's, the private one."""
        return self.private if not tf.executing_eagerly() or not _has_rows(self.public) else self.public

    def withhold(self) -> None:
        """Has the private variable hold the rows from here on; once in a graph."""
        if tf.executing_eagerly():
            if _has_rows(self.public):
                _move(self.public, self.private)
            return
        graph = tf.compat.v1.get_default_graph()
        if self._graph() is graph:
            return
        self._graph = weakref.ref(graph)

        def move() -> tf.Tensor:
            _move(self.public, self.private)
            return tf.constant(True)

        tf.cond(_has_rows(self.public), move, lambda: tf.constant(False))

    def publish(self) -> None:
        """Has the public variable hold the rows, none of which owes noise."""
        if _has_rows(self.private):
            _move(self.private, self.public)


def withheld(variable: keras.Variable) -> WithheldRows | None:
    """Where a variable's rows are, if they are ever withheld."""
    return vars(variable).get("withheld")


def held_rows(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable with the rows of a table, for a step, a payment or a training checkpoint."""
    places = withheld(variable)
    return resource(variable) if places is None else places.rows


def demand_rows(variable: keras.Variable, sentence: str) -> None:
    """Has a graph say why a table has no rows, ahead of its own reads of the table."""
    with tf.control_dependencies(demand(_has_rows(resource(variable)), sentence)):
        # Reads wait for operations on the variable that may write to it, as this one does for all TensorFlow knows.
        tf.raw_ops.DisableCopyOnRead(resource=resource(variable).handle)


def _has_rows(variable: tf.Variable) -> tf.Tensor:
    return tf.raw_ops.VariableShape(input=variable.handle)[0] > 0


def _taken_from(variable: tf.Variable) -> tf.Tensor:
    """The values themselves; after a scatter TensorFlow would copy them for every read."""
    tf.raw_ops.DisableCopyOnRead(resource=variable.handle)
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype, name="rows_by_reference")


def _move(source: tf.Variable, target: tf.Variable) -> None:
    """First into the one, then out of the other: what is cut short in between has lost nothing."""
    tf.raw_ops.AssignVariableOp(resource=target.handle, value=_taken_from(source))
    _empty(source)


def _empty(variable: tf.Variable) -> None:
    none = tf.zeros([0, *variable.shape[1:]], variable.dtype)
    if not tf.executing_eagerly():  # where a shape that is known must be the variable's
        none = tf.compat.v1.placeholder_with_default(none, None)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=none)
