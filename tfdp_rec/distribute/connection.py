"""This process' connection to a cluster, the loss of a server, and patience with one that says nothing.

TensorFlow waits for a remote call as long as it takes, deaf to Ctrl-C. So a thread waits, and this
process asks the servers meanwhile whether they are still there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import tensorflow as tf

from tfdp_rec.core.ground.shared_graphs import SharedGraph
from tfdp_rec.distribute.cluster import Cluster, listens

Answer = TypeVar("Answer")
_ASK_EVERY = 5.0  # seconds
_GONE = 5.0  # seconds that nothing is at a server's address: what it held is lost, and no patience brings it back


class _Absence(Exception):
    def __init__(self, fact: str, way_out: str):
        super().__init__(f"{fact} {way_out}")
        self.fact = fact


class ServerLost(_Absence, RuntimeError):
    """A parameter server died, and with it what it held; `fact` is which, and how it showed."""


class Silence(_Absence, TimeoutError):
    """A process of the cluster has been silent for too long; `fact` is which, and for how long."""


@contextlib.contextmanager
def servers_alive() -> Iterator[None]:
    """Raises `ServerLost`, with the way out, if a server dies in the block."""
    try:
        yield
    except tf.errors.OpError as problem:
        if not _is_loss_of_server(problem):
            raise
        raise report_loss(problem.message[:200]) from problem


def report_loss(how: str) -> ServerLost:
    """The exception for a server that died."""
    _strategies.clear()  # the next trainer of this process connects anew
    return ServerLost(
        "A parameter server died, and with it its part of the model.",
        "Start it again, make the trainer again, in this program (after trainer.close()) or another, and go on "
        f"from the last checkpoint: trainer.resume(). ({how}).",
    )


def _is_loss_of_server(problem: tf.errors.OpError) -> bool:
    if "/job:ps" not in str(problem):
        return False
    # A server that is back before the loss was noticed answers, but knows nothing; another error is the step's own.
    forgot = ("unknown device", "Unable to find the relevant tensor remote_handle", "context_id")
    gone = isinstance(problem, (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError))
    return gone or any(words in str(problem) for words in forgot)


class Watch:
    """Waits for remote calls as long as the other end answers within `patience` seconds."""

    def __init__(self, cluster: Cluster, patience: float):
        self._cluster, self.patience = cluster, patience

    def during(self, call: Callable[[], Answer]) -> Answer:
        """The result of `call`, which may be interrupted and then ends in a thread of its own."""
        answer: Future[Answer] = Future()
        threading.Thread(target=_answer, args=(call, answer), daemon=True).start()
        heard = time.monotonic()
        while not wait([answer], min(_ASK_EVERY, self.patience)).done:
            holding = self._find_silent()
            heard = heard if holding else time.monotonic()
            if not answer.done():
                self._refuse(holding, time.monotonic() - heard)
        return answer.result()

    def greet(self) -> None:
        """Returns when every process answers: TensorFlow sends each new graph to all of them."""
        began = time.monotonic()
        while holding := self._find_silent():
            self._refuse(holding, time.monotonic() - began)
            time.sleep(0.1)

    def _refuse(self, holding: dict[str, str], seconds: float) -> None:
        """Raises for the process that has held others up for so long."""
        if seconds >= self.patience and holding:
            raise self._silence(holding)
        gone = {name: at for name, at in holding.items() if seconds >= _GONE and not listens(at)}
        if gone:
            how = f"Nothing listens at {self._cluster.describe(gone)}"
            raise report_loss(how)

    def _find_silent(self) -> dict[str, str]:
        """Processes that hold others up: silent servers, and workers that listen and are silent."""
        silent = self._cluster.silent()
        return {name: at for name, at in silent.items() if name.startswith("ps") or listens(at)}

    def no_step(self) -> Silence:
        """What to raise where no step ended for too long."""
        silent, fact = self._cluster.silent(), f"No step ended for {self.patience:g} s"
        if silent:
            return self._silence(silent, f"{fact}. ")
        return Silence(
            f"{fact}, though all workers and servers answer.",
            "Allow a step more time, with seconds_without_progress.",
        )

    def _silence(self, silent: dict[str, str], before: str = "") -> Silence:
        return Silence(
            f"{before}No answer from {self._cluster.describe(silent)}.",
            "Start what is down or frozen again, at its address; then make the trainer again and go on from the last "
            "checkpoint: trainer.resume().",
        )


def _answer(call: Callable[[], Answer], answer: Future[Answer]) -> None:
    try:
        with servers_alive():
            answer.set_result(call())
    except BaseException as problem:
        answer.set_exception(problem)


_strategies: dict[str, tf.distribute.ParameterServerStrategy] = {}  # TensorFlow connects a process once to a cluster


def connect(resolver: Any) -> tf.distribute.ParameterServerStrategy:
    """The connection of this process to a cluster, made if there is none."""
    # Workers have no function that was traced before: models of before the connection stay on one machine.
    key = str(sorted(resolver.cluster_spec().as_dict().items()))
    if key not in _strategies:
        _strategies.clear()
        _strategies[key] = tf.distribute.ParameterServerStrategy(resolver)
        SharedGraph.trace_all_anew()
    return _strategies[key]
