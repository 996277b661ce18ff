"""What the reading of a graph claims, held against what the graph does when examples are exchanged or left out.

A claim is about every tensor, not only about what a function gives back: `Held.faults` runs all tensors of a graph on
batches that differ, and names the first ones whose claim is false. What TensorFlow cannot compute is left out, with
all that hangs on it and nothing else: an operation that nothing reads is not run in a training step either.
"""

from __future__ import annotations

import re

import numpy as np
import tensorflow as tf

from tfdp_rec.core.sensitivity.independence import ByExample, Reading, Shared, Walk
from tfdp_rec.core.sensitivity.independence.sizes import size as length
from tfdp_rec.core.sensitivity.independence.values import Seed, Sized

WIDE = 2_000_000  # entries of a tensor that is too large to be run on a long batch
DRAWS = 24  # seeds that a function with noise is run with
CHANGED = -1  # the row of an example that was exchanged


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
    """Checks every claim about what a function gives back by brute force; gives the values claimed."""
    inputs = [np.asarray(x) for x in inputs]
    found, traced, walk = claims(function, *inputs, shared=shared)
    outputs = tf.nest.flatten(traced.structured_outputs)
    run = lambda xs: [np.asarray(o) for o in tf.nest.flatten(traced(*map(tf.constant, (*xs, *shared))))]  # noqa: E731
    judge, before, size = Judge(walk), run(inputs), len(inputs[0])
    for one in range(size):
        other = [np.array(x) for x in inputs]
        for x in other:
            x[one] = _something_else(x, one)
        rows = np.arange(size)
        for batch, kept in ((other, np.where(rows == one, CHANGED, rows)), ([np.delete(x, one, 0) for x in inputs],
                                                                           np.delete(rows, one))):  # fmt: skip
            for tensor, old, new in zip(outputs, before, run(batch)):
                wrong = judge.wrong(tensor, old, size, new, kept)
                assert wrong is None, f"{walk.value(tensor)}: {wrong}"
    if expect is not None:
        plain = [ByExample(v.axis, v.inner) if _kind(v) == "Within" else v for v in found]
        assert plain == expect, [str(v) for v in found]
    return found


def _kind(value):
    """By name: a tree that has no such refinement of `ByExample` is judged too."""
    return type(value).__name__


def _something_else(x, one):
    if x.dtype.kind in "iub":
        return np.roll(x, 1, axis=0)[one] if x.dtype.kind != "b" else ~x[one]
    if x.dtype.kind in "OSU":
        return x[one - 1]
    return x[one] * -3.7 + 11.0


