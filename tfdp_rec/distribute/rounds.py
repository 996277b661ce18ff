"""Rounds of a cluster's training: attempts of a step that workers make at once, each counted before it is dispatched.

    rounds.make(100)      so many attempts; their losses

An attempt is taken from a block that was paid for (`attempts.py`): also a second one of the same step, where a worker
died. What a round has taken is entered in the optimizer's history at its end, whatever it ends by.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.claim.counters import void_of
from tfdp_rec.core.claim.events import DpEvent, NonPrivateDpEvent
from tfdp_rec.core.claim.sampling_proof import NO_SAMPLING, SeenDraws, Source, refusals_in_words
from tfdp_rec.core.ground.keras_internals import learning_rate_of, schedule
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.distribute.attempts import Attempts
from tfdp_rec.distribute.connection import Watch, servers_alive
from tfdp_rec.distribute.worker_step import Made


class Rounds:
    """Makes steps on workers, a number at once.

    Args:
        coordinator: The cluster's coordinator.
        step: Function of a worker's iterator and a learning rate, which makes a step there.
        iterator: The iterators of all workers.
        optimizer: Optimizer that counts the steps, and says what one costs.
        source: Where the batches come from.
        attempts: The count of attempts, which are paid for in blocks.
        watch: What knows how long to wait for a step.
    """

    def __init__(
        self, coordinator: Any, step: Callable[..., tf.Tensor], iterator: Any, *,
        optimizer: PrivateOptimizer, source: Source, attempts: Attempts, watch: Watch,
    ):  # fmt: skip
        self._coordinator, self.step, self._iterator = coordinator, step, iterator
        self._optimizer, self._source, self._attempts, self._watch = optimizer, source, attempts, watch
        self.progress = Progress()
        # Held while steps are under way, which are counted at their end: what another thread releases or saves waits.
        self.pause = threading.RLock()

    def make(self, number: int) -> np.ndarray:
        """So many attempts; the sum of losses and the number of examples."""
        with self.pause, self._count_attempts():
            block = self._attempts.reserve(self._event(), number)
            self.progress.total = np.zeros(2)
            rate = tf.constant(self._rate(), tf.float64)

            def attempt(iterator: Any) -> None:
                if self._attempts.take(block):
                    self.progress.add(*Made.of(self.step(iterator, rate).numpy()))

            # Scheduling an attempt raises what an earlier one has failed of.
            with refusals_in_words(), servers_alive():
                self._dispatch(attempt, number)
            return self.progress.total

    @contextlib.contextmanager
    def _count_attempts(self) -> Iterator[None]:
        """A block whose attempts are entered at its end, whatever it ends by."""
        before = self._attempts.count
        try:
            yield
        finally:
            try:
                # After Ctrl-C workers go on with what was scheduled: from here on none of them may take an attempt.
                self._attempts.end()
            finally:
                if made := self._attempts.count - before:
                    self._count(made)

    def _count(self, made: int) -> None:
        """Enters what a round has made; where a draw was used twice, which shows afterwards, nothing is proven."""
        repeated, meter = self.progress.repeated, self._optimizer.privacy_history
        source = NO_SAMPLING if repeated else self._source
        meter.add(source, made, self._attempts.receipt if source.sampling is not None else "")
        self._optimizer.iterations.assign_add(made)
        if repeated:
            self._attempts.take(self._attempts.reserve(NonPrivateDpEvent(), 1))

    def _dispatch(self, attempt: Callable[[Any], None], number: int) -> None:
        try:
            for _ in range(number):
                # Not `schedule`, which takes graphs alone: every try, the first or another, must pass the count.
                schedule(self._coordinator, attempt, (self._iterator,))
            self.progress.restart()
            while not self._coordinator.done():
                if self.progress.seconds() > self._watch.patience:
                    raise self._watch.no_step()
                time.sleep(0.002)
            self._coordinator.join()
        except tf.errors.OutOfRangeError as problem:
            raise ValueError("The data of dataset_fn ended: make it endless, with repeat().") from problem

    def _event(self) -> DpEvent:
        """What an attempt is paid for; nothing bounds its cost where no sampling drew, or noise can be repeated."""
        if self._source.sampling is None or void_of(self._optimizer, self._source):
            return NonPrivateDpEvent()
        return self._optimizer.dp_event()

    def _rate(self) -> float:
        rate = learning_rate_of(self._optimizer)
        return float(rate.numpy()) if isinstance(rate, keras.Variable) else 0.0  # a schedule is the servers' own


class Progress:
    """The losses of a round, and when the last of them came."""

    def __init__(self) -> None:
        self._lock, self.total, self._draws, self.repeated = threading.Lock(), np.zeros(2), SeenDraws(), False
        self.restart()

    def restart(self) -> None:
        """Begins to wait for the next."""
        self._last = time.monotonic()

    def add(self, found: np.ndarray, draw: list[int]) -> None:
        """Adds what a step has found, if its draw is a new one."""
        with self._lock:
            try:
                self._draws.add(*draw)
            except NotPrivate:
                self.repeated = True
                raise
            self.total = self.total + found
            self._last = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the last."""
        return time.monotonic() - self._last
