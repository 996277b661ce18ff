"""A test of the inequality that privacy stands on, for the user's own model and batch.

For the model as it stands, and with the same randomness in all runs:

1. *independence*: when one example's content is exchanged for another's, no other example's loss or norm moves;
2. *sensitivity*: the clipped sum then moves by at most 2C (one example out, another in), by at most C when removed;
3. *truth*: every example's recorded norm is that of its gradient from a backward pass of its own;
4. *state*: computing the loss writes to no variable but the seeds of random layers and the model's metrics.

(3) is what catches a wrong rule; the variable with the largest error is named.

For (2) and (3) random layers do as in evaluation, all else as in training: a mask follows an example's place. Steps are
run eagerly, without a reading of their graph, so that this is a second opinion on it; but for a `compute_loss`, and for
models in which the batch shares a lookup (of positions, say) or rows of examples stand in one long axis: there nothing
but a reading tells each example's part.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.clipping import cross_terms, engine, rules
from tfdp_rec.clipping.batches import batch_size, map_examples, open_specs, tensors
from tfdp_rec.clipping.data_flow import refuse_writes
from tfdp_rec.clipping.engine import shared_inputs
from tfdp_rec.clipping.recorder import guard_of, recording, replaced
from tfdp_rec.clipping.rules import NO_BATCH
from tfdp_rec.keras_internals import draws, handles_of, layers_within, random_states
from tfdp_rec.refused import NotPrivate

_NO_CLIP = 1e12


def check(
    model: keras.Model, batch: Any, l2_norm_clip: float = 1.0, examples: int = 4, tolerance: float = 1e-3
) -> None:
    """Raises if clipping does not bound what one example of `batch` can do to this model.

    Args:
        model: a built model with `per_example_loss`.
        batch: two examples or more, as the training data gives them.
        l2_norm_clip: C.
        examples: how many examples to try, from the first.
        tolerance: of the comparison of two float32 computations of one number, relative.

    Raises:
        NotPrivate: with the name of the variable or the test that failed.
        ValueError: for a batch of fewer than two examples.

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
    run = _Run(model, l2_norm_clip)
    _state_test(run, batch, shared)
    whole = run(batch, random=True)
    for number in range(min(examples, size)):
        _exchange_test(run, batch, shared, whole, number, (number + 1) % size, tolerance)
        _removal_test(run, batch, shared, number, size, tolerance)
    _truth_test(run, batch, shared, min(examples, size), tolerance)
    run.rewind()


class _Run:
    """Clipped sums with the model's random layers in the same state every time."""

    def __init__(self, model: keras.Model, l2_norm_clip: float):
        self.model, self.clip = model, tf.constant(l2_norm_clip)
        self.reads = bool(getattr(model, "averages_its_loss", False))  # a graph alone tells what it averages
        self._graphs: dict[Any, engine.Graph] = {}
        self.seeds = random_states(model)
        self.start = [tf.identity(s.value) for s in self.seeds]

    def rewind(self) -> None:
        for seed, value in zip(self.seeds, self.start):
            seed.assign(value)

    def __call__(self, batch: Any, random: bool = False, clip: float | None = None) -> engine.ClippedSum:
        """The clipped sum of a batch, its graph read only where examples' parts cannot be told otherwise."""
        if self.reads:
            return self._by_graph(batch, random, clip)
        try:
            return self._unread(batch, random)
        except (NotPrivate, tf.errors.InvalidArgumentError) as refusal:
            if NO_BATCH not in str(refusal):
                raise
            self.reads = True
            return self._by_graph(batch, random, clip)

    def loss(self, batch: Any) -> tf.Tensor:
        """Each example's, as in training."""
        return self.model.per_example_loss(batch, training=True)

    def _unread(self, batch: Any, random: bool) -> engine.ClippedSum:
        self.rewind()
        with contextlib.nullcontext() if random else still(self.model):
            return self._clipping(None).unread_sum(batch)

    def _by_graph(self, batch: Any, random: bool, clip: float | None) -> engine.ClippedSum:
        """Traced once for batches of all sizes."""
        clipping = self._clipping(clip)
        graph = engine.Graph(lambda given: (clipping.read_sum(given), None), shared_inputs(self.model))
        graph = self._graphs.setdefault((random, clip), graph)
        self.rewind()
        with contextlib.nullcontext() if random else still(self.model):
            return graph(batch)[0]

    def _clipping(self, clip: float | None) -> engine.Clipping:
        clip = self.clip if clip is None else tf.constant(clip)
        return engine.Clipping(self.model, self.loss, clip, guard_of(self.model))


@contextlib.contextmanager
def still(model: keras.Model) -> Iterator[None]:
    """Has the model's random layers do as in evaluation."""

    def evaluated(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return call(*args, **{**kwargs, "training": False})

    parts = [layer for layer in layers_within(model) if layer is not model and draws(layer)]
    with replaced([(layer, evaluated) for layer in parts if "training" in inspect.signature(layer.call).parameters]):
        yield


def _state_test(run: _Run, batch: Any, shared: tuple[str, ...]) -> None:
    """All that a graph of the loss writes, whatever it writes there."""
    model = run.model
    allowed = handles_of([*getattr(model, "metrics_variables", ()), *run.seeds])
    names = {id(handle): variable.path for variable in model.variables for handle in handles_of([variable])}

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
    """Puts example `other`'s content in the place of `number`; everybody else must not notice."""
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
    """Recorded norms, variable by variable, against a backward pass of one example."""
    for number in range(examples):
        one = map_examples(lambda t, at=number: t[at : at + 1], batch, shared)  # type: ignore[misc]
        true, recorded = _true_norms(run, one), (_gradient_norms if run.reads else _recorded_norms)(run, one)
        for path, expected in true.items():
            if not np.isclose(recorded.get(path, 0.0), expected, rtol=tolerance, atol=tolerance * 1e-2):
                raise NotPrivate(
                    f"The clipping rule of the layer that owns '{path}' is wrong: gradient norm "
                    f"{recorded.get(path, 0.0):.6g} recorded, {expected:.6g} by a backward pass of example {number} "
                    "alone."
                )


def _true_norms(run: _Run, one: Any) -> dict[str, float]:
    run.rewind()
    variables = run.model.trainable_variables
    with still(run.model), tf.GradientTape() as tape:
        losses = run.loss(one)
    sources = [rules.resource(v) for v in variables]
    found = tape.gradient(losses, sources, unconnected_gradients="zero")
    return {v.path: float(np.linalg.norm(_numpy(g))) for v, g in zip(variables, found)}


def _recorded_norms(run: _Run, one: Any) -> dict[str, float]:
    """By the factors of a step that is not read."""
    run.rewind()
    with still(run.model), tf.GradientTape() as tape, recording(run.model, tape) as recorder:
        losses = run.loss(one)
    collected = engine.collect(recorder, tape, losses)
    return {path: float(cross_terms.measure(factors)[0][0]) for path, factors in collected.items()}


def _gradient_norms(run: _Run, one: Any) -> dict[str, float]:
    """By the clipped sum of one example, not clipped: as long as the norm that it was found to have."""
    found = run(one, clip=_NO_CLIP)
    norms = {path: float(np.linalg.norm(_numpy(gradient))) for path, gradient in found.gradients.items()}
    total = float(np.sqrt(sum(norm**2 for norm in norms.values())))
    longer = float(found.norms[0]) / total if total else 1.0
    return {path: norm * longer for path, norm in norms.items()}
