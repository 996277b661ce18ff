"""Critical sections on a parameter server: what runs there as a whole, one at a time.

A section is one function call placed on the server, never inlined into the function that calls it:

- a call begins when its arguments have arrived, so nothing in it waits for another machine;
- its first operation takes the server's lock, and everything else in it comes after;
- the lock is an object whose last reference releases it: at the end of the section, or when the section is cut short
  (the caller died, another part of its step failed), as soon as the operations that were running are done.

So a killed worker cannot leave a server locked, and a section sees the server's variables as if it were alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Lock:
    """A server's lock."""

    def __init__(self, device: str):
        self.device, self._name = device, f"tfdp_rec-{uuid.uuid4().hex}"

    def section(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """`body` as a critical section of this server, callable eagerly or in a function that runs elsewhere."""

        def lock_section(*arguments: Any) -> Any:
            # By name, so that sections made in different graphs meet at one lock of the server's process.
            lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2(shared_name=self._name))
            with tf.control_dependencies([lock]):
                result = body(*arguments)
                result = None if result is None else tf.nest.map_structure(tf.identity, result)
            # All that the body made, also what its result does not need (a scatter): the lock outlives every write.
            with tf.control_dependencies(tf.compat.v1.get_default_graph().get_operations()):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
            return result

        return on_server(self.device, lock_section)


def on_server(device: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """`body` as one call that a server makes; within a graph its nests travel as few tensors."""

    def place(*arguments: Any) -> Any:
        with tf.device(device):  # by name: "CPU:0", or nothing, could be any machine's, and becomes the chief's
            return body(*arguments)

    def function(of: Callable[..., Any]) -> Callable[..., Any]:
        return tf.function(of, autograph=False, experimental_attributes={"_noinline": True})

    eager = function(place)

    def call(*arguments: Any) -> Any:
        if not tf.inside_function():
            with tf.device(device):
                return eager(*arguments)
        there, back = Parcel(arguments), []

        def pack(*tensors: tf.Tensor) -> Any:
            with tf.device(device):
                result = body(*there.open(list(tensors)))
                if result is None:
                    return None
                back.append(Parcel(result))
                return back[-1].tensors

        with tf.device(device):
            returned = function(pack)(*there.tensors)
        return back[-1].open(returned) if back else None

    return call


# What crosses a network costs a call for each tensor, however small.


class Parcel:
    """A nest of tensors, packed as few tensors where it is made."""

    # Tensors of one type are laid end to end in one vector, and taken apart where they arrive. Sizes that are not known
    # when the graph is made travel at the head of the int64 vector.

    def __init__(self, nest: Any):
        leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(nest)]
        self._nest = tf.nest.pack_sequence_as(nest, [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves])
        self._unknown = [tf.shape(leaf, tf.int64) for leaf in leaves if not leaf.shape.is_fully_defined()]
        vectors: dict[tf.DType, list[tf.Tensor]] = {tf.int64: list(self._unknown)} if self._unknown else {}
        for leaf in leaves:
            vectors.setdefault(leaf.dtype, []).append(tf.reshape(leaf, [-1]))
        self._types = sorted(vectors, key=lambda kind: kind.name)
        self.tensors = [tf.concat(vectors[kind], axis=0) for kind in self._types]

    def open(self, tensors: list[tf.Tensor]) -> Any:
        """The nest, from what `self.tensors` has become on the other side."""
        rest = dict(zip(self._types, tensors))
        unknown = iter(self._sizes(rest))

        def leaf(spec: tf.TensorSpec) -> tf.Tensor:
            shape = spec.shape if spec.shape.is_fully_defined() else next(unknown)
            count = tf.reduce_prod(tf.cast(shape, tf.int64))
            own, rest[spec.dtype] = rest[spec.dtype][:count], rest[spec.dtype][count:]
            return tf.ensure_shape(tf.reshape(own, shape), spec.shape)

        return tf.nest.map_structure(leaf, self._nest)

    def _sizes(self, rest: dict[tf.DType, tf.Tensor]) -> list[tf.Tensor]:
        """The sizes that travelled, taken off the int64 vector."""
        ranks = [int(size.shape[0]) for size in self._unknown]
        if not ranks:
            return []
        sizes, rest[tf.int64] = rest[tf.int64][: sum(ranks)], rest[tf.int64][sum(ranks) :]
        return tf.split(sizes, ranks)
