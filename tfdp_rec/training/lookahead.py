"""The look-ahead stage: pairs each batch with the ids that the next batch will read, table by table.

A lazy mechanism settles those rows in the step before they are read. The ids are derived from the model: its loss is
traced once in a scratch graph while the inputs of embedding layers are recorded, and the graph is pruned to the
operations that produce them. The pruned function is mapped over the dataset, ahead of training, without the weights.

    batches b_1, b_2, …, b_n   ->   (b_1, ids(b_2)), (b_2, ids(b_3)), …, (b_n, nothing)

Privacy does not depend on it: rows that it does not announce are settled when they are read. A step takes the ids of
its own batch from the same graph, if nothing is drawn in it; if the loss then reads other rows that owe noise, the step
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp_rec.core.claim.sampling_proof import (
    Drawn,
    as_drawn,
    as_tensors,
    note_every_draw,
    refuse_choosing,
    strip_draw,
)
from tfdp_rec.core.ground.keras_internals import build_metrics, layers_within
from tfdp_rec.core.sensitivity.batches import open_specs
from tfdp_rec.core.sensitivity.recorder import record_calls, refuse_added_losses
from tfdp_rec.training.batch import Batch, LookAhead, examples_of

TableReader = Callable[[Any], dict[str, tf.Tensor]]
"""A function from a batch to the ids that it reads, `[n]`, int64, by table path."""

_as_it_is = tf.autograph.experimental.do_not_convert  # no Python control flow here; converting takes seconds


def is_lookahead(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset has passed this stage already."""
    return isinstance(dataset.element_spec, LookAhead)


def lookahead(dataset: tf.data.Dataset, model: Any, reader: Any = None) -> tf.data.Dataset:
    """Pairs each batch with the ids that the next one will read.

    Args:
        dataset: Batches, as for `model.fit`; sizes may vary.
        model: Model with `PrivateTraining`.
        reader: The reader of the tables' ids in such batches; by default it is made.

    Raises:
        TypeError: `dataset` is no `tf.data.Dataset`, or has other elements than dense tensors of known rank.

    Reference:
        Lim et al., "LazyDP", ASPLOS 2024, §5.

    Example:
        >>> import keras, tensorflow as tf, tfdp_rec
        >>> ids = keras.Input([2], dtype="int32")
        >>> model = tfdp_rec.PrivateModel(ids, keras.layers.Flatten()(keras.layers.Embedding(10, 1, name="items")(ids)))
        >>> optimizer = tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=1)
        >>> model.compile(optimizer=optimizer, loss="mse")
        >>> x, y = tf.constant([[1, 2], [3, 4]]), tf.zeros([2, 2])
        >>> data = tf.data.Dataset.from_tensor_slices((x, y)).batch(1)
        >>> [element.upcoming["items/embeddings"].numpy().tolist() for element in lookahead(data, model)]
        [[3, 4], []]
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"lookahead needs a tf.data.Dataset, got {type(dataset).__name__}.")
    if is_lookahead(dataset):
        return dataset
    spec = dataset.element_spec
    _blank(strip_draw(spec))  # ahead of the reader, whose refusals are of layers
    reader = reader or model.private_tables.find(spec)

    @_as_it_is
    def read(*batch: Any) -> tuple[Any, dict[str, tf.Tensor]]:
        given = _batch(batch, spec)
        return as_tensors(given), reader(strip_draw(given))

    @_as_it_is
    def pair(previous: Any, new: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
        return new[0], (previous, new[1])

    @_as_it_is
    def join(batch: Any, upcoming: Any) -> LookAhead:
        return LookAhead(as_drawn(spec, batch), upcoming)

    # One blank batch after the last, which reads nothing, and one before the first, which is dropped.
    known = dataset.map(read, num_parallel_calls=1, deterministic=True)
    blank = _blank(known.element_spec[0])
    nothing = {path: tf.zeros([0], tf.int64) for path in known.element_spec[1]}
    pairs = known.concatenate(tf.data.Dataset.from_tensors((blank, nothing))).scan(blank, pair).skip(1)
    ahead = pairs.map(join).prefetch(2)
    if isinstance(spec, Drawn):
        refuse_choosing(dataset)
        note_every_draw(ahead)
    return ahead


def disable_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset without tf.data's autotuning, unless its options ask for it."""
    # The end of an iterator waits for the thread that tunes it, in TensorFlow 2.21 often as long as the iterator was
    # alive, up to a minute.
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _batch(arguments: tuple[Any, ...], spec: Any) -> Any:
    # `Dataset.map` spreads a tuple over arguments.
    return arguments if type(spec) is tuple else arguments[0]


