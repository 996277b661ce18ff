"""Each example's part of a loss of the whole batch, read off the graph: what its last act adds up.

    L = Σ_b l_b   or   L = (1 / B) Σ_b l_b

With F(L) = (l, whether by B), and s what no example decides,

    F(Σ v) = (Σ over v's own axes, no)        F(s L) = (s l, ·)             F(L + M) = (l + m, ·), if both agree
    F(mean v) = (mean over them, yes)         F(L / (c B)) = (l / c, yes)

What is found is a loss by example like any other, and is read and refused like any other: that a step is private does
not hang on this file, only that its loss is the one meant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_rec.independence.reading import Walk
from tfdp_rec.independence.refusals import users_line
from tfdp_rec.independence.sizes import BATCH, Numbers
from tfdp_rec.independence.values import Mixed, Shared, Sized
from tfdp_rec.refused import NotPrivate

_PASSED_ON = ("Identity", "EnsureShape", "CheckNumerics")
_SAME_NUMBERS = ("Identity", "Cast", "Reshape", "Squeeze")  # of what a loss is divided by


class Form(NamedTuple):
    """Losses by example `[batch]`, and whether their sum is divided by the number of examples."""

    losses: tf.Tensor
    by_batch: bool


def by_example(walk: Walk, loss: tf.Tensor) -> tf.Tensor:
    """The losses `[batch]` whose sum or mean a loss of the batch is.

    Args:
        walk: Reading of the operations that the loss is made of.
        loss: Scalar loss of the batch.

    Raises:
        NotPrivate: The last act of the loss is no sum or mean over examples.
    """
    def form(tensor: tf.Tensor) -> Form:
        found = _ACTS.get(tensor.op.type)
        if tensor.shape.rank != 0 or found is None:
            raise _refused(tensor)
        return found(tensor.op)

    def shared(tensor: tf.Tensor) -> bool:
        return isinstance(walk.value(tensor), Shared)

    def passed_on(op: Any) -> Form:
        return form(op.inputs[0])

    def cast(op: Any) -> Form:
        losses, by_batch = form(op.inputs[0])
        return Form(tf.cast(losses, op.outputs[0].dtype), by_batch)

    def reduced(op: Any) -> Form:
        values, mean = op.inputs[0], op.type == "Mean"
        if values.op.type == "Pack" and values.shape.rank == 1 and not mean:
            return added(values.op)
        if not values.shape.rank or values.shape[0] is not None:
            raise _refused(op.outputs[0])
        reduce, axes = tf.reduce_mean if mean else tf.reduce_sum, list(range(1, values.shape.rank))
        return Form(reduce(values, axis=axes) if axes else values, mean)

    def added(op: Any) -> Form:
        parts = [form(t) for t in op.inputs if not _is_zero(t)]
        if len({part.by_batch for part in parts}) != 1:
            raise _refused(op.outputs[0])
        return Form(tf.add_n([part.losses for part in parts]), parts[0].by_batch)

    def subtracted(op: Any) -> Form:
        (one, by_batch), (other, other_by_batch) = (form(t) for t in op.inputs)
        if by_batch != other_by_batch:
            raise _refused(op.outputs[0])
        return Form(one - other, by_batch)

    def negated(op: Any) -> Form:
        losses, by_batch = form(op.inputs[0])
        return Form(-losses, by_batch)

    def multiplied(op: Any) -> Form:
        one, other = op.inputs
        scale, rest = (one, other) if shared(one) else (other, one)
        if not shared(scale):
            raise _refused(op.outputs[0])
        losses, by_batch = form(rest)
        return Form(losses * scale, by_batch)

    def divided(op: Any) -> Form:
        losses, by_batch = form(op.inputs[0])
        divisor = op.inputs[1]
        if shared(divisor):
            return Form(losses / divisor, by_batch)
        each = None if by_batch else _times_batch(walk, divisor)
        if each is None:
            raise _refused(op.outputs[0])
        return Form(losses / tf.cast(each, losses.dtype), True)

    _ACTS: dict[str, Callable[[Any], Form]] = {
        **dict.fromkeys(_PASSED_ON, passed_on),
        **dict.fromkeys(("Sum", "Mean"), reduced),
        **dict.fromkeys(("Add", "AddV2", "AddN"), added),
        **dict.fromkeys(("RealDiv", "Div", "DivNoNan"), divided),
        "Cast": cast, "Sub": subtracted, "Neg": negated, "Mul": multiplied,
    }  # fmt: skip
    return form(loss).losses


def _times_batch(walk: Walk, divisor: tf.Tensor) -> int | None:
    """c, where a number is c times the number of examples; None where it is not."""
    while divisor.op.type in _SAME_NUMBERS:
        divisor = divisor.op.inputs[0]
    value = walk.value(divisor)
    if isinstance(value, Mixed):
        raise walk.reading.refuse(value.operation, value.reason, value.detail, "what the loss is divided by")
    numbers: Numbers | None = value.numbers if isinstance(value, Sized) else None
    entries = numbers.sizes if numbers is not None else ()
    each = entries[0].over(BATCH) if len(entries) == 1 and entries[0] is not None else None
    return None if each is None else each.plain


def _is_zero(tensor: tf.Tensor) -> bool:
    constant = tf.get_static_value(tensor)
    return constant is not None and not np.any(constant)


def _refused(tensor: tf.Tensor) -> NotPrivate:
    made = users_line(tensor.op)
    refusal = NotPrivate(
        f"The loss of the batch ends in {tensor.op.type}{f' in {made}' if made else ''}, which is no sum or mean over "
        "its examples, so that no example's part is known: write per_example_loss(self, data, training) beside "
        "compute_loss, returning what it averages, of shape [batch]."
    )
    refusal.operation = tensor.op
    return refusal
