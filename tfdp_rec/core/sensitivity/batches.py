"""A batch as examples: what is split along the first axis, and what is shared by all examples.

A batch is any nest of dicts, tuples and lists of tensors. An entry of a dict whose key is in `shared` has no batch axis
(negatives drawn from the public catalogue, say) and is the same for every example. Such a key stands once in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import HOST, place_on_host, require
from tfdp_rec.core.ground.refused import NotPrivate


def map_examples(transform: Callable[[tf.Tensor], Any], batch: Any, shared: Sequence[str] = ()) -> Any:
    """`batch` with `transform` applied to every tensor that has a batch axis."""
    found = set()

    def apply(part: Any) -> Any:
        if isinstance(part, dict):
            return type(part)({k: once(k, v) if k in shared else apply(v) for k, v in part.items()})
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(apply, part))
        if isinstance(part, (tuple, list)):
            return type(part)(map(apply, part))
        return None if part is None else transform(part)

    def once(key: str, value: Any) -> Any:
        if key in found:  # the other may be of examples, and would be checked by nothing
            raise NotPrivate(
                f"'{key}' is of the model's shared_inputs and stands at two places of the batch, such as in the inputs "
                "and within one of them. Only one can be the same for all examples: give the other one another name."
            )
        found.add(key)
        return value

    return apply(batch)


def example_leaves(batch: Any, shared: Sequence[str] = ()) -> list[tf.Tensor]:
    """The tensors of a batch that have a batch axis."""
    leaves: list[tf.Tensor] = []
    map_examples(leaves.append, batch, shared)
    return leaves


def batch_size(batch: Any, shared: Sequence[str] = ()) -> tf.Tensor:
    """The number of examples: the first length of the first tensor that is not shared."""
    leaves = example_leaves(batch, shared)
    if not leaves:
        raise ValueError("The batch holds no tensor with a batch axis.")
    return tf.shape(leaves[0])[0]


ALIGNED = 16
"""The number of rows that are computed is a multiple of this: as many float32 numbers as a vector register holds."""


@place_on_host
def align(batch: Any, shared: Sequence[str] = (), multiple: int = ALIGNED) -> Any:
    """`batch` with its examples repeated up to a multiple of `multiple` rows; an empty batch is unchanged."""
    # Kernels compute the last elements of a tensor, and products of few rows, in other ways than the rest. With whole
    # vectors an example's numbers do not depend on the number of others, but for sums of more than 768 terms. The
    # proof does not lean on it: neighbours have the same rows (docs/privacy-floating-point.md, "One row less").
    # They are repeated where a batch comes from.
    size = batch_size(batch, shared)
    places = tf.range((size + multiple - 1) // multiple * multiple) % tf.maximum(size, 1)

    def repeat(tensor: Any) -> Any:
        return tensor if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)) else tf.gather(tensor, places)

    return batch if multiple == 1 else map_examples(repeat, batch, shared)


def hide_batch_axis(batch: Any, shared: Sequence[str] = ()) -> Any:
    """The same batch with its first axis of unknown length, so that no axis of known length is the batch's."""
    # A reading assumes the declared lengths and one row an example: both are checked in the graph. A tensor of one row
    # would otherwise be broadcast, one example's row to all examples.
    leaves = [t for t in example_leaves(batch, shared) if isinstance(t, tf.Tensor) and t.shape.rank]
    if tf.executing_eagerly() or not leaves:
        return batch
    several = [tf.shape(leaf) for leaf in leaves]
    with tf.device(HOST):
        rows = tf.stack([lengths[0] for lengths in several])
        checks = require(rows == rows[0], _ROWS) if len(leaves) > 1 else []

    def hide(tensor: tf.Tensor) -> tf.Tensor:
        if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
            return tensor
        shape = [None, *tensor.shape[1:]]
        with tf.control_dependencies(checks):
            tensor = tf.ensure_shape(tensor, shape)
        return tf.compat.v1.placeholder_with_default(tensor, shape)

    return map_examples(hide, batch, shared)


_ROWS = "Every tensor of a batch must have one row an example; name shared tensors in the model's shared_inputs."


def refuse_padding(leaf: Any) -> None:
    """Raises `NotPrivate` for tensors whose lengths may depend on the longest example of the batch."""
    if not isinstance(leaf, (tf.Tensor, tf.TensorSpec)):
        raise NotPrivate(
            f"The batch holds a {type(leaf).__name__}, which has no axis with one row an example: give arrays of "
            "a fixed length, ids and weights by tfdp_rec.data.padded(ids, length), or convert it in the data pipeline "
            "(to_tensor(shape=[None, length]), tf.sparse.to_dense)."
        )
    if leaf.shape.rank is None or None in leaf.shape[1:]:
        raise NotPrivate(
            f"The batch has a tensor of shape {leaf.shape}: if batches are padded to their longest example, that "
            "example changes the input of all others. Pad to a fixed length: in fetch, or padded_batch(..., "
            "padded_shapes=...)."
        )


def open_specs(batch: Any, shared: Sequence[str] = ()) -> Any:
    """The signature of a graph for batches like this one, or of this spec, of any number of examples."""

    def open_spec(leaf: Any) -> Any:
        one = spec(leaf)
        opens = isinstance(one, tf.TensorSpec) and one.shape.rank
        return tf.TensorSpec([None, *one.shape[1:]], one.dtype) if opens else one

    def spec(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, (tf.TypeSpec, tf.RaggedTensor, tf.SparseTensor)):
            return leaf
        tensor = tf.convert_to_tensor(leaf)
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    return tf.nest.map_structure(spec, map_examples(open_spec, batch, shared))


def tensors(batch: Any) -> Any:
    """The batch with numpy arrays and Python numbers as tensors."""
    return tf.nest.map_structure(lambda v: v if v is None else tf.convert_to_tensor(v), batch)
