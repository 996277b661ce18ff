"""Two tests by numbers of the user's own model and batch, which share no rule with the reading of a graph.

`check` (`tfdp_rec.clipping.check`) takes clipped sums of neighbouring batches, with the present weights and the same
randomness in all runs:

1. *independence*: if one example is replaced by another, no other example's loss or norm changes;
2. *sensitivity*: the clipped sum then moves by at most 2C, and by at most C if the example is removed;
3. *norms*: every example's recorded norm equals that of its gradient by a backward pass of the example alone;
4. *state*: the loss writes to no variable but the seeds of random layers and the model's metrics.

Test 3 finds wrong clipping rules; the refusal names the variable. Where an example is removed, and in test 3, random
layers act as in evaluation, since a dropout mask depends on an example's place in the batch. The sums are those of
private steps, which are refused if the reading of their graph finds examples mixed.

`SingleExamples` (for `tfdp_rec.validate`) runs examples alone and among others. Clipping uses an example's loss, the
inputs of recorded calls and their output gradients. One graph computes them for batches of all sizes. It is run on
batches that repeat a few examples, and on each of these alone; a difference shows that other examples have an effect.
An example that differs is tried again among copies of itself in a batch of the same size, since products of one row and
of several round differently, which may turn a ReLU.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import draws, handles_of, layers_within, random_states, resource, resource_key
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.batches import batch_size, hide_batch_axis, map_examples, open_specs, tensors
from tfdp_rec.core.sensitivity.data_flow import refuse_writes
from tfdp_rec.core.sensitivity.engine import ClippedSum, Clipping, Gradient, Graph, check_losses, shared_inputs
from tfdp_rec.core.sensitivity.recorder import record_calls, replace_calls, settle_by_owner

_NO_CLIP = 1e12
_SIZES = (2, 300)  # two examples, and more than one byte can count
_EXAMPLES = 8  # number of examples of the batch that are repeated, at most
_TOLERANCE = 1e-3  # relative, for numbers computed in float32


def check(
    model: keras.Model, batch: Any, l2_norm_clip: float = 1.0, examples: int = 4, tolerance: float = _TOLERANCE
) -> None:
    """Raises if clipping does not bound the effect of one example of `batch` on this model.

    Args:
        model: Built model with `per_example_loss`.
        batch: Batch of two examples or more, in the form in which the training data give it.
        l2_norm_clip: Largest norm C of an example's contribution.
        examples: Number of examples to try, from the first.
        tolerance: Largest relative difference of two float32 computations of the same number.

    Raises:
        NotPrivate: A test failed; the message names the variable or the test.
        ValueError: The batch has fewer than two examples.

    Example:
        >>> import keras, numpy as np, tfdp_rec
        >>> inputs = keras.Input([3])
        >>> model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
        >>> optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
        >>> model.compile(optimizer=optimizer, loss="mse")
        >>> tfdp_rec.clipping.check(model, (np.ones([4, 3], "float32"), np.zeros([4, 1], "float32")))
    """
    tests = _NeighbourTests(model, tensors(batch), l2_norm_clip, tolerance)
    if tests.size < 2:
        raise ValueError(f"check needs a batch of two examples or more, got {tests.size}.")
    tests.refuse_state()
    tried = range(min(examples, tests.size))
    for number in tried:
        tests.exchange(number)
        tests.remove(number)
    for number in tried:
        tests.compare_norms(number)


@contextlib.contextmanager
def disable_randomness(model: keras.Model) -> Iterator[None]:
    """Runs the model's random layers as in evaluation, for the length of the block."""

    def evaluate(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return call(*args, **{**kwargs, "training": False})

    parts = [layer for layer in layers_within(model) if layer is not model and draws(layer)]
    # A rule that runs a layer calls the Dropout in it in its own way, and draws no mask where the rate is zero.
    rates = [(layer, layer.rate) for layer in parts if isinstance(layer, keras.layers.Dropout)]
    try:
        for layer, _ in rates:
            layer.rate = 0.0
        with replace_calls([(one, evaluate) for one in parts if "training" in inspect.signature(one.call).parameters]):
            yield
    finally:
        for layer, rate in rates:
            layer.rate = rate


@contextlib.contextmanager
def _keep_values(variables: Iterable[keras.Variable]) -> Iterator[None]:
    """A block after which variables have the values that they had before it."""
    before = [(variable, tf.identity(variable.value)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextlib.contextmanager
def _release_after(model: keras.Model) -> Iterator[None]:
    """A block of sums, which withhold rows as steps do, after which the model's weights are released."""
    try:
        yield
    finally:
        for owner in {id(one): one for v in model.variables if (one := vars(v).get("private_weights"))}.values():
            owner.release_outside_steps()


class _Examples:
    """The examples of a batch, of which a model is run on some."""

    def __init__(self, model: keras.Model, batch: Any):
        self._model, self._batch, self._shared = model, batch, shared_inputs(model)
        self.size = int(batch_size(batch, self._shared))

    def _take(self, rows: Sequence[int]) -> Any:
        return map_examples(lambda t: tf.gather(t, rows), self._batch, self._shared)


class _NeighbourTests(_Examples):
    """The tests of `check`, with the model's random layers in the same state at every run."""

    def __init__(self, model: keras.Model, batch: Any, l2_norm_clip: float, tolerance: float):
        super().__init__(model, batch)
        self._clip, self._tolerance = l2_norm_clip, tolerance
        self._seeds = random_states(model)
        self._loss = functools.partial(model.per_example_loss, training=True)
        self._graphs = {random: Graph(self._trace, self._shared) for random in (False, True)}

    def _trace(self, batch: Any, clip: tf.Tensor) -> tuple[ClippedSum, None]:
        return Clipping(self._model, self._loss, clip).read_sum(batch), None

    def _sum(self, rows: Sequence[int], random: bool = False, clip: float | None = None) -> ClippedSum:
        """The clipped sum of some examples, by a graph that is traced once for batches of all sizes."""
        randomness = contextlib.nullcontext() if random else disable_randomness(self._model)
        with _keep_values(self._seeds), _release_after(self._model), randomness:
            return self._graphs[random](self._take(rows), tf.constant(self._clip if clip is None else clip))[0]

    def refuse_state(self) -> None:
        """Test 4, on a graph of the loss: all writes count, whatever values they write."""
        model = self._model
        allowed = handles_of([*getattr(model, "metrics_variables", ()), *self._seeds])
        names = {resource_key(handle): v.path for v in model.variables for handle in handles_of([v])}

        def trace(batch: Any) -> tf.Tensor:
            graph: Any = tf.compat.v1.get_default_graph()
            start = len(graph.get_operations())
            losses = self._loss(batch)
            refuse_writes("The loss", graph, start, None, allowed, names)
            return losses

        tf.function(trace, autograph=False).get_concrete_function(open_specs(self._batch, self._shared))

    def exchange(self, number: int) -> None:
        """Tests 1 and 2: the next example is put into the place of one."""
        rows = range(self.size)
        rest = [row for row in rows if row != number]
        whole = self._sum(rows, random=True)
        changed = self._sum([(number + 1) % self.size if row == number else row for row in rows], random=True)
        for what, before, after in (("loss", whole.losses, changed.losses), ("norm", whole.norms, changed.norms)):
            if not self._same(tf.gather(before, rest), tf.gather(after, rest)):
                raise NotPrivate(
                    f"The {what} of other examples changes when example {number} does: the model mixes the examples of "
                    "a batch (in-batch negatives, a mean over the batch, ...), so clipping does not bound its "
                    "sensitivity."
                )
        if self._moves(whole, changed, 2 * self._clip):
            raise NotPrivate("Exchanging one example moves the clipped sum by more than twice the clip.")

    def remove(self, number: int) -> None:
        """Tests 1 and 2: an example is left out."""
        rest = [row for row in range(self.size) if row != number]
        whole, without = self._sum(range(self.size)), self._sum(rest)
        if not self._same(tf.gather(whole.norms, rest), without.norms):
            raise NotPrivate(
                f"Removing example {number} changes the other examples' gradients: the model mixes examples."
            )
        if self._moves(whole, without, self._clip):
            raise NotPrivate(f"Removing example {number} moves the clipped sum by more than the clip.")

    def compare_norms(self, number: int) -> None:
        """Test 3: recorded norms, variable by variable, against a backward pass of one example."""
        with _keep_values(self._seeds), disable_randomness(self._model), tf.GradientTape() as tape:
            losses = self._loss(self._take([number]))
        variables = self._model.trainable_variables
        true = tape.gradient(losses, [resource(v) for v in variables], unconnected_gradients="zero")
        # The sum of one example under a clip that binds nothing, rescaled to the recorded total: a norm that is too
        # small shows, although the sum itself is right.
        recorded = self._sum([number], clip=_NO_CLIP)
        norms = {path: float(np.linalg.norm(_numpy(gradient))) for path, gradient in recorded.gradients.items()}
        total = float(np.sqrt(sum(norm**2 for norm in norms.values())))
        longer = float(recorded.norms[0]) / total if total else 1.0
        for variable, gradient in zip(variables, true):
            norm, expected = norms.get(variable.path, 0.0) * longer, np.linalg.norm(_numpy(gradient))
            if not self._same(norm, expected):
                raise NotPrivate(
                    f"The clipping rule of the layer that owns '{variable.path}' is wrong: gradient norm {norm:.6g} "
                    f"recorded, {expected:.6g} by a backward pass of example {number} alone."
                )

    def _same(self, one: Any, other: Any) -> bool:
        return bool(np.allclose(one, other, rtol=self._tolerance, atol=self._tolerance * 1e-2, equal_nan=True))

    def _moves(self, one: ClippedSum, other: ClippedSum, bound: float) -> bool:
        # Whether two sums lie further apart than a bound.
        apart = (_numpy(one.gradients[path]) - _numpy(other.gradients[path]) for path in one.gradients)
        return float(np.sqrt(sum(np.sum(np.square(part)) for part in apart))) > bound * (1 + self._tolerance)


def _numpy(gradient: Gradient) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(gradient), np.float64)


class SingleExamples(_Examples):
    """A comparison of a model's loss on examples alone and among others: `refusals`, and a `summary` in sentences."""

    def __init__(self, model: keras.Model, batch: Any):
        super().__init__(model, batch)
        self._names = ["the loss"]
        self._traced = tf.function(self._parts, autograph=False)
        self.refusals: list[str] = []
        try:
            with _keep_values([*model.metrics_variables, *random_states(model)]), disable_randomness(model):
                self.summary = self._compare_all()
        except tf.errors.OpError as problem:
            self.summary = f"Not compared with examples alone: TensorFlow stops ({type(problem).__name__})."

    def _compare_all(self) -> str:
        size = min(self.size, _EXAMPLES)
        alone = [self._run([number]) for number in range(size)]
        if not alone:
            return "Not compared with examples alone: the batch holds none."
        if self._differ(alone[0], self._run([0])) is not None:
            return "Not compared with examples alone: the loss draws random numbers itself."
        different = 1 + sum(self._differ(alone[0], one) is not None for one in alone[1:])
        # A part is an example's own if two examples have twice the rows; the rest is shared and not compared.
        others = self._run([0, 0])
        own = [one.shape and two.shape and two.shape[0] == 2 * one.shape[0] for one, two in zip(alone[0], others)]
        rng = np.random.default_rng(0)
        for number in _SIZES:
            rows = [*range(min(size, number)), *rng.integers(0, size, max(number - size, 0))]
            if not self.refusals:
                self._compare(alone, rows, own)
        left = sorted({name for name, is_own in zip(self._names, own) if not is_own})
        summary = (
            f"On batches of {_SIZES[0]} and {_SIZES[1]} examples, which repeat {different} distinct examples of this "
            "batch, each example's loss, its layers' inputs and their output gradients were compared with those of the "
            "example alone."
        )
        return summary + (f" Not compared: {', '.join(left)}, which all examples share." if left else "")

    def _compare(self, alone: list[list[np.ndarray]], rows: list[int], own: list[Any]) -> None:
        found = self._run(rows)
        for place, row in enumerate(rows):
            mine = self._rows_at(found, place, len(rows), own)
            name = self._differ(self._rows_at(alone[row], 0, 1, own), mine)
            if name is None:
                continue
            copies = self._rows_at(self._run([row] * len(rows)), place, len(rows), own)
            if self._differ(copies, mine) is not None:
                self.refusals.append(
                    f"In a batch of {len(rows)} made of this one's examples, {name} of the example at place {place} is "
                    "another than among copies of itself: examples change each other's gradients, so clipping bounds "
                    "nothing. Compute every example's loss from that example alone."
                )
                return

    def _run(self, rows: list[int]) -> list[np.ndarray]:
        batch = self._take(rows)
        graph = self._traced.get_concrete_function(open_specs(batch, self._shared))
        return [np.asarray(part) for part in graph(*tf.nest.flatten(batch))]

    def _rows_at(self, parts: list[np.ndarray], place: int, size: int, own: list[Any]) -> list[np.ndarray]:
        """One example's rows of the parts that are by example."""
        return [p.reshape([size, -1])[place] if is_own else np.zeros(0) for p, is_own in zip(parts, own)]

    def _differ(self, one: list[np.ndarray], other: list[np.ndarray]) -> str | None:
        """The name of the first part that differs."""
        for name, a, b in zip(self._names, one, other):
            if a.dtype.kind not in "fV":
                same = np.array_equal(a, b)
            else:
                a, b = a.astype(np.float64), b.astype(np.float64)
                largest = np.max(np.abs(a), initial=0.0, where=np.isfinite(a))
                same = np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)
            if not same:
                return name
        return None

    def _parts(self, batch: Any) -> list[tf.Tensor]:
        """Losses, then inputs and output gradients of each recorded call."""
        batch = hide_batch_axis(batch, self._shared)
        size, graph = batch_size(batch, self._shared), tf.compat.v1.get_default_graph()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            with record_calls(self._model, tape, settle_by_owner) as recorder:
                losses = check_losses(self._model.per_example_loss(batch, training=True), size)
        # The names are those of the last trace; every trace makes the same parts in the same order.
        parts: list[tf.Tensor] = [losses]
        watched = [t for call in recorder.calls for t in call.watched]
        left = iter(tape.gradient(losses, watched, unconnected_gradients="zero"))
        del self._names[1:]
        for call in recorder.calls:
            given = [t for t in tf.nest.flatten((call.args, call.kwargs)) if isinstance(t, tf.Tensor)]
            given = [t for t in given if t.graph is graph and t.dtype not in (tf.resource, tf.variant)]
            gradients = [tf.convert_to_tensor(g) for g in itertools.islice(left, len(call.watched))]
            for what, found in (("an input", given), ("an output gradient", gradients)):
                parts += found
                self._names += [f"{what} of layer '{call.layer.name}'"] * len(found)
        return parts
