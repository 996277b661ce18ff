"""A numerical test of the clipped sum's sensitivity on neighbouring batches, for the user's own model and batch.

With the present weights, and the same randomness in all runs:

1. *independence*: if one example is replaced by another, no other example's loss or norm changes;
2. *sensitivity*: the clipped sum then moves by at most 2C, and by at most C if the example is removed;
3. *norms*: every example's recorded norm equals that of its gradient by a backward pass of the example alone;
4. *state*: the loss writes to no variable but the seeds of random layers and the model's metrics.

Test 3 finds wrong clipping rules; the refusal names the variable.

In tests 2 and 3 random layers act as in evaluation, since a dropout mask depends on an example's place in the batch.
The sums are those of private steps, which are refused if the reading of their graph finds examples mixed. The tests
compare numbers, and know nothing of that reading.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import draws, handles_of, layers_within, random_states, resource_key
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity import engine, rules
from tfdp_rec.core.sensitivity.batches import batch_size, map_examples, open_specs, tensors
from tfdp_rec.core.sensitivity.data_flow import refuse_writes
from tfdp_rec.core.sensitivity.engine import shared_inputs
from tfdp_rec.core.sensitivity.recorder import replace_calls, settle_by_owner

_NO_CLIP = 1e12


def check(
    model: keras.Model, batch: Any, l2_norm_clip: float = 1.0, examples: int = 4, tolerance: float = 1e-3
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
    batch, shared = tensors(batch), shared_inputs(model)
    size = int(batch_size(batch, shared))
    if size < 2:
        raise ValueError(f"check needs a batch of two examples or more, got {size}.")
    run = _SeededSums(model, l2_norm_clip)
    _state_test(run, batch, shared)
    whole = run(batch, random=True)
    for number in range(min(examples, size)):
        _exchange_test(run, batch, shared, whole, number, (number + 1) % size, tolerance)
        _removal_test(run, batch, shared, number, size, tolerance)
    _truth_test(run, batch, shared, min(examples, size), tolerance)
    run.rewind()


class _SeededSums:
    """Clipped sums with the model's random layers in the same state at every run."""

    def __init__(self, model: keras.Model, l2_norm_clip: float):
        self.model, self.clip = model, tf.constant(l2_norm_clip)
        self._graphs: dict[bool, engine.Graph] = {}
        self.seeds = random_states(model)
        self.start = [tf.identity(s.value) for s in self.seeds]

    def rewind(self) -> None:
        for seed, value in zip(self.seeds, self.start):
            seed.assign(value)

    def __call__(self, batch: Any, random: bool = False, clip: float | None = None) -> engine.ClippedSum:
        """The clipped sum of a batch, by a graph that is traced once for batches of all sizes."""
        graph = engine.Graph(self._traced, shared_inputs(self.model))
        graph = self._graphs.setdefault(random, graph)
        self.rewind()
        with contextlib.nullcontext() if random else still(self.model):
            return graph(batch, self.clip if clip is None else tf.constant(clip))[0]

    def loss(self, batch: Any) -> tf.Tensor:
        """Each example's loss, as in training."""
        return self.model.per_example_loss(batch, training=True)

    def _traced(self, batch: Any, clip: tf.Tensor) -> tuple[engine.ClippedSum, None]:
        return engine.Clipping(self.model, self.loss, clip, settle_by_owner).read_sum(batch), None


@contextlib.contextmanager
def still(model: keras.Model) -> Iterator[None]:
    """Runs the model's random layers as in evaluation, for the length of the block."""

    def evaluated(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return call(*args, **{**kwargs, "training": False})

    parts = [layer for layer in layers_within(model) if layer is not model and draws(layer)]
    # A rule that runs a layer calls the Dropout in it in its own way, and draws no mask where the rate is zero.
    rates = [(layer, layer.rate) for layer in parts if isinstance(layer, keras.layers.Dropout)]
    try:
        for layer, _ in rates:
            layer.rate = 0.0
        with replace_calls([(one, evaluated) for one in parts if "training" in inspect.signature(one.call).parameters]):
            yield
    finally:
        for layer, rate in rates:
            layer.rate = rate


def _state_test(run: _SeededSums, batch: Any, shared: tuple[str, ...]) -> None:
    """Test 4, on a graph of the loss: all writes count, whatever values they write."""
    model = run.model
    allowed = handles_of([*getattr(model, "metrics_variables", ()), *run.seeds])
    names = {resource_key(handle): v.path for v in model.variables for handle in handles_of([v])}

    def trace(batch: Any) -> tf.Tensor:
        graph: Any = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        losses = run.loss(batch)
        refuse_writes("The loss", graph, start, None, allowed, names)
        return losses

    tf.function(trace, autograph=False).get_concrete_function(open_specs(batch, shared))


def _distance(a: engine.ClippedSum, b: engine.ClippedSum) -> float:
    total = 0.0
    for path in a.gradients:
        total += float(np.sum(np.square(_numpy(a.gradients[path]) - _numpy(b.gradients[path]))))
    return float(np.sqrt(total))


def _numpy(gradient: engine.Gradient) -> np.ndarray:
    if not isinstance(gradient, tf.IndexedSlices):
        return np.asarray(gradient, np.float64)
    return np.asarray(tf.convert_to_tensor(gradient), np.float64)


def _same(a: tf.Tensor, b: tf.Tensor, tolerance: float) -> bool:
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True))


