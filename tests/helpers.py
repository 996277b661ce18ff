"""What tests of several parts share: the slow, obviously right clipped sum, and a walk through a traced graph."""

import contextlib
import functools
import os
import sys
import tempfile
import zipfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdp_rec
from tfdp_rec.clipping import Clipping, clipped_sum, in_parts
from tfdp_rec.core.ground.withheld_rows import WithheldRows
from tfdp_rec.core.mechanism.noise.base import NoiseSource
from tfdp_rec.core.sensitivity.batches import hide_batch_axis, tensors
from tfdp_rec.core.sensitivity.engine import SLACK, Graph, shared_inputs


@contextlib.contextmanager
def double_precision():
    """Keras in float64, for comparisons finer than float32."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


class Scored(tfdp_rec.PrivateTraining, keras.Model):
    """A model of some layers with a smooth loss of what `forward(layers, batch)` gives.

    A batch is a dict; its entry `weight` `[batch]` makes the examples' gradients differ in size.
    """

    def __init__(self, layers, forward, shared_inputs=()):
        super().__init__()
        self.parts, self.forward, self.shared_inputs = layers, forward, tuple(shared_inputs)

    def per_example_loss(self, data, training=True):
        total = 0.0
        for output in tf.nest.flatten(self.forward(self.parts, data)):
            axes = list(range(1, output.shape.rank))
            ramp = 1.0 + tf.cast(tf.range(tf.shape(output)[-1]), output.dtype) if axes else 1.0
            total += tf.reduce_sum(tf.sin(output) * ramp, axis=axes)
        return total * tf.cast(data["weight"], total.dtype)


def one_example(batch, number, shared=()):
    """The batch of one that holds example `number`."""
    if isinstance(batch, dict):
        return {k: v if k in shared else one_example(v, number) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(one_example(v, number) for v in batch)
    return tf.convert_to_tensor(batch)[number : number + 1]


def example_gradients(model, batch, number, training=False):
    """One example's gradient of every trainable variable, by plain backpropagation: {path: array}."""
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = model.per_example_loss(one_example(batch, number, model.shared_inputs), training=training)
    found = tape.gradient(loss, [v.value for v in variables])
    return {
        v.path: np.zeros(v.shape) if g is None else np.asarray(tf.convert_to_tensor(g), np.float64)
        for v, g in zip(variables, found)
    }


def oracle(model, batch, size, clip):
    """({path: Σ of scaled gradients}, norms): a loop over batches of one, and numpy; rounding has its share of
    the clip, which is 1 for "auto".
    """
    bound = (1.0 if clip == "auto" else clip) / (1 + SLACK)
    total, norms = {v.path: np.zeros(v.shape) for v in model.trainable_variables}, []
    for number in range(size):
        gradients = example_gradients(model, batch, number)
        norms.append(np.sqrt(sum(np.sum(g**2) for g in gradients.values())))
        for path, g in gradients.items():
            within = min(1.0, bound / norms[-1] if norms[-1] else 1.0)
            total[path] += g * (bound / (norms[-1] + 0.01) if clip == "auto" else within)
    return total, np.array(norms)


def dense(gradient, shape):
    """A gradient, or slices of one, as an array."""
    if not isinstance(gradient, tf.IndexedSlices):
        return np.asarray(gradient, np.float64)
    whole = np.zeros(tuple(shape))
    np.add.at(whole, np.asarray(gradient.indices), np.asarray(gradient.values, np.float64))
    return whole


def dense_gradients(model, clipped):
    """All gradients of a `ClippedSum` as arrays."""
    return {v.path: dense(clipped.gradients[v.path], v.shape) for v in model.trainable_variables}


def evaluated(model, batch, clip, **options):
    """The clipped sum with layers as in evaluation."""
    return clipped_sum(model, batch, clip, training=False, **options)


def sums_of(model, clip, microbatch_size=None, training=True):
    """The clipped sum of a batch as a function that is traced once for batches of all sizes."""
    shared = shared_inputs(model)
    clipping = Clipping(model, functools.partial(model.per_example_loss, training=training), tf.constant(clip))

    def run(batch):
        batch = hide_batch_axis(batch, shared)
        found = clipping.sum(batch) if microbatch_size is None else in_parts(clipping, batch, microbatch_size)
        return found, None

    graph = Graph(run, shared)
    return lambda batch: graph(tensors(batch))[0]