def _blank(spec: Any) -> Any:

    def blank(leaf: Any) -> tf.Tensor:
        if not isinstance(leaf, tf.TensorSpec) or leaf.shape.rank is None:
            raise TypeError(
                f"Look-ahead needs dense tensors of known rank, got {leaf}: pad with tfdp_rec.data.padded(ids, "
                "length), or to_tensor(shape=[None, length])."
            )
        shape = [size or 0 for size in leaf.shape]
        return tf.fill(shape, "") if leaf.dtype == tf.string else tf.zeros(shape, leaf.dtype)

    return tf.nest.map_structure(blank, spec)


def trace_reader(model: Any, spec: Any) -> tuple[list[str], TableReader]:
    """The paths of a model's tables, which are read by rows only, and its table reader, from one trace of its loss."""
    spec = examples_of(spec)
    ids: dict[str, tf.Tensor] = {}
    predictions: list[Any] = []
    announced: list[bool] = []  # whether calls read no other rows

    def trace(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        batch = tf.nest.pack_sequence_as(spec, tensors)
        with model.private_weights.in_step(), record_calls(model) as recorder:
            model.private_step.losses(Batch(batch))
        predictions.append(model.private_step.take_predictions())
        announced.extend(call.rule.announces_all(call) for call in recorder.calls)
        for path, reads in recorder.tables().items():
            ids[path] = tf.concat([tf.reshape(tf.cast(r, tf.int64), [-1]) for r in reads], axis=0)
        return ids

    build_layers(model, spec)
    refuse_added_losses(model)
    given = _signature(model, spec)
    wrapped = tf.compat.v1.wrap_function(trace, given)
    build_metrics(model, predictions[0])
    if not ids:
        return [], lambda batch: {}
    pruned = wrapped.prune(wrapped.inputs[: len(given)], wrapped.structured_outputs)
    return list(ids), PrunedReader(pruned, spec, given, all(announced))


class PrunedReader:
    """A table reader that is a graph of nothing but the ids."""

    def __init__(self, graph: Any, spec: Any, given: Sequence[tf.TensorSpec], gives_all: bool):
        self._graph, self._nest, self._given, self._gives_all = graph, _nest(spec), given, gives_all

    def __call__(self, batch: Any) -> dict[str, tf.Tensor]:
        return self._graph(*_leaves(examples_of(batch)))

    def gives_ids_of(self, batch: Any) -> bool:
        """Whether ids of such batches follow from the batch alone: nothing is drawn, or read from a variable."""
        fits = self._gives_all and _nest(batch) == self._nest and all(map(_fits, self._given, _leaves(batch)))
        return fits and not any(each.op_def.is_stateful for each in self._graph.graph.get_operations())


def _nest(batch: Any) -> Any:
    """How a batch is nested, by its keys."""
    return tf.nest.map_structure(lambda leaf: leaf is not None, batch)


def _fits(spec: Any, leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and isinstance(spec, tf.TensorSpec) and spec.is_compatible_with(leaf)


def build_layers(model: Any, spec: Any) -> None:
    """Makes the variables of layers that have none yet, from the spec of a batch."""
    # By a trace of its own: within `wrap_function` variables of one name, such as "embeddings", would collide.
    if all(layer.built for layer in layers_within(model)):
        return

    def loss(*tensors: tf.Tensor) -> tf.Tensor:
        return model.per_example_loss(tf.nest.pack_sequence_as(spec, tensors), training=False)

    with model.private_weights.in_step(), model.private_weights.unchecked():  # traced, not run
        tf.function(loss, autograph=False).get_concrete_function(*_signature(model, spec))


def _signature(model: Any, spec: Any) -> list[Any]:
    return _leaves(open_specs(spec, model.shared_inputs))


def _leaves(batch: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
