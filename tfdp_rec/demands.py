"""What must hold when a graph runs, or its step fails: one operation each.

`tf.debugging`'s assertions build a branch for every check; a step has some twenty of them, and takes long enough to
trace. What must not happen otherwise waits for what `demand` gives: `with tf.control_dependencies(demand(...))`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def demand(condition: Any, *sentence: Any) -> list[tf.Operation]:
    """Operations that fail unless `condition` holds; eagerly, there are none to wait for.

    Args:
        condition: a bool tensor, all of which must be true.
        *sentence: what to say otherwise: texts, and tensors to show.

    Raises:
        tf.errors.InvalidArgumentError: run eagerly, if it does not hold.

    Example:
        >>> demand(tf.constant([1, 2]) > 0, "The numbers must be positive.")
        []
    """
    parts = [part if isinstance(part, str) else tf.strings.as_string(part) for part in sentence]
    text = "".join(parts) if all(isinstance(part, str) for part in parts) else tf.strings.join(parts)
    done = tf.raw_ops.Assert(condition=tf.reduce_all(condition), data=[text])
    return [] if done is None else [done]