def assert_matches_oracle(model, batch, clip=0.7, rtol=1e-6, take=evaluated, **options):
    """The clipped sum, its norms and its sensitivity are those of the oracle; returns the sum."""
    size = len(tf.nest.flatten({k: v for k, v in batch.items() if k not in model.shared_inputs})[0])
    expected, norms = oracle(model, batch, size, clip)
    found = take(model, batch, clip, **options)
    np.testing.assert_allclose(found.norms, norms, rtol=rtol, atol=rtol * 1e-3)
    bound = 1.0 if clip == "auto" else clip
    assert float(found.sensitivity) == np.float32(bound)
    assert found.norms.dtype == keras.config.floatx()
    for path, gradient in dense_gradients(model, found).items():
        np.testing.assert_allclose(gradient, expected[path], rtol=rtol, atol=rtol * bound, err_msg=path)
    return found


def operations(graph):
    """All operations of a traced graph, those inside its loops, branches and calls included."""
    seen, todo = set(), [graph]
    while todo:
        graph = todo.pop()
        for operation in graph.get_operations():
            yield operation
            for name in _called(operation):
                function = _definition(graph, name)
                if function is not None and name not in seen:
                    seen.add(name)
                    todo.append(function.graph if hasattr(function, "graph") else function)


def _called(operation):
    for attribute in operation.node_def.attr.values():
        if attribute.HasField("func"):
            yield attribute.func.name
        yield from (f.name for f in attribute.list.func)


def _definition(graph, name):
    while graph is not None:
        for known in (name, name.encode()):
            if known in graph._functions:
                return graph._functions[known]
        graph = getattr(graph, "outer_graph", None)
    raise LookupError(f"no function {name}")


def tensors_of_shape(graph, shape):
    """Names of all tensors of that shape in a traced graph; those that a variable's handle stands for are not tensors.

    Args:
        graph: a `FuncGraph`: `tf.function(...).get_concrete_function(...).graph`.
        shape: as a list, say a table's.
    """
    found = [t for o in operations(graph) for t in o.outputs if t.shape.rank == len(shape) and t.shape == shape]
    return [t.name for t in found if "rows_by_reference" not in t.name]  # rows that move are not read


class Seeded(NoiseSource):
    """Unit Gaussians of numpy, so that a test decides the same way every time."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def draw(self, requests, step):
        return [request.answer(self.unit(request)) for request in requests]

    def unit(self, request):
        size = request.draws * request.width
        draw = lambda n: self.generator.standard_normal((int(n), size))  # noqa: E731
        return tf.numpy_function(draw, [tf.size(request.rows)], tf.float64)


class NeverWithheld(WithheldRows):
    """In place of an owner, for tests that build an optimizer by hand and read rows that owe noise."""

    def __init__(self, variable):
        super().__init__(variable)
        self.private = self.public
        self._is_measured = False

    is_withheld = False

    def knows(self, optimizer):
        return True

    def withhold(self):
        if not self._is_measured:
            with tf.init_scope():
                self.bound.assign(np.abs(self.public.numpy()).max(initial=0.0))
        self._is_measured = True

    def publish(self):
        self._is_measured = False


def build_by_hand(optimizer, variables, tables):
    """Builds an optimizer whose tables, which are given, no model owns."""
    optimizer.build(variables, {table.path: None for table in tables})
    for table in optimizer.tables.values():
        for variable in table.stored_variables:
            vars(variable)["withheld"] = NeverWithheld(variable)


def release_by_hand(optimizer):
    """What an owner's `release` does."""
    optimizer.settle()
    for table in optimizer.tables.values():
        for variable in table.stored_variables:
            vars(variable)["withheld"].publish()
    optimizer.debts.bound.warn_of_steps_left_out()


def of_this_machine(*folders):
    """Parts of paths that no file which is handed on may hold; `folders` are those of the test."""
    return [*map(str, folders), f"{tempfile.gettempdir()}/tmp", f"{Path.home()}/", sys.prefix, os.getcwd()]


def bytes_in(path):
    """All bytes of a file, or of the files of a folder, archives unpacked."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        yield file.read_bytes()
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                yield from (archive.read(name) for name in archive.namelist())
