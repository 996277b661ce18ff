"""Conditions that must hold when a graph runs, or its step fails.

    d = require(condition, sentence)        an operation that fails with the sentence, or gives the number 0
    d = require_all((condition, sentence), (condition, sentence))      one operation for several conditions
    value = depend_on(value, d)             value + 0: what is computed from the check, as data

TensorFlow may rewrite a graph before it runs. An `Assert` gives no number, so that nothing can be computed from it, and
the option `debug_stripper` removes it; what nothing is computed from may be pruned. So no check is an `Assert` here.
The check is a chain in which each operation takes the result of the one before it:

    Select          "0" if the condition holds, the sentence otherwise; one for each condition
    StringToNumber  fails on the sentence, and says it
    DeepCopy        of that number: stateful, so that a function runs it always, and no optimizer leaves it out

Operations under `with tf.control_dependencies(require(...))` therefore wait for an operation that stays. The value that
`depend_on` returns is also computed from it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import run_unordered

_CHECK = "_tfdp_rec_check"
# Where lengths are known and branches are decided: arithmetic of these on a GPU would copy each number to it and back.
# Not where the length of a tensor is asked for: it would come along.
HOST = "CPU:0"
Check = tuple[Any, ...]
"""A condition, and the texts and tensors of its sentence."""

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def negate(comparison: tf.Tensor) -> tf.Tensor:
    """Whether numbers do not compare so; true where one of them is NaN."""
    # TensorFlow's graph optimizer makes of "not at least" a "less than", which NaN is not.
    return tf.where(comparison, False, True)


def place_on_host(function: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """`function` with its operations on the host: of single numbers and of ids, each of which a GPU would start."""

    @functools.wraps(function)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        with tf.device(HOST):
            return function(*args, **kwargs)

    return run


def require(condition: Any, *sentence: Any) -> list[tf.Operation]:
    """Operations that fail with a sentence of texts and tensors unless `condition` holds; eagerly, an empty list."""
    return require_all((condition, *sentence))


def require_equal(found: tf.Tensor, wanted: tf.Tensor, *sentence: Any) -> list[tf.Operation]:
    """As `require`, of two tensors that must be the same."""
    return require(tf.equal(found, wanted), *sentence)


def require_all(*checks: Check) -> list[tf.Operation]:
    """Operations that fail with the sentence of the first condition that does not hold; eagerly, an empty list."""
    if not checks:
        return []
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    before = 0 if graph is None else len(graph.get_operations())
    text: Any = "0"
    met = [tf.convert_to_tensor(condition) for condition, *_ in checks]
    met = [each if each.shape.rank == 0 else tf.reduce_all(each) for each in met]
    if len(met) > 1:  # from a GPU they come together, in one copy
        together = tf.stack(met)
        with tf.device(HOST):
            met = tf.unstack(together, num=len(met))
    for holds, (_, *sentence) in zip(reversed(met), reversed(checks), strict=True):
        text = tf.where(holds, text, _join(sentence))
    zero = tf.strings.to_number(text, tf.int32)
    if graph is None:
        return []
    kept = tf.raw_ops.DeepCopy(x=zero)
    for operation in graph.get_operations()[before:]:
        setattr(operation, _CHECK, True)
    return [kept.op]


def _join(sentence: Sequence[Any]) -> Any:
    def part(one: Any) -> Any:
        return one if isinstance(one, str) or one.dtype == tf.string else tf.strings.as_string(one)

    parts = [part(one) for one in sentence]
    if all(isinstance(one, str) for one in parts):
        return "".join(parts)
    return parts[0] if len(parts) == 1 else tf.strings.join(parts)


def unordered_checks(graph: Any, start: int) -> list[tf.Operation]:
    """The checks among a graph's operations from number `start` on, which no longer wait for one another."""
    found = [each for each in graph.get_operations()[start:] if is_check(each) and each.type == "DeepCopy"]
    for each in found:
        run_unordered(each)
    return found


def depend_on(value: tf.Tensor, checks: Iterable[tf.Operation]) -> tf.Tensor:
    """The value, computed from the checks among some operations, so that it cannot be had without them."""
    for check in checks:
        if is_check(check):
            with tf.device(HOST):
                zero = tf.cast(check.outputs[0], value.dtype)
            value = value + zero
    return value


def sentence_of(problem: tf.errors.OpError) -> str:
    """The sentence of the check that failed, from TensorFlow's error about the graph; "" if it was no check."""
    found = re.search(r"StringToNumberOp could not correctly convert string: (\S+ [^\n]*\.)(?=\n|$)", problem.message)
    return found[1] if found else ""


def is_check(operation: Any) -> bool:
    """Whether an operation is part of what `require` made."""
    return getattr(operation, _CHECK, False)
