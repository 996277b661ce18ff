"""This process' connection to a cluster, and the loss of a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class ServerLost(RuntimeError):
    """A parameter server died, and with it what it held."""


@contextlib.contextmanager
def servers_alive() -> Iterator[None]:
    """Says what to do if a server dies in the block.

    Raises:
        ServerLost: if one does.
    """
    try:
        yield
    except tf.errors.OpError as problem:
        if not _is_loss_of_server(problem):
            raise
        _strategies.clear()  # the next trainer of this process connects anew
        raise ServerLost(
            "A parameter server died, and with it its part of the model. Start it again, make the trainer again, in "
            "this program (after trainer.close()) or another, and go on from the last checkpoint: trainer.resume(). "
            f"({problem.message[:200]})."
        ) from problem


def _is_loss_of_server(problem: tf.errors.OpError) -> bool:
    if "/job:ps" not in str(problem):
        return False
    # A server that is back before anybody noticed answers, but knows nothing; another error is the step's own.
    forgot = ("unknown device", "Unable to find the relevant tensor remote_handle", "context_id")
    gone = isinstance(problem, (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError))
    return gone or any(words in str(problem) for words in forgot)


_strategies: dict[str, tf.distribute.ParameterServerStrategy] = {}  # TensorFlow connects a process once to a cluster


def connect(resolver: Any) -> tf.distribute.ParameterServerStrategy:
    """The connection of this process to a cluster, made if it is not there.

    TensorFlow then forgets what was traced before: a program that computes with it ahead of the trainer connects first.

    Args:
        resolver: which processes there are.
    """
    key = str(sorted(resolver.cluster_spec().as_dict().items()))
    if key not in _strategies:
        _strategies.clear()
        _strategies[key] = tf.distribute.ParameterServerStrategy(resolver)
    return _strategies[key]
