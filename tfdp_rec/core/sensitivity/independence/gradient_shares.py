"""Each example's share of the gradient of a tensor that the whole batch shares.

A bias of the model's own, or a position embedding looked up once for the batch, has a gradient that is a sum over the
examples. The operation that adds up is the one at which a reading loses track of them, and its input holds the shares:
the same sum over all other axes, followed by the same linear operations for each example. With σ the sum over the
examples,

    gradient = L(σ(G)), L linear    =>    share of example b = L(G_b)

L is made of sums, products of two values by example, reshapes, casts and additions: no model counted in
docs/privacy-independence.md needs others. A product is what scores by a table whose rows are looked up for all, as in a
softmax over the whole catalogue.
"""

from __future__ import annotations

import tensorflow as tf

from tfdp_rec.core.sensitivity.independence.reading import At, Walk
from tfdp_rec.core.sensitivity.independence.refusals import cause
from tfdp_rec.core.sensitivity.independence.rules.products import letters
from tfdp_rec.core.sensitivity.independence.values import ByExample, Mixed, Shared


class GradientShares:
    """Each example's shares `[batch, ...]` of gradients in a graph that was read; `subject` names them in refusals."""

    def __init__(self, walk: Walk, subject: str):
        self._walk, self._subject = walk, subject
        self._rules = {
            "Sum": self._split_sum, "Reshape": self._split_reshape,
            **dict.fromkeys(("Cast", "Identity"), self._split_cast),
            **dict.fromkeys(("AddN", "AddV2"), self._split_addition),
            **dict.fromkeys(("MatMul", "BatchMatMulV2", "Einsum"), self._split_product),
        }  # fmt: skip

    def find(self, tensor: tf.Tensor) -> tf.Tensor:
        """The shares that add up to `tensor`; raises `NotPrivate` if they are not found."""
        function = self._rules.get(tensor.op.type)
        if function is None or not isinstance(self._walk.value(tensor), Mixed):
            raise self._refusal(tensor.op)
        return function(At(self._walk, tensor.op))

    def _split_sum(self, at: At) -> tf.Tensor:
        value, axes, rank = at.values[0], at.plain(1), at.rank()
        keep = bool(at.attr("keep_dims"))
        if isinstance(value, Mixed) and axes is not None and rank:  # a sum of a sum over the examples, by other axes
            return tf.reduce_sum(self.find(at.op.inputs[0]), [1 + a % rank for a in axes], keep)
        if not isinstance(value, ByExample) or not value.is_plain or axes is None or rank is None:
            raise self._refusal(at.op)
        # The examples' axis is moved to the front, and stays.
        first = tf.transpose(at.op.inputs[0], [value.axis, *(a for a in range(rank) if a != value.axis)])
        others = [a % rank for a in axes if a % rank != value.axis]
        found = tf.reduce_sum(first, [1 + a - (a > value.axis) for a in others], keepdims=keep)
        return tf.expand_dims(found, 1 + value.axis) if keep else found

    def _split_product(self, at: At) -> tf.Tensor:
        terms, output = letters(at)
        names = {term[v.axis] for v, term in zip(at.values, terms) if isinstance(v, ByExample) and v.is_plain}
        whole = all(isinstance(v, ByExample) and v.is_plain for v in at.values)
        if not whole or len(names) != 1 or names & set(output):
            raise self._refusal(at.op)
        return tf.einsum(f"{terms[0]},{terms[1]}->{names.pop()}{output}", *at.op.inputs)

    def _split_reshape(self, at: At) -> tf.Tensor:
        if not isinstance(at.values[1], Shared):  # examples would say where the others' shares go
            raise self._refusal(at.op)
        found, like = self.find(at.op.inputs[0]), at.op.outputs[0]
        split = tf.reshape(found, tf.concat([tf.shape(found)[:1], tf.shape(like)], axis=0))
        return tf.ensure_shape(split, [None, *like.shape])

    def _split_cast(self, at: At) -> tf.Tensor:
        return tf.cast(self.find(at.op.inputs[0]), at.op.outputs[0].dtype)

    def _split_addition(self, at: At) -> tf.Tensor:
        if len({at.rank(n) for n in range(len(at.values))}) > 1:
            raise self._refusal(at.op)
        return tf.add_n([self.find(t) for t in at.op.inputs])

    def _refusal(self, operation: tf.Operation) -> Exception:
        if found := cause(operation.graph.get_operations()):
            return self._walk.reading.refuse(*found)
        reason = "slice" if operation.type == "StridedSliceGrad" else "shares"
        return self._walk.reading.refuse(operation, reason, subject=self._subject)
