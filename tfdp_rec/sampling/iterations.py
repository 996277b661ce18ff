"""What an iteration of a sampling's batches is called: at random, and so that it tells which process began it.

    name = this process' own 24 bits, then 38 of the iteration's

A draw that another process kept in a file is known for that by its iteration: two processes have the same 24 bits with
a chance of 6e-8, and a thousand iterations of one process share 38 with a chance of 2e-6, which refuses a batch.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

_OWN_BITS = 38
PROCESS = secrets.randbits(24)


def new_iteration() -> int:
    """A name.

    Example:
        >>> process_of(new_iteration()) == PROCESS
        True
    """
    return PROCESS << _OWN_BITS | secrets.randbits(_OWN_BITS)


def named(bits: tf.Tensor) -> tf.Tensor:
    """The name of an iteration that a graph begins; of the process that made the graph, wherever it runs.

    Args:
        bits: random, int64.
    """
    import tensorflow as tf  # not at the top: accounting does without it

    own = tf.bitwise.bitwise_and(bits, tf.constant(2**_OWN_BITS - 1, tf.int64))
    return tf.bitwise.bitwise_or(own, tf.constant(PROCESS << _OWN_BITS, tf.int64))


def process_of(iteration: int | tf.Tensor) -> int | tf.Tensor:
    """The bits of the process that began an iteration."""
    return iteration // 2**_OWN_BITS
