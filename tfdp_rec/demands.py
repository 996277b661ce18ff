"""Conditions that must hold when a graph runs, or its step fails.

    d = demand(condition, sentence)        an operation that fails with the sentence, or gives the number 0
    value = given(value, d)                value + 0: what is computed from the check, as data

TensorFlow may rewrite a graph before it runs. An `Assert` gives no number, so that nothing can be computed from it, and
the option `debug_stripper` removes it; what nothing is computed from may be pruned. So no check is an `Assert` here.
The check is a chain in which each operation takes the result of the one before it:

    Select          "0" if the condition holds, the sentence otherwise
    StringToNumber  fails on the sentence, and says it
    DeepCopy        of that number: stateful, so that a function runs it always, and no optimizer leaves it out

Operations under `with tf.control_dependencies(demand(...))` therefore wait for an operation that stays. A value that is
`given` the check is also computed from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

_CHECK = "_tfdp_rec_check"


def demand(condition: Any, *sentence: Any) -> list[tf.Operation]:
    """Operations that fail with a sentence of texts and tensors unless `condition` holds; eagerly, an empty list."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    before = 0 if graph is None else len(graph.get_operations())
    parts = [part if isinstance(part, str) else tf.strings.as_string(part) for part in sentence]
    text = "".join(parts) if all(isinstance(part, str) for part in parts) else tf.strings.join(parts)
    zero = tf.strings.to_number(tf.where(tf.reduce_all(condition), "0", text), tf.int32)
    if graph is None:
        return []
    kept = tf.raw_ops.DeepCopy(x=zero)
    for operation in graph.get_operations()[before:]:
        setattr(operation, _CHECK, True)
    return [kept.op]


def given(value: tf.Tensor, checks: Iterable[tf.Operation]) -> tf.Tensor:
    """The value, computed from the checks among some operations, so that it cannot be had without them."""
    for check in checks:
        if is_check(check):
            value = value + tf.cast(check.outputs[0], value.dtype)
    return value


def is_check(operation: Any) -> bool:
    """Whether an operation is part of what `demand` made."""
    return getattr(operation, _CHECK, False)
