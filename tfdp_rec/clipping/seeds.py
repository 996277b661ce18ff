"""Secret seeds: in a private step, random layers draw from what the operating system gave for that step alone.

A dropout mask depends on the place of an example in the batch, and taking one example out moves those behind it to
other places. Under masks that nobody knows this changes no distribution (docs/privacy-independence.md); under masks
that can be computed afterwards, everybody's gradient would change with the one example. Keras seeds its layers from
Python's `random`, counts on from there, and saves the count with the model. So the seed is replaced before a step, and
again after it: what is saved tells of no mask that was used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from tfdp_rec.keras_internals import random_states, resource
from tfdp_rec.noise.system_words import system_words


@contextmanager
def secret_seeds(model: keras.Model) -> Iterator[None]:
    """Within it, the model's random layers draw from seeds that were never seen and will never be.

    Args:
        model: of any layers.

    Example:
        >>> dropout = keras.layers.Dropout(0.5, seed=7)
        >>> model = keras.Sequential([keras.Input([3]), dropout])
        >>> with secret_seeds(model):
        ...     masked = model(tf.ones([2, 3]), training=True)
        >>> dropout.seed_generator.state.numpy().tolist() == [7, 1]
        False
    """
    _replace(random_states(model))
    yield
    _replace(random_states(model))


def _replace(states: list[keras.Variable]) -> None:
    if not states:
        return
    words = tf.reshape(system_words(2 * len(states)), [len(states), 2])
    for state, word in zip(states, tf.unstack(tf.cast(words, tf.int64))):
        resource(state).assign(tf.cast(word, resource(state).dtype))
