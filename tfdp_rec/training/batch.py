"""The batch of a step, from an element of the training data.

    a dataset's element -> without look-ahead -> (x, None, None) as x -> tensors -> the batch axis hidden

Inside a step the first axis of every tensor by example has no known length. An axis of known length, such as that of a
position embedding on `range(T)`, is then known not to be the batch axis, and is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp_rec.core.claim.sampling_proof import (
    NO_SAMPLING,
    Drawn,
    Source,
    check_batch,
    refuse_choosing,
    source_of,
    strip_draw,
)
from tfdp_rec.core.sensitivity import batches
from tfdp_rec.core.sensitivity.batches import map_examples


class LookAhead(NamedTuple):
    """An element of a dataset with look-ahead: a batch, and the ids that the next batch will read."""

    batch: Any
    upcoming: dict[str, tf.Tensor]  # by table path; empty after the last batch


@dataclasses.dataclass(frozen=True)
class Batch:
    """Input of a step."""

    examples: Any  # tensors, as the model's `per_example_loss` takes them
    upcoming: Mapping[str, tf.Tensor] = dataclasses.field(default_factory=dict)  # ids of the next batch, by table path
    source: Source = NO_SAMPLING  # origin of the batch, as far as it is proved
    present: Any = None  # whether each row has data; the others contribute nothing. None if all have

    @classmethod
    def from_data(cls, data: Any, shared_inputs: Sequence[str] = ()) -> Batch:
        """The batch in an element of training data."""
        upcoming = data.upcoming if isinstance(data, LookAhead) else {}
        drawn = _strip_lookahead(data)
        examples = batches.hide_batch_axis(batches.tensors(examples_of(data)), shared_inputs)
        return cls(examples, upcoming, present=drawn.draw.present if isinstance(drawn, Drawn) else None)

    @classmethod
    def from_draw(cls, data: Any, shared_inputs: Sequence[str], expected_batch_size: float) -> Batch:
        """The batch of a training step, whose proof of its draw, if it has one, is checked and used up."""
        examples, source = check_batch(_strip_lookahead(data), shared_inputs, expected_batch_size)
        upcoming = data.upcoming if isinstance(data, LookAhead) else {}
        return dataclasses.replace(cls.from_data(examples, shared_inputs), upcoming=upcoming, source=source)

    @property
    def tensors(self) -> list[tf.Tensor]:
        """All tensors of the batch, for which the operations of the step must wait."""
        return [tensor for tensor in tf.nest.flatten((self.examples, dict(self.upcoming))) if tensor is not None]


def source_of_data(x: Any, shared_inputs: Sequence[str], expected_batch_size: float, weighted: bool) -> Source:
    """The source of what `fit` is given, by a dataset's type alone; no batch is read.

    Raises:
        ValueError: Sampled batches are to be taken apart for class weights.
    """
    if not isinstance(x, tf.data.Dataset):
        return NO_SAMPLING
    spec: Any = x.element_spec
    source = source_of(_strip_lookahead(spec), shared_inputs, expected_batch_size)
    if source.sampling is not None:
        refuse_choosing(x)
    if source.sampling is not None and weighted:
        raise ValueError(
            "fit(class_weight=...) takes sampled batches apart: let fetch give (x, y, sample_weight) instead, with "
            "each row's weight by its class."
        )
    return source


def examples_of(data: Any) -> Any:
    """The batch as the model takes it, or its spec, without look-ahead, trailing Nones and the proof of its draw."""
    return _strip_nones(strip_draw(_strip_lookahead(data)))


def _strip_lookahead(data: Any) -> Any:
    return _strip_nones(data.batch if isinstance(data, LookAhead) else data)


def _strip_nones(data: Any) -> Any:
    # Keras' `(x, None, None)` as x, `(x, y, None)` as (x, y).
    if isinstance(data, tuple) and not hasattr(data, "_fields"):
        while len(data) > 1 and data[-1] is None:
            data = data[:-1]
        if len(data) == 1:
            return data[0]
    return data


def first_example(data: Any, shared: Sequence[str]) -> Any:
    """The first example and what all examples share, in the dtypes of Keras' data adapters."""

    def to_tensor(values: Any) -> tf.Tensor:
        one = tf.convert_to_tensor(values)
        return tf.cast(one, keras.config.floatx()) if one.dtype.is_floating else one

    return tf.nest.map_structure(to_tensor, map_examples(lambda values: values[:1], data, shared))


def predictions_of(examples: Any, outputs: list[Any]) -> Any:
    """(x, y, y_pred, sample_weight) if `outputs` is of a single call of the model; None otherwise."""
    if len(outputs) != 1:
        return None
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(parts_of(examples))
    return x, y, outputs[0], sample_weight


def parts_of(examples: Any) -> tuple[Any, ...]:
    """The batch as a tuple of inputs, targets and weights."""
    return examples if isinstance(examples, tuple) and len(examples) <= 3 else (examples,)