class Judge:
    """Compares what is claimed of tensors with what two runs of them gave.

    Args:
        walk: the reading.
    """

    def __init__(self, walk):
        self.walk = walk
        self.letters = {}  # lengths that are the same whatever the batch holds, as they were first seen

    def wrong(self, tensor, before, size, after, rows, moved=True):
        """What is false of the claim about a tensor, or None.

        Args:
            tensor: of the graph.
            before: its entries in a run of `size` examples.
            size: of that batch.
            after: its entries in another run.
            rows: which example of the first batch each one of the second is; `CHANGED`: another one.
            moved: whether an example's entries are the same at another place; noise is not.
        """
        value = self.walk.value(tensor)
        if not isinstance(value, (Shared, Sized, ByExample)):
            return None
        for array, number in ((before, size), (after, len(rows))):
            if not self._has_its_lengths(tensor, array, number):
                claimed = list(map(str, self.walk.sizes(tensor)))
                return f"its shape is {array.shape} for {number} examples, not {claimed}"
            numbers = getattr(value, "numbers", None)
            if numbers is not None and not self._are(numbers, array, number):
                return f"it is {array} for {number} examples, not {list(map(str, numbers.sizes))}"
        if isinstance(value, ByExample):
            return self._wrong_entries(value, before, size, after, rows, moved)
        if isinstance(value, Sized) and len(rows) != size:
            return None
        return None if _same(before, after) else f"it changes from {before} to {after}"

    def _wrong_entries(self, value, before, size, after, rows, moved):
        kept = rows != CHANGED
        old, new = (self._by_example(value, a, n) for a, n in ((before, size), (after, len(rows))))
        if old is None or new is None:
            return f"shapes {before.shape}, {after.shape} for {size}, {len(rows)} examples"
        numbers = np.arange(len(rows)).reshape([-1, *[1] * (new.ndim - 1)])
        below = self._worth(getattr(value, "below", None), len(rows))
        if _kind(value) == "Places":
            step = self._worth(value.step, len(rows))
            return None if step is None or (new == numbers * step).all() else f"it is {after}, which are no places"
        if _kind(value) == "Tuples":
            return None if (new[..., 0] == numbers[..., 0]).all() else f"it is {after}: no own places in front"
        if below is not None and new.size:
            within = new - numbers * below if _kind(value) == "Flat" else new
            if not ((within >= 0) & (within < below)).all():
                return f"{after} leaves its limits of {below} an example"
        if _kind(value) not in ("ByExample", "Within") or (len(rows) != size and not moved):
            return None
        return None if _same(old[rows[kept]], new[kept]) else "an example's entries change with the others"

    def _has_its_lengths(self, tensor, array, number):
        sizes = self.walk.sizes(tensor)
        return sizes is None or (
            len(sizes) == array.ndim and all(self._is(s, n, number) for s, n in zip(sizes, array.shape))
        )

    def _are(self, numbers, array, number):
        return numbers.array.shape == array.shape and all(
            claimed is None or self._is(claimed, int(found), number)
            for claimed, found in zip(numbers.array.flat, array.flat)
        )

    def _is(self, claimed, found, number):
        """Whether a length may be what it was found to be; the first time that a letter is met, it is told by this."""
        unknown = [name for name in claimed.letters if name != "batch" and name not in self.letters]
        known = float(claimed.number)
        for name in claimed.letters:
            known *= number if name == "batch" else self.letters.get(name, 1)
        if not unknown:
            return known == found
        if len(unknown) == 1 and known:
            self.letters[unknown[0]] = found / known
        return True

    def _worth(self, size, number):
        if size is None or not all(name == "batch" or name in self.letters for name in size.letters):
            return None
        return float(size.number) * np.prod([number if n == "batch" else self.letters[n] for n in size.letters])

    def _by_example(self, value, array, number):
        """Entries with the examples first: `[number, inner, ...]`; None if it has none such."""
        if value.axis >= array.ndim or value.axis < 0:
            return None
        moved = np.moveaxis(array, value.axis, 0)
        inner = self._worth(value.inner, number)
        if inner is None or moved.shape[0] != number * inner:
            inner = moved.shape[0] / number
            if value.is_plain or inner != int(inner):
                return None
        return moved.reshape([number, int(inner), *moved.shape[1:]])


def _same(old, new):
    if old.dtype.kind in "OSUbiu":
        return np.array_equal(old, new)
    if old.shape != new.shape:
        return False
    old, new = (np.asarray(a, np.complex128 if a.dtype.kind == "c" else np.float64) for a in (old, new))
    finite = np.abs(old[np.isfinite(old)])
    tolerance = 1e-7 * max(1.0, finite.max(initial=0.0)) if old.dtype == np.float64 else 1e-5
    return np.allclose(old, new, rtol=2e-5, atol=min(tolerance, 1e300), equal_nan=True)


