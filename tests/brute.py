"""What the reading of a graph claims, held against what the graph does when one example is changed or taken away."""

import numpy as np
import tensorflow as tf

from tfdp_rec.clipping.independence import ByExample, Reading, Shared, Walk
from tfdp_rec.clipping.independence.values import Sized


def claims(function, *inputs, shared=()):
    """[(value, output)] of a function of tensors by example, and shared ones; the traced function; and its reading."""
    specs = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in inputs]
    specs += [tf.TensorSpec(np.shape(s), np.asarray(s).dtype) for s in shared]
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    walk = Walk(Reading(), traced.graph)
    for number, tensor in enumerate(traced.graph.inputs[: len(specs)]):
        walk.leaf(tensor, number < len(inputs))
    walk.read()
    outputs = tf.nest.flatten(traced.structured_outputs)
    return [walk.value(t) for t in outputs], traced, walk


def holds(function, *inputs, shared=(), expect=None):
    """Checks every claim by brute force; gives the values claimed."""
    inputs = [np.asarray(x) for x in inputs]
    values, traced, _ = claims(function, *inputs, shared=shared)
    run = lambda xs: [np.asarray(o) for o in tf.nest.flatten(traced(*map(tf.constant, (*xs, *shared))))]  # noqa: E731
    before = run(inputs)
    size = len(inputs[0])
    for one in range(size):
        other = [np.array(x) for x in inputs]
        for x in other:
            x[one] = _something_else(x, one)
        _compare(values, before, run(other), size, one, keep=range(size))
        rest = [i for i in range(size) if i != one]
        _compare(values, before, run([x[rest] for x in inputs]), size, one, keep=rest, fewer=True)
    if expect is not None:
        assert values == expect, [str(v) for v in values]
    return values


def _something_else(x, one):
    if x.dtype.kind in "iub":
        return np.roll(x, 1, axis=0)[one] if x.dtype.kind != "b" else ~x[one]
    if x.dtype.kind in "OSU":
        return x[one - 1]
    return x[one] * -3.7 + 11.0


def _compare(values, before, after, size, one, keep, fewer=False):
    for value, old, new in zip(values, before, after):
        if isinstance(value, Shared):
            np.testing.assert_array_equal(old, new)
        elif isinstance(value, Sized) and not fewer:
            np.testing.assert_array_equal(old, new)
        elif isinstance(value, ByExample):
            others = [i for i in range(size) if i != one]
            a = _entries(old, value, size)[others]
            b = _entries(new, value, size - fewer)[range(size - 1) if fewer else others]
            if a.dtype.kind == "f":
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
            else:
                np.testing.assert_array_equal(a, b)


def _entries(array, value, size):
    """An array with the examples first: `[size, outer, inner, ...]`."""
    moved = np.moveaxis(array, value.axis, 0)
    outer, inner = int(value.outer.number), int(value.inner.number)
    if value.outer.letters or value.inner.letters:
        outer, inner = 1, moved.shape[0] // size
    assert moved.shape[0] == outer * size * inner, (array.shape, value)
    return np.moveaxis(moved.reshape([outer, size, inner, *moved.shape[1:]]), 1, 0)
