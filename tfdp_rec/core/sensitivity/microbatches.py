"""The clipped sum of a batch in parts: in microbatches, to bound memory, or shared among devices.

The parts share the slack for rounding errors, and are added up in float64. Which examples are in a part is decided by
their places in the batch, which are the same for neighbours.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import depend_on, unordered_checks
from tfdp_rec.core.sensitivity import float_sums
from tfdp_rec.core.sensitivity.batches import hide_batch_axis, map_examples, tensors
from tfdp_rec.core.sensitivity.engine import ClippedSum, Clipping, Gradient, Share, run_as_graph, shared_inputs
from tfdp_rec.core.sensitivity.recorder import settle_by_owner
from tfdp_rec.core.sensitivity.weights import Auto, clip_and_rule

SumOf = Callable[[Clipping, Any, Any], ClippedSum]
"""The clipped sum of one part, from the clipping, the part and its `Share` of the batch."""


F = TypeVar("F", bound=Callable[..., Any])


def _as_it_is(function: F) -> F:
    # TensorFlow's decorator has no types.
    return tf.autograph.experimental.do_not_convert(function)


@_as_it_is
def clipped_sum(
    model: keras.Model,
    batch: Any,
    l2_norm_clip: float | Auto,
    strategy: str = "bookkeeping",
    microbatch_size: int | None = None,
    training: bool = True,
) -> ClippedSum:
    """The sum over a batch of each example's gradient scaled to a norm of at most `l2_norm_clip`.

    Rows that owe noise under the model's optimizer get it before they are read.

    Args:
        model: Built `PrivateModel`, or any other built model with `per_example_loss`.
        batch: Batch in the form in which the training data give it.
        l2_norm_clip: Largest norm C of an example's contribution; or "auto", C = 1 and each gradient normalised.
        strategy: Name of the algorithm; "bookkeeping" is the only one whose sensitivity is proved.
        microbatch_size: Number of examples computed at a time, to bound memory; the sum is the same.
        training: Value of the argument `training` of `per_example_loss`.

    Raises:
        NotPrivate: The model's gradients do not split by example.
        ValueError: The strategy is unknown, or the clip or the microbatch size is too small.

    Example:
        >>> import keras, numpy as np, tfdp_rec
        >>> inputs = keras.Input([3])
        >>> model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
        >>> optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
        >>> model.compile(optimizer=optimizer, loss="mse")
        >>> found = clipped_sum(model, (np.ones([4, 3], "float32"), np.zeros([4, 1], "float32")), l2_norm_clip=1.0)
        >>> found.norms.shape
        TensorShape([4])
    """
    bound, rule = clip_and_rule(l2_norm_clip)
    if strategy != "bookkeeping":
        raise ValueError(
            f"strategy must be 'bookkeeping', got {strategy!r}. Other algorithms, without a proved sensitivity, "
            "are in experiments/bench/baselines.py, for comparison."
        )
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size must be at least 1, got {microbatch_size}.")
    loss = functools.partial(model.per_example_loss, training=training)
    clipping = Clipping(model, loss, tf.constant(bound), settle_by_owner, rule)

    def run(batch: Any) -> ClippedSum:
        batch = hide_batch_axis(batch, shared_inputs(model))
        if microbatch_size is None:
            return clipping.sum(batch)
        return in_parts(clipping, batch, microbatch_size)

    # Taken before the step is computed: a sum is good for the optimizer's present step alone.
    optimizer = getattr(model, "optimizer", None)
    step = getattr(optimizer, "step_number", None)
    ticket = None if step is None else (optimizer, tf.identity(step))
    return dataclasses.replace(run_as_graph(run, tensors(batch), shared_inputs(model)), ticket=ticket)


def on_devices(
    clipping: Clipping, batch: Any, devices: Sequence[str], sum_of: SumOf = Clipping.sum,
    microbatch_size: int | None = None,
) -> ClippedSum:  # fmt: skip
    """The clipped sum of a batch whose examples devices share, each about as many.

    Args:
        clipping: Model, loss and clip of the sum.
        batch: Nest of tensors.
        devices: Names of the devices.
        sum_of: Function that computes the clipped sum of one part.
        microbatch_size: Number of examples that a device computes at a time; None for all of its own.
    """
    size, number = clipping.batch_size(batch), len(devices)
    graph: Any = tf.compat.v1.get_default_graph()
    added, before, share = [], len(graph.get_operations()), Share(number, size)
    for which, device in enumerate(devices):
        start, end = size * which // number, size * (which + 1) // number
        with tf.device(device):
            own, piece = _cut(clipping, batch, start, end)
            if microbatch_size is None:
                added.append(_Added.of(sum_of(own, piece, share), start))
            else:
                added.append(_add_parts(own, piece, microbatch_size, sum_of, share, start))
    # A function runs what it checks in order, so that each device would wait for the one before it. All that waits for
    # the sum, by its norms, waits for the checks of all devices.
    checks = unordered_checks(graph, before)
    found = _join(clipping, added)
    return dataclasses.replace(found, norms=depend_on(found.norms, checks))


def in_parts(clipping: Clipping, batch: Any, microbatch_size: int, sum_of: SumOf = Clipping.sum) -> ClippedSum:
    """The clipped sum of a batch, computed in parts.

    Args:
        clipping: Model, loss and clip of the sum.
        batch: Nest of tensors.
        microbatch_size: Number of examples computed at a time.
        sum_of: Function that computes the clipped sum of one part.
    """
    if tf.executing_eagerly():
        shared = shared_inputs(clipping.model)
        return run_as_graph(lambda batch: in_parts(clipping, batch, microbatch_size, sum_of), batch, shared)
    whole = Share(1, clipping.batch_size(batch))
    return _join(clipping, [_add_parts(clipping, batch, microbatch_size, sum_of, whole, tf.constant(0))])


def _cut(clipping: Clipping, batch: Any, start: tf.Tensor, end: tf.Tensor) -> tuple[Clipping, Any]:
    """The clipping of some examples of a batch, and these."""
    shared = shared_inputs(clipping.model)
    piece, present = map_examples(lambda t: t[start:end], (batch, clipping.present), shared)
    return dataclasses.replace(clipping, present=present), piece


class _Added(NamedTuple):
    """The sum of some parts of a batch: only `_join` rounds it to the types of the gradients, and joins rows."""

    dense: dict[str, tf.Tensor]  # float64
    types: dict[str, tf.DType]  # of `dense`
    lists: Any  # norms, losses, rows and reads of the parts, one after the other

    @classmethod
    def of(cls, clipped: ClippedSum, start: tf.Tensor) -> _Added:
        """Of one part, which begins at a place of the batch."""
        found = dict(clipped.gradients)
        rows = {path: g for path, g in found.items() if isinstance(g, tf.IndexedSlices)}
        dense = {path: g for path, g in found.items() if path not in rows}
        slices = {path: (g.values, tf.cast(g.indices, tf.int64)) for path, g in rows.items()}
        first = tf.cast(start, tf.int64)  # example numbers are those of the whole batch
        reads = {path: r._replace(example=r.example + first) for path, r in clipped.reads.items()}
        wide = {path: tf.cast(g, tf.float64) for path, g in dense.items()}
        return cls(wide, {path: g.dtype for path, g in dense.items()}, (clipped.norms, clipped.losses, slices, reads))


def _add_parts(
    clipping: Clipping, batch: Any, microbatch_size: int, sum_of: SumOf, whole: Share, first: tf.Tensor
) -> _Added:
    """The sum of a batch, which is a share of a whole one and begins there at place `first`, in microbatches."""
    size = clipping.batch_size(batch)
    parts = whole.parts * tf.maximum(1, (size + microbatch_size - 1) // microbatch_size)
    share = Share(parts, whole.examples, microbatch_size)
    types: dict[str, tf.DType] = {}

    def part(start: tf.Tensor) -> Any:
        own, piece = _cut(clipping, batch, start, start + microbatch_size)
        found = _Added.of(sum_of(own, piece, share), first + start)
        types.update(found.types)
        return found.dense, found.lists

    # Dense sums are added up in the loop; rows, norms, losses and reads have lengths of their own and are concatenated.
    graph = tf.function(part, autograph=False)
    dense, listed = graph.get_concrete_function(tf.TensorSpec([], tf.int32)).structured_outputs
    map_all = tf.nest.map_structure
    totals = map_all(lambda g: tf.zeros(g.shape, tf.float64), dense)
    lists = map_all(_list_of, listed)

    def body(start: tf.Tensor, totals: Any, lists: Any) -> tuple[Any, ...]:
        (more, further), number = part(start), start // microbatch_size
        added = map_all(tf.add, totals, more)
        return start + microbatch_size, added, map_all(lambda array, t: array.write(number, t), lists, further)

    # An empty batch is one part of no examples: its sum is zero in the right shapes.
    last = tf.maximum(size, 1)
    _, totals, lists = tf.while_loop(
        lambda start, *_: start < last, body, (tf.constant(0), totals, lists), parallel_iterations=1
    )
    return _Added(totals, types, map_all(lambda array: array.concat(), lists))


def _join(clipping: Clipping, added: Sequence[_Added]) -> ClippedSum:
    """The clipped sum of a batch from the sums of its parts, rounded once."""
    lists = [each.lists for each in added]
    norms, losses, rows, reads = tf.nest.map_structure(lambda *several: tf.concat(several, axis=0), *lists)
    gradients: dict[str, Gradient] = {path: _join_rows(*several) for path, several in rows.items()}
    for path, dtype in added[0].types.items():
        gradients[path] = tf.cast(tf.add_n([each.dense[path] for each in added]), dtype)
    return ClippedSum(gradients, norms, clipping.l2_norm_clip, losses, reads)


def _list_of(tensor: tf.Tensor) -> tf.TensorArray:
    shape = [None, *tensor.shape[1:]]
    return tf.TensorArray(tensor.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=shape)


def _join_rows(values: tf.Tensor, ids: tf.Tensor) -> tf.IndexedSlices:
    """Rows of several parts with each id once; ids of several parts are added up in float64."""
    terms = float_sums.Terms(ids, values, tf.ones_like(values[:, 0]))
    ((found, added),) = float_sums.rows([terms], tf.ones([], values.dtype))
    return tf.IndexedSlices(added, found)
