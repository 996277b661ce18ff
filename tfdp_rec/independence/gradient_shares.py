"""Each example's share of the gradient of a tensor that the whole batch shares.

A bias of the model's own, or a position embedding looked up once for the batch, has a gradient that is a sum over the
examples. The operation that adds up is the one at which a reading loses track of them, and its input holds the shares:
the same sum over all other axes, followed by the same linear operations (reshapes, scaling by a shared factor) for each
example. With σ the sum over the examples,

    gradient = L(σ(G)), L linear    =>    share of example b = L(G_b)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp_rec.independence.reading import At, Walk
from tfdp_rec.independence.rules.products import letters
from tfdp_rec.independence.values import ByExample, Mixed, Shared

_Share = Callable[["GradientShares", At], tf.Tensor]
_RULES: dict[str, _Share] = {}


def _share(*types: str) -> Callable[[_Share], _Share]:
    def register(function: _Share) -> _Share:
        _RULES.update(dict.fromkeys(types, function))
        return function

    return register


class GradientShares:
    """Each example's shares `[batch, ...]` of gradients in a graph that was read; `subject` names them in refusals."""

    def __init__(self, walk: Walk, subject: str):
        self._walk, self._subject = walk, subject

    def of_tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """The shares that add up to `tensor`; raises `NotPrivate` if they are not found."""
        value = self._walk.value(tensor)
        function = _RULES.get(tensor.op.type)
        if not isinstance(value, Mixed) or function is None:
            raise self._walk.reading.refuse(tensor.op, "shares", subject=self._subject)
        return function(self, At(self._walk, tensor.op))


@_share("Sum")
def _of_a_sum(shares: GradientShares, at: At) -> tf.Tensor:
    value, axes = at.values[0], at.plain(1)
    if isinstance(value, Mixed) and axes is not None:  # a sum, by other axes, of a sum over the examples
        parts, others = shares.of_tensor(at.op.inputs[0]), [1 + a % (at.rank() or 1) for a in axes]
        return tf.reduce_sum(parts, others, at.attr("keep_dims"))
    rank = at.rank()
    if not isinstance(value, ByExample) or not value.is_plain or axes is None or rank is None:
        raise _refusal(shares, at)
    keep, others = bool(at.attr("keep_dims")), [a % rank for a in axes if a % rank != value.axis]
    first = tf.transpose(at.op.inputs[0], [value.axis, *(a for a in range(rank) if a != value.axis)])
    moved = [1 + a - (a > value.axis) for a in others]
    found = tf.reduce_sum(first, moved, keepdims=keep)
    return tf.expand_dims(found, 1 + value.axis) if keep else found


@_share("BiasAddGrad")
def _of_a_bias(shares: GradientShares, at: At) -> tf.Tensor:
    value, rank = at.values[0], at.rank()
    if value != ByExample(0) or rank is None or at.attr("data_format") == b"NCHW":
        raise _refusal(shares, at)
    return tf.reduce_sum(at.op.inputs[0], list(range(1, rank - 1)))


@_share("MatMul", "BatchMatMulV2", "Einsum")
def _of_a_product(shares: GradientShares, at: At) -> tf.Tensor:
    terms, output = letters(at)
    owners = [(v, t) for v, t in zip(at.values, terms) if isinstance(v, ByExample)]
    if len(owners) == 2 and all(v.is_plain for v, _ in owners):
        names = {t[v.axis] for v, t in owners}
        if len(names) == 1 and not names & set(output):
            return tf.einsum(f"{terms[0]},{terms[1]}->{names.pop()}{output}", *at.op.inputs)
    sums = [n for n, v in enumerate(at.values) if isinstance(v, Mixed)]
    if len(sums) == 1 and isinstance(at.values[1 - sums[0]], Shared):
        parts: list[Any] = list(at.op.inputs)
        parts[sums[0]] = shares.of_tensor(parts[sums[0]])
        terms[sums[0]] = "Z" + terms[sums[0]]
        return tf.einsum(f"{terms[0]},{terms[1]}->Z{output}", *parts)
    raise _refusal(shares, at)


@_share("Reshape")
def _reshaped(shares: GradientShares, at: At) -> tf.Tensor:
    found, like = shares.of_tensor(at.op.inputs[0]), at.op.outputs[0]
    split = tf.reshape(found, tf.concat([tf.shape(found)[:1], tf.shape(like)], axis=0))
    return tf.ensure_shape(split, [None, *like.shape])


@_share("ExpandDims", "Squeeze")
def _of_another_rank(shares: GradientShares, at: At) -> tf.Tensor:
    return _reshaped(shares, at)


@_share("Identity", "StopGradient", "EnsureShape", "PreventGradient")
def _passed_on(shares: GradientShares, at: At) -> tf.Tensor:
    return shares.of_tensor(at.op.inputs[0])


@_share("Cast")
def _cast(shares: GradientShares, at: At) -> tf.Tensor:
    return tf.cast(shares.of_tensor(at.op.inputs[0]), at.op.outputs[0].dtype)


@_share("Neg")
def _negative(shares: GradientShares, at: At) -> tf.Tensor:
    return -shares.of_tensor(at.op.inputs[0])


@_share("Transpose")
def _transposed(shares: GradientShares, at: At) -> tf.Tensor:
    order = at.plain(1)
    if order is None:
        raise _refusal(shares, at)
    return tf.transpose(shares.of_tensor(at.op.inputs[0]), [0, *(1 + a for a in order)])


@_share("StridedSliceGrad")
def _of_a_slice(shares: GradientShares, at: At) -> tf.Tensor:
    # The same slice of each example's gradient: one more item in front, which takes the whole axis.
    found = shares.of_tensor(at.op.inputs[4])
    shape, begin, end, strides = (tf.cast(t, tf.int64) for t in at.op.inputs[:4])
    first = tf.shape(found, tf.int64)[:1]
    masks = {f"{n}_mask": at.attr(f"{n}_mask") << 1 for n in ("ellipsis", "new_axis", "shrink_axis")}
    masks |= {f"{n}_mask": at.attr(f"{n}_mask") << 1 | 1 for n in ("begin", "end")}
    return tf.raw_ops.StridedSliceGrad(
        shape=tf.concat([first, shape], 0),
        begin=tf.concat([[0], begin], 0),
        end=tf.concat([[0], end], 0),
        strides=tf.concat([[1], strides], 0),
        dy=found,
        **masks,
    )


@_share("AddN", "AddV2", "Add")
def _added(shares: GradientShares, at: At) -> tf.Tensor:
    if len({at.rank(n) for n in range(len(at.values))}) > 1:
        raise _refusal(shares, at)
    return tf.add_n([shares.of_tensor(t) for t in at.op.inputs])


@_share("Mul", "RealDiv")
def _scaled(shares: GradientShares, at: At) -> tf.Tensor:
    sums = [n for n, v in enumerate(at.values) if isinstance(v, Mixed)]
    same = (at.rank(0) or 0) >= (at.rank(1) or 0) if sums == [0] else (at.rank(1) or 0) >= (at.rank(0) or 0)
    if len(sums) != 1 or not isinstance(at.values[1 - sums[0]], Shared) or not same:
        raise _refusal(shares, at)
    found, factor = shares.of_tensor(at.op.inputs[sums[0]]), at.op.inputs[1 - sums[0]]
    if at.op.type == "RealDiv" and sums == [1]:
        raise _refusal(shares, at)
    return found * factor if at.op.type == "Mul" else found / factor


def _refusal(shares: GradientShares, at: At) -> Exception:
    return at.reading.refuse(at.op, "shares", subject=shares._subject)
