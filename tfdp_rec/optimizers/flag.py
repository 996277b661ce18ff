"""A bit that graphs find by its name.

While rows of a table owe noise, a graph that somebody else compiled must not return them. Such a graph looks at this
bit. It does so by name and holds on to nothing, so that what is exported from it carries neither the bit nor anything
else of the training: where there is no such bit, it reads as down.
"""

from __future__ import annotations

import uuid

import tensorflow as tf


class Flag:
    """A bit, down at first. For this process and its CPU.

    Example:
        >>> flag = Flag()
        >>> is_up = tf.function(lambda: flag.is_up())
        >>> bool(is_up()), flag.hoist(), bool(is_up())
        (False, [], True)
    """

    def __init__(self) -> None:
        self.name = f"tfdp_rec-{uuid.uuid4().hex}"
        with tf.init_scope():
            self._kept = self._handle()
            self.lower()

    def hoist(self) -> list[tf.Operation]:
        """Puts it up; what to wait for, in a graph."""
        return self._set(True)

    def lower(self) -> list[tf.Operation]:
        """Takes it down; what to wait for, in a graph."""
        return self._set(False)

    def is_up(self) -> tf.Tensor:
        """Whether it is up; in a process that does not know it, it is not."""
        handle = self._handle()
        with tf.device("CPU:0"):
            known = tf.raw_ops.VarIsInitializedOp(resource=handle)
            read = lambda: tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.bool)  # noqa: E731
            return tf.cond(known, read, lambda: tf.constant(False))

    def _handle(self) -> tf.Tensor:
        with tf.device("CPU:0"):
            return tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=self.name)

    def _set(self, value: bool) -> list[tf.Operation]:
        with tf.device("CPU:0"):
            done = tf.raw_ops.AssignVariableOp(resource=self._handle(), value=tf.constant(value))
        return [] if done is None else [done]
