"""Many tensors as few: what crosses a network costs a call for each tensor, however small.

Tensors of one type are laid end to end in one vector, and taken apart where they arrive. Sizes that are not known when
the graph is made travel at the head of the int64 vector.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Parcel:
    """A nest of tensors, packed as few tensors where it is made."""

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