class Held:
    """A traced function whose tensors a reading has judged, and runs of them all.

    Args:
        function: of the tensors that `leaves` tell of.
        leaves: (`TensorSpec`, `Value`) of each argument.
    """

    def __init__(self, function, leaves):
        traced = tf.function(function, autograph=False).get_concrete_function(*(spec for spec, _ in leaves))
        self.graph = traced.graph
        self.given = self.graph.inputs[: len(leaves)]
        self.specs = [(tensor, spec) for tensor, (spec, _) in zip(self.given, leaves)]
        constants = [(outer, inner) for outer, inner in self.graph.captures if outer.dtype != tf.resource]
        self.captured = {inner.name: outer.numpy() for outer, inner in constants}
        self.walk = Walk(Reading(), self.graph)
        for tensor, (_, value) in zip(self.given, leaves):
            self.walk.set(tensor, value, [None if n is None else length(n) for n in tensor.shape])
        self.walk.read()
        self.operations = self.graph.get_operations()
        fetched = [t for op in self.operations if self.graph.is_fetchable(op) for t in op.outputs]
        self.tensors = [t for t in fetched if t.dtype not in (tf.resource, tf.variant)]
        self.claimed = [t for t in self.tensors if isinstance(self.walk.value(t), (ByExample, Shared, Sized))]
        seeds = {id(t.op) for t in self.given if isinstance(self.walk.value(t), Seed)}
        self.noisy = self._behind(seeds)
        # Of two axes of length one TensorFlow sums both, and the reshape behind it gives them back.
        summed = {id(op) for op in self.operations if op.type == "BroadcastGradientArgs"}
        for op in self.operations:  # in the order in which they were made
            summed |= {id(op)} if op.type == "Identity" and id(op.inputs[0].op) in summed else set()
        self.unlike_for_one = summed | {id(op) for op in self.operations if {id(t.op) for t in op.inputs} & summed}
        config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        config.graph_options.rewrite_options.disable_meta_optimizer = True  # it may remove what stops a program
        config.operation_timeout_in_ms = 2000
        config.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
        self._session = tf.compat.v1.Session(graph=self.graph, config=config)

    def run(self, given, tensors):
        """Entries of tensors by their ids, as far as they can be computed; {} where the whole graph stops."""
        feed = {**self.captured, **{t.name: array for t, array in zip(self.given, given)}}
        left, effects = list(tensors), list(self.graph.control_outputs)
        while left:
            try:
                found = self._session.run([[t.name for t in left], [op.name for op in effects]], feed)[0]
                return {id(t): np.asarray(array) for t, array in zip(left, found)}
            except tf.errors.OpError as problem:
                names = _named(problem)
                gone = self._behind({id(op) for op in self.operations if any(_within(n, op.name) for n in names)})
                kept = [t for t in left if id(t.op) not in gone]
                if len(kept) == len(left) or any(id(op) in gone for op in effects):
                    return {}
                left = kept
        return {}

    def faults(self, batch, rng):
        """{operation: what is false of its claims}, for those whose inputs' claims hold.

        Args:
            batch: (number of examples, generator) -> arguments.
            rng: a numpy generator.
        """
        self.judge, wrong = Judge(self.walk), {}
        found = self._compared(batch, rng, 4, (1, 3, 7), self.tensors, wrong)
        for size in (1, 2):  # few enough for their numbers to be lengths that add up, or an order
            self._compared(batch, rng, size, (), self.tensors, wrong)
        if found:
            self._compared(batch, rng, 300, (299,), self._not_too_wide(*found), wrong)
            if any(t.dtype == tf.float16 for t in self.claimed):
                self._compared(batch, rng, 2100, (), self._not_too_wide(*found, number=2100), wrong)
        if self.noisy & {id(t.op) for t in self.claimed}:
            self._noise_of_several(batch, rng, wrong)
        return self._roots(wrong)

    def _compared(self, batch, rng, size, others, tensors, wrong):
        """Runs one batch, the same with half of its examples exchanged, and batches drawn from it."""
        first, second = batch(size, rng), batch(size, rng)
        before, rows = self.run(first, tensors), np.arange(size)
        exchanged = np.where(rng.integers(0, 2, size) if size > 2 else rows > 0, rows, CHANGED)
        runs = [(self._rows(first, second, exchanged), exchanged)]
        for number in others:
            chosen = np.delete(rows, rng.integers(size)) if number == size - 1 else rng.integers(0, size, number)
            runs.append((self._rows(first, first, chosen), chosen))
        done = [(size, before)]
        for given, chosen in runs:
            after = self.run(given, tensors)
            done.append((len(chosen), after))
            for tensor in self.claimed:
                if len(chosen) == 1 and id(tensor.op) in self.unlike_for_one:
                    continue
                if id(tensor) in before and id(tensor) in after and id(tensor.op) not in wrong:
                    moved = id(tensor.op) not in self.noisy
                    said = self.judge.wrong(tensor, before[id(tensor)], size, after[id(tensor)], chosen, moved)
                    if said:
                        wrong[id(tensor.op)] = (tensor, said)
        return [done[0], done[-1]] if done[0][1] and done[-1][1] else []

    def _rows(self, first, second, rows):
        """The examples of those numbers, of the second batch where they are exchanged; the rest is shared."""
        given = list(first)
        for number, (tensor, other) in enumerate(zip(self.given, second)):
            if isinstance(self.walk.value(tensor), ByExample):
                given[number] = first[number][rows]
                given[number][rows == CHANGED] = other[np.flatnonzero(rows == CHANGED)]
        return given

    def _not_too_wide(self, few, more, number=300):
        """Tensors whose entries, as they grow with the batch, will be few enough; and nothing behind the others."""
        (size, small), (larger, large) = few, more
        wide = set()
        for tensor in self.tensors:
            a, b = (max(found[id(tensor)].size, 1) if id(tensor) in found else None for found in (small, large))
            degree = 0 if a is None or b is None else round(np.log(b / a) / np.log(larger / size))
            if a is None or b is None or b * (number / larger) ** degree > WIDE:
                wide.add(id(tensor.op))
        gone = self._behind(wide)
        return [t for t in self.tensors if id(t.op) not in gone]

    def _noise_of_several(self, batch, rng, wrong):
        """Entries of two examples that go up and down together, over many seeds, have one noise in common."""
        shared = self._behind({id(t.op) for t in self.claimed if isinstance(self.walk.value(t), Shared)} & self.noisy)
        size, tensors = 4, [t for t in self.claimed if id(t.op) in self.noisy - shared]
        tensors = [t for t in tensors if _kind(self.walk.value(t)) in ("ByExample", "Within")]
        given, runs = batch(size, rng), []
        for _ in range(DRAWS):
            drawn = [
                rng.integers(0, 1 << 40, a.shape) if isinstance(self.walk.value(t), Seed) else a
                for t, a in zip(self.given, given)
            ]
            runs.append(self.run(drawn, tensors))
        owners = {}
        for tensor in tensors:
            if not all(id(tensor) in run for run in runs) or id(tensor.op) in wrong:
                continue
            entries = [self.judge._by_example(self.walk.value(tensor), run[id(tensor)], size) for run in runs]
            if any(e is None or e.shape != entries[0].shape or e.dtype.kind not in "fiu" for e in entries):
                continue
            columns = np.stack([np.asarray(e, np.float64).reshape([size, -1]) for e in entries], -1)
            for example, feature in np.ndindex(*columns.shape[:2]):
                column = columns[example, feature]
                order = np.argsort(column)
                if len(np.unique(column)) < DRAWS:
                    continue
                order = min(tuple(order), tuple(order[::-1]))
                if owners.setdefault(order, example) != example:
                    wrong[id(tensor.op)] = (tensor, f"examples {owners[order]} and {example} have one noise in common")

    def _roots(self, wrong):
        found, false = {}, set()
        for operation in self.operations:
            if any(id(t.op) in false for t in operation.inputs):
                false.add(id(operation))
            elif id(operation) in wrong:
                false.add(id(operation))
                found[operation] = wrong[id(operation)]
        return found

    def _behind(self, operations):
        """Those operations, and all that are made of what they make."""
        gone = set(operations)
        if gone:
            for operation in self.operations:
                before = [*(t.op for t in operation.inputs), *operation.control_inputs]
                if any(id(op) in gone for op in before):
                    gone.add(id(operation))
        return gone


def _named(problem):
    """Names of the operations that an error tells of."""
    names = {problem.op.name} if getattr(problem, "op", None) is not None else set()
    return names | set(re.findall(r"node ([^}\s]+?)\}\}", str(problem)))


def _within(name, operation):
    """Whether an operation of this name is one, or a part of the body that one calls."""
    return name == operation or name.startswith(operation + "/")
