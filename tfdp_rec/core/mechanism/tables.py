"""Rows of a table and what belongs to them (velocity, or what a rule keeps), read and written in place.

Distinct rows are changed by a gather and a scatter that replaces them, at the speed of memory; TensorFlow's scatter
that adds is three times as slow, and rounds once for each time that an id repeats.

Every read is a gather from the variable itself and every write a scatter into it: a whole read of a table in the same
graph would make TensorFlow copy the table before each write (see docs/design-optimizers.md).

A graph orders what touches one variable, and nothing between two. Where the order of two variables' writes matters
(noise before the mark that says it was added), the writes are operations to wait for: see `run_after`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.branches import has_gpu
from tfdp_rec.core.ground.graph_checks import HOST, place_on_host
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import find_withheld, rows_of
from tfdp_rec.core.mechanism.rules import Recursion, Rows, Scalar, TableRule

CHUNK_VALUES = 1 << 20  # values handled at once when a whole table is swept: 4 MiB of float32, which stay in cache
_GPU_CHUNK_VALUES = 1 << 24  # on a GPU, which would wait for the start of many small operations

Operations = list[tf.Operation]
"""Writes to wait for; eagerly there is nothing to wait for, and the list is empty."""


def run_after(writes: Operations) -> contextlib.AbstractContextManager[Any]:
    """A block whose operations run after `writes`, also in a graph that is cut short by an error elsewhere."""
    return tf.control_dependencies(writes)


def scatter(kind: str, variable: tf.Variable, ids: tf.Tensor, values: tf.Tensor) -> Operations:
    """Writes rows in place: `kind` is "Add" or "Update"; a scalar goes to all of them."""
    write = getattr(tf.raw_ops, f"ResourceScatter{kind}")
    done = write(resource=variable.handle, indices=ids, updates=tf.cast(values, variable.dtype))
    return [] if done is None else [done]


def assign(variable: tf.Variable, value: tf.Tensor) -> Operations:
    """Writes a whole variable."""
    done = tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
    return [] if done is None else [done]


def distinct_rows(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    """The distinct ids of `slices` and the sum of the slices of each."""
    ids, segment = tf.unique(tf.cast(slices.indices, tf.int64))
    return ids, tf.math.unsorted_segment_sum(slices.values, segment, tf.size(ids))


class Table:
    """A variable that is read by row, its rows' velocity or rule state, and its number in the model."""

    def __init__(
        self, number: int, variable: keras.Variable, state: keras.Variable | None, rule: Recursion | TableRule
    ):
        self.number, self.variable, self.state, self.rule = number, variable, state, rule
        self.rows, self.width = variable.shape[0], int(tf.TensorShape(variable.shape[1:]).num_elements())

    @property
    def path(self) -> str:
        """The variable's path within its model."""
        return self.variable.path

    @property
    def is_small(self) -> bool:
        """Whether the table is swept in one chunk."""
        return self.rows * self.width <= CHUNK_VALUES

    def read(self, ids: tf.Tensor) -> Rows:
        """float32 rows of the weights, and of the state."""
        return tuple(tf.cast(tf.gather(rows_of(variable), ids), tf.float32) for variable in self.stored_variables)

    def write(self, ids: tf.Tensor, rows: Rows) -> Operations:
        """Replaces rows; `ids` are distinct."""
        pairs = zip(self.stored_variables, rows, strict=True)
        return [done for variable, values in pairs for done in scatter("Update", rows_of(variable), ids, values)]

    @property
    def stored_variables(self) -> list[keras.Variable]:
        """The variable, and that of its rows' state if there is one."""
        return [self.variable] if self.state is None else [self.variable, self.state]

    def withhold(self, optimizer: Any) -> None:
        """Keeps the rows from whatever else reads the table, if any mechanism may owe them noise, for an optimizer."""
        for variable in self.stored_variables:
            if (places := find_withheld(variable)) is not None:
                if not places.knows(optimizer):
                    raise NotPrivate(NO_OWNER.format(self.path))
                places.withhold()

    def step(self, ids: tf.Tensor, move: tf.Tensor, learning_rate: Scalar) -> Operations:
        """A whole step, noise included, for some distinct rows. Rounding to the table's type comes last."""
        return self.write(ids, self.rule.step(self.read(ids), move, learning_rate))

    def sweep(self, act: Callable[[tf.Tensor], Any]) -> None:
        """Calls `act` with the ids of the table, a bounded chunk at a time, one chunk after the other."""
        at_once = _GPU_CHUNK_VALUES if has_gpu() else CHUNK_VALUES
        chunk = max(1, min(self.rows, at_once // max(self.width, 1)))

        def body(start: tf.Tensor) -> tuple[tf.Tensor]:
            with tf.device(HOST):
                next_start = start + chunk
                end = tf.minimum(next_start, self.rows)
            act(tf.range(start, end, dtype=tf.int64))
            return (next_start,)

        start = tf.constant(0, tf.int64)
        tf.while_loop(place_on_host(lambda at: at < self.rows), body, (start,), parallel_iterations=1)


NO_OWNER = (
    "'{}' has no owner that would withhold its rows while they owe noise: have a tfdp_rec.PrivateModel (or the mix-in "
    "tfdp_rec.PrivateTraining) build the optimizer, by model.prepare(batch) or fit."
)


def recursion_of(table: Table) -> Recursion:
    """The recursion of a table, whose rows make every step."""
    assert isinstance(table.rule, Recursion), "no lazy mechanism takes another rule"
    return table.rule
