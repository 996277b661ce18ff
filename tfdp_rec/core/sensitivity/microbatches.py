"""The clipped sum of a batch in parts: in microbatches, to bound memory, or shared among devices.

The parts share the slack for rounding errors, and are added up in float64. Which examples are in a part is decided by
their places in the batch, which are the same for neighbours.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

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


def on_devices(clipping: Clipping, batch: Any, devices: Sequence[str], sum_of: SumOf = Clipping.sum) -> ClippedSum:
    """The clipped sum of a batch, each device of which takes an equal share of the examples.

    Args:
        clipping: Model, loss and clip of the sum.
        batch: Nest of tensors.
        devices: Names of the devices.
        sum_of: Function that computes the clipped sum of one share.
    """
    shared, size = shared_inputs(clipping.model), clipping.batch_size(batch)
    share, ends = Share(len(devices), size), [size * number // len(devices) for number in range(len(devices) + 1)]

    def part(start: tf.Tensor, end: tf.Tensor) -> Any:
        own, present = map_examples(lambda t: t[start:end], (batch, clipping.present), shared)
        return _apart(sum_of(dataclasses.replace(clipping, present=present), own, share), start)

    parts = []
    for device, ends_of_share in zip(devices, itertools.pairwise(ends), strict=True):
        with tf.device(device):
            parts.append(part(*ends_of_share))
    dense, lists = zip(*parts, strict=True)
    totals = tf.nest.map_structure(_add, *dense)
    return _join(clipping, totals, tf.nest.map_structure(lambda *several: tf.concat(several, axis=0), *lists))


def _add(*several: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.add_n([tf.cast(each, tf.float64) for each in several]), several[0].dtype)


def in_parts(
    clipping: Clipping, batch: Any, microbatch_size: int, sum_of: SumOf = Clipping.sum, share: Share | None = None
) -> ClippedSum:
    """The clipped sum of a batch, computed in parts.

    Args:
        clipping: Model, loss and clip of the sum.
        batch: Nest of tensors.
        microbatch_size: Number of examples computed at a time.
        sum_of: Function that computes the clipped sum of one part.
        share: The part of a larger batch that this batch is; None if it is none.
    """
    shared = shared_inputs(clipping.model)
    if tf.executing_eagerly():
        return run_as_graph(lambda batch: in_parts(clipping, batch, microbatch_size, sum_of), batch, shared)
    size = clipping.batch_size(batch)
    whole = share or Share(1, size)
    parts = whole.parts * tf.maximum(1, (size + microbatch_size - 1) // microbatch_size)
    share = Share(parts, whole.examples, microbatch_size)

    def part(start: tf.Tensor) -> Any:
        piece, present = map_examples(lambda t: t[start : start + microbatch_size], (batch, clipping.present), shared)
        return _apart(sum_of(dataclasses.replace(clipping, present=present), piece, share), start)

    # Dense sums are added up in the loop; rows, norms, losses and reads have lengths of their own and are concatenated.
    graph = tf.function(part, autograph=False)
    dense, listed = graph.get_concrete_function(tf.TensorSpec([], tf.int32)).structured_outputs
    map_all = tf.nest.map_structure
    totals = map_all(lambda g: tf.zeros(g.shape, tf.float64), dense)
    lists = map_all(_list_of, listed)

    def body(start: tf.Tensor, totals: Any, lists: Any) -> tuple[Any, ...]:
        (more, further), number = part(start), start // microbatch_size
        added = map_all(lambda total, g: total + tf.cast(g, tf.float64), totals, more)
        return start + microbatch_size, added, map_all(lambda array, t: array.write(number, t), lists, further)

    # An empty batch is one part of no examples: its sum is zero in the right shapes.
    last = tf.maximum(size, 1)
    _, totals, lists = tf.while_loop(
        lambda start, *_: start < last, body, (tf.constant(0), totals, lists), parallel_iterations=1
    )
    gradients = map_all(lambda total, g: tf.cast(total, g.dtype), totals, dense)
    return _join(clipping, gradients, map_all(lambda array: array.concat(), lists))


def _join(clipping: Clipping, dense: dict[str, Gradient], lists: Any) -> ClippedSum:
    """The clipped sum of a batch from the dense sums of its parts, added up, and their lists, one after the other."""
    norms, losses, rows, reads = lists
    gradients = dense | {path: _join_rows(*several) for path, several in rows.items()}
    return ClippedSum(gradients, norms, clipping.l2_norm_clip, losses, reads)


def _apart(clipped: ClippedSum, start: tf.Tensor) -> tuple[dict[str, tf.Tensor], tuple[Any, ...]]:
    """The dense gradients of a part that begins at a place of the batch; its norms, losses, rows and reads."""
    found = dict(clipped.gradients)
    rows = {path: g for path, g in found.items() if isinstance(g, tf.IndexedSlices)}
    dense = {path: g for path, g in found.items() if path not in rows}
    slices = {path: (g.values, tf.cast(g.indices, tf.int64)) for path, g in rows.items()}
    first = tf.cast(start, tf.int64)  # example numbers are those of the whole batch
    reads = {path: r._replace(example=r.example + first) for path, r in clipped.reads.items()}
    return dense, (clipped.norms, clipped.losses, slices, reads)


def _list_of(tensor: tf.Tensor) -> tf.TensorArray:
    shape = [None, *tensor.shape[1:]]
    return tf.TensorArray(tensor.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=shape)


def _join_rows(values: tf.Tensor, ids: tf.Tensor) -> tf.IndexedSlices:
    """Rows of several parts with each id once; ids of several parts are added up in float64."""
    terms = float_sums.Terms(ids, values, tf.ones_like(values[:, 0]))
    ((found, added),) = float_sums.rows([terms], tf.ones([], values.dtype))
    return tf.IndexedSlices(added, found)
