"""The door of a step: whatever the training data gave, one batch goes in.

    a dataset's element -> look-ahead taken off -> (x, None, None) made x -> tensors -> the batch axis hidden

Inside a step the first axis of every tensor by example has no known length, so that an axis of known length is seen not
to be the batch's (a position embedding on `range(T)`) and is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import batches
from tfdp_rec.sampling.sampling_proof import NO_SAMPLING, Source, opened, undrawn
from tfdp_rec.training.lookahead import LookAhead


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a step is made of.

    Attributes:
        examples: as the model's `per_example_loss` takes it: tensors only.
        upcoming: table path -> ids that the next batch will read, if look-ahead told.
        source: where it came from, as far as that is proved.
    """

    examples: Any
    upcoming: Mapping[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    source: Source = NO_SAMPLING

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
        """The batch of a training step: its draw, if it carries one, is checked and good for no other step."""
        drawn = without_nones(data.batch if isinstance(data, LookAhead) else data)
        examples, source = opened(drawn, shared_inputs, expected_batch_size)
        upcoming = data.upcoming if isinstance(data, LookAhead) else {}
        return dataclasses.replace(cls.from_data(examples, shared_inputs), upcoming=upcoming, source=source)

    @property
    def tensors(self) -> list[tf.Tensor]:
        """All that must have come before anything of the step is done."""
        return [tensor for tensor in tf.nest.flatten((self.examples, dict(self.upcoming))) if tensor is not None]


def examples_of(data: Any) -> Any:
    """The batch as the model takes it, without what was sent along."""
    return normalised(data.batch if isinstance(data, LookAhead) else data)


def normalised(data: Any) -> Any:
    """Keras' `(x, None, None)` as x, `(x, y, None)` as (x, y), a drawn batch as the batch; of specs, too."""
    return without_nones(undrawn(without_nones(data)))


def without_nones(data: Any) -> Any:
    """Keras' `(x, None, None)` as x, `(x, y, None)` as (x, y)."""
    if isinstance(data, tuple) and not hasattr(data, "_fields"):
        while len(data) > 1 and data[-1] is None:
            data = data[:-1]
        if len(data) == 1:
            return data[0]
    return data


def first_example(values: Any) -> tf.Tensor:
    """The first example, in the type that Keras' data adapters give."""
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
    """(x, y, y_pred, sample_weight), if the model was called once for the loss; None otherwise."""
    if len(outputs) != 1:
        return None
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(parts_of(examples))
    return x, y, outputs[0], sample_weight


def parts_of(examples: Any) -> tuple[Any, ...]:
    """Inputs, and what a batch has beside them in a tuple."""
    return examples if isinstance(examples, tuple) and len(examples) <= 3 else (examples,)