def _exchange_test(run, batch, shared, whole, number, other, tolerance) -> None:  # type: ignore[no-untyped-def]
    """Tests 1 and 2: example `number` is replaced by `other`."""
    size = int(batch_size(batch, shared))
    order = [other if i == number else i for i in range(size)]
    changed = run(map_examples(lambda t: tf.gather(t, order), batch, shared), random=True)
    rest = [i for i in range(size) if i != number]
    for what, before, after in (("loss", whole.losses, changed.losses), ("norm", whole.norms, changed.norms)):
        if not _same(tf.gather(before, rest), tf.gather(after, rest), tolerance):
            raise NotPrivate(
                f"The {what} of other examples changes when example {number} does: the model mixes the examples of a "
                "batch (in-batch negatives, a mean over the batch, ...), so clipping does not bound its sensitivity."
            )
    if _distance(whole, changed) > 2 * float(run.clip) * (1 + tolerance):
        raise NotPrivate("Exchanging one example moves the clipped sum by more than twice the clip.")


def _removal_test(run, batch, shared, number, size, tolerance) -> None:  # type: ignore[no-untyped-def]
    rest = [i for i in range(size) if i != number]
    fewer = map_examples(lambda t: tf.gather(t, rest), batch, shared)
    whole, without = run(batch), run(fewer)
    if not _same(tf.gather(whole.norms, rest), without.norms, tolerance):
        raise NotPrivate(f"Removing example {number} changes the other examples' gradients: the model mixes examples.")
    if _distance(whole, without) > float(run.clip) * (1 + tolerance):
        raise NotPrivate(f"Removing example {number} moves the clipped sum by more than the clip.")


def _truth_test(run, batch, shared, examples, tolerance) -> None:  # type: ignore[no-untyped-def]
    """Test 3: recorded norms, variable by variable, against a backward pass of one example."""
    for number in range(examples):
        one = map_examples(lambda t, at=number: t[at : at + 1], batch, shared)  # type: ignore[misc]
        true, recorded = _true_norms(run, one), _recorded_norms(run, one)
        for path, expected in true.items():
            if not np.isclose(recorded.get(path, 0.0), expected, rtol=tolerance, atol=tolerance * 1e-2):
                raise NotPrivate(
                    f"The clipping rule of the layer that owns '{path}' is wrong: gradient norm "
                    f"{recorded.get(path, 0.0):.6g} recorded, {expected:.6g} by a backward pass of example {number} "
                    "alone."
                )


def _true_norms(run: _SeededSums, one: Any) -> dict[str, float]:
    run.rewind()
    variables = run.model.trainable_variables
    with still(run.model), tf.GradientTape() as tape:
        losses = run.loss(one)
    sources = [rules.resource(v) for v in variables]
    found = tape.gradient(losses, sources, unconnected_gradients="zero")
    return {v.path: float(np.linalg.norm(_numpy(g))) for v, g in zip(variables, found)}


def _recorded_norms(run: _SeededSums, one: Any) -> dict[str, float]:
    """Norms by the sum of one example under a clip that binds nothing."""
    # Rescaled to the recorded total: a norm that is too small shows, although the sum itself is right.
    found = run(one, clip=_NO_CLIP)
    norms = {path: float(np.linalg.norm(_numpy(gradient))) for path, gradient in found.gradients.items()}
    total = float(np.sqrt(sum(norm**2 for norm in norms.values())))
    longer = float(found.norms[0]) / total if total else 1.0
    return {path: norm * longer for path, norm in norms.items()}
