"""Each example's term of a loss of the whole batch, found in the graph of a sum or mean.

    L = Σ_b l_b   or   L = (1 / B) Σ_b l_b

With F(L) = (l, whether divided by B), and s shared,

    F(Σ v) = (Σ over v's own axes, no)        F(s L) = (s l, ·)             F(L + M) = (l + m, ·), if both agree
    F(mean v) = (mean over them, yes)         F(L / (c B)) = (l / c, yes)
    F(Σ or mean of v) = (Σ or mean of v's parts, as v has it)      v itself a sum or mean over the examples

The terms are then read, and refused, like any per-example loss: this file decides which loss is trained, not whether
the step is private.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.independence.reading import Walk
from tfdp_rec.core.sensitivity.independence.refusals import users_line
from tfdp_rec.core.sensitivity.independence.sizes import BATCH, SizeArray
from tfdp_rec.core.sensitivity.independence.values import Mixed, Shared, Sized

_REDUCE = {"Sum": tf.reduce_sum, "Mean": tf.reduce_mean}
_SAME_NUMBERS = ("Identity", "Cast", "Reshape", "Squeeze")  # of what a loss is divided by


class LossTerms(NamedTuple):
    """Losses `[batch]`, and whether their sum is divided by the number of examples."""

    losses: tf.Tensor
    by_batch: bool


def find_terms(walk: Walk, loss: tf.Tensor) -> tf.Tensor:
    """The losses `[batch]` whose sum or mean a loss of the batch is.

    Args:
        walk: Reading of the operations that the loss is made of.
        loss: Scalar loss of the batch.

    Raises:
        NotPrivate: The last operation of the loss is no sum or mean over examples.
    """

    # One function for each line of F above, by the type of the last operation.
    def terms_of(tensor: tf.Tensor) -> LossTerms:
        found = rules.get(tensor.op.type)
        if tensor.shape.rank != 0 or found is None:
            raise _refusal(tensor)
        return found(tensor.op)

    def is_shared(tensor: tf.Tensor) -> bool:
        return isinstance(walk.value(tensor), Shared)

    def follow(op: Any) -> LossTerms:
        losses, by_batch = terms_of(op.inputs[0])
        return LossTerms(-losses if op.type == "Neg" else tf.cast(losses, op.outputs[0].dtype), by_batch)

    def separate(op: Any) -> LossTerms:
        values, mean = op.inputs[0], op.type == "Mean"
        if values.op.type == "Pack" and values.shape.rank == 1 and not mean:
            return add(values.op)
        if (parts := _parts_over_the_batch(values.op)) is not None:  # in two reductions, the batch's axis by the first
            values, mean = parts, values.op.type == "Mean"
        if not values.shape.rank or values.shape[0] is not None:
            raise _refusal(op.outputs[0])
        reduce, axes = _REDUCE[op.type], list(range(1, values.shape.rank))
        return LossTerms(reduce(values, axis=axes) if axes else values, mean)

    def add(op: Any) -> LossTerms:
        parts = [terms_of(t) for t in op.inputs if op.type == "Sub" or not _is_zero(t)]
        if len({part.by_batch for part in parts}) != 1:
            raise _refusal(op.outputs[0])
        losses = [part.losses for part in parts]
        return LossTerms(tf.subtract(*losses) if op.type == "Sub" else tf.add_n(losses), parts[0].by_batch)

    def multiply(op: Any) -> LossTerms:
        one, other = op.inputs
        scale, rest = (one, other) if is_shared(one) else (other, one)
        if not is_shared(scale):
            raise _refusal(op.outputs[0])
        losses, by_batch = terms_of(rest)
        return LossTerms(losses * scale, by_batch)

    def divide(op: Any) -> LossTerms:
        losses, by_batch = terms_of(op.inputs[0])
        divisor = op.inputs[1]
        if is_shared(divisor):
            return LossTerms(losses / divisor, by_batch)
        each = None if by_batch else _times_batch(walk, divisor)
        if each is None:
            raise _refusal(op.outputs[0])
        return LossTerms(losses / tf.cast(each, losses.dtype), True)

    rules: dict[str, Callable[[Any], LossTerms]] = {
        **dict.fromkeys(("Identity", "EnsureShape", "CheckNumerics", "Cast", "Neg"), follow),
        **dict.fromkeys(("Sum", "Mean"), separate),
        **dict.fromkeys(("Add", "AddV2", "AddN", "Sub"), add),
        **dict.fromkeys(("RealDiv", "Div", "DivNoNan"), divide),
        "Mul": multiply,
    }
    return terms_of(loss).losses


def _parts_over_the_batch(op: Any) -> tf.Tensor | None:
    """What a sum or mean is of each example, if it is over the first axis, and others; None if it is not."""
    axes: Any = tf.get_static_value(op.inputs[1]) if op.type in _REDUCE else None
    whole = op.inputs[0] if axes is not None else None
    if whole is None or not whole.shape.rank or whole.shape[0] is not None:
        return None
    over = {int(axis) % whole.shape.rank for axis in np.ravel(axes)}
    return _REDUCE[op.type](whole, axis=sorted(over - {0})) if 0 in over else None


def _times_batch(walk: Walk, divisor: tf.Tensor) -> int | None:
    """c if a number is c times the number of examples, None otherwise."""
    while divisor.op.type in _SAME_NUMBERS:
        divisor = divisor.op.inputs[0]
    value = walk.value(divisor)
    if isinstance(value, Mixed):
        if value.reason == "mixes":
            raise walk.reading.refuse(value.operation, "divisor")
        raise walk.reading.refuse(value.operation, value.reason, value.detail, "what the loss is divided by")
    numbers: SizeArray | None = value.numbers if isinstance(value, Sized) else None
    entries = numbers.sizes if numbers is not None else ()
    each = entries[0].divide_by(BATCH) if len(entries) == 1 and entries[0] is not None else None
    return None if each is None else each.plain


def _is_zero(tensor: tf.Tensor) -> bool:
    constant = tf.get_static_value(tensor)
    return constant is not None and not np.any(constant)


def _refusal(tensor: tf.Tensor) -> NotPrivate:
    made = users_line(tensor.op)
    refusal = NotPrivate(
        f"The loss of the batch ends in {tensor.op.type}{f' in {made}' if made else ''}, which is no sum or mean over "
        "its examples, so no example's term is known: write per_example_loss(self, data, training) beside "
        "compute_loss, which returns the averaged terms, of shape [batch]."
    )
    refusal.operation = tensor.op
    return refusal
