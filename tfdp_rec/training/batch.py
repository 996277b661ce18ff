"""The batch of a step, from an element of the training data.

    a dataset's element -> without look-ahead -> (x, None, None) as x -> tensors -> the batch axis hidden

Inside a step the first axis of every tensor by example has no known length. An axis of known length, such as that of a
position embedding on `range(T)`, is then known not to be the batch axis, and is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import batches
from tfdp_rec.sampling.sampling_proof import NO_SAMPLING, Source, checked_batch, without_draw
from tfdp_rec.training.lookahead import LookAhead


@dataclasses.dataclass(frozen=True)
class Batch:
    """Input of a step."""

    examples: Any  # tensors, as the model's `per_example_loss` takes them
    upcoming: Mapping[str, tf.Tensor] = dataclasses.field(default_factory=dict)  # ids of the next batch, by table path
    source: Source = NO_SAMPLING  # origin of the batch, as far as it is proved

    @classmethod
    def from_data(cls, data: Any, shared_inputs: Sequence[str] = ()) -> Batch:
        """The batch in an element of training data.

        Example:
            >>> Batch.from_data((tf.constant([1.0, 2.0]), None, None)).examples.shape
            TensorShape([2])
        """
        upcoming = data.upcoming if isinstance(data, LookAhead) else {}
        return cls(batches.hide_batch_axis(batches.tensors(examples_of(data)), shared_inputs), upcoming)

    @classmethod
    def proved(cls, data: Any, shared_inputs: Sequence[str], expected_batch_size: float) -> Batch:
        """The batch of a training step, whose proof of its draw, if it has one, is checked and used up."""
        drawn = without_nones(data.batch if isinstance(data, LookAhead) else data)
        examples, source = checked_batch(drawn, shared_inputs, expected_batch_size)
        upcoming = data.upcoming if isinstance(data, LookAhead) else {}
        return dataclasses.replace(cls.from_data(examples, shared_inputs), upcoming=upcoming, source=source)

    @property
    def tensors(self) -> list[tf.Tensor]:
        """All tensors of the batch, for which the operations of the step must wait."""
        return [tensor for tensor in tf.nest.flatten((self.examples, dict(self.upcoming))) if tensor is not None]


def examples_of(data: Any) -> Any:
    """The batch as the model takes it, without look-ahead and proof."""
    return normalised(data.batch if isinstance(data, LookAhead) else data)


def normalised(data: Any) -> Any:
    """A batch, or its spec, without Keras' trailing Nones and without the proof of its draw."""
    return without_nones(without_draw(without_nones(data)))


def without_nones(data: Any) -> Any:
    """Keras' `(x, None, None)` as x, `(x, y, None)` as (x, y)."""
    if isinstance(data, tuple) and not hasattr(data, "_fields"):
        while len(data) > 1 and data[-1] is None:
            data = data[:-1]
        if len(data) == 1:
            return data[0]
    return data


def first_example(values: Any) -> tf.Tensor:
    """The first example, in the dtype of Keras' data adapters."""
    one = tf.convert_to_tensor(values[:1])
    return tf.cast(one, keras.config.floatx()) if one.dtype.is_floating else one


def loose_spec(value: Any) -> tf.TensorSpec:
    """The spec of a tensor whose first axis may have any length."""
    if isinstance(value, tf.TypeSpec):
        return value
    tensor = value if tf.is_tensor(value) else tf.convert_to_tensor(value)
    return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype)


def hidden_spec(leaf: Any, spec: Any, shared: Sequence[str]) -> Any:
    """A tensor spec with its batch axis of unknown length, unless the entry is shared by the batch."""
    examples = batches.example_leaves(spec, shared)
    if not isinstance(leaf, tf.TensorSpec) or not any(leaf is e for e in examples) or not leaf.shape.rank:
        return leaf
    return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


def predictions_of(examples: Any, outputs: list[Any]) -> Any:
    """(x, y, y_pred, sample_weight) if `outputs` is of a single call of the model; None otherwise."""
    if len(outputs) != 1:
        return None
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(parts_of(examples))
    return x, y, outputs[0], sample_weight


def parts_of(examples: Any) -> tuple[Any, ...]:
    """The batch as a tuple of inputs, targets and weights."""
    return examples if isinstance(examples, tuple) and len(examples) <= 3 else (examples,)
