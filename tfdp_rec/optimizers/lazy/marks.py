"""What lazy rows owe, and since when: a clock, the running totals of every step, and a mark for each row.

The clock counts steps by itself, so that setting Keras' `iterations` back forgets no noise. A row's mark is the step it
was settled at; it owes noise while its mark is behind the clock.

A plain object, which neither Keras nor TensorFlow tracks: released files carry none of it, since after settling all
marks equal the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdp_rec.optimizers.lazy.pending import History
from tfdp_rec.optimizers.tables import Operations, after, scatter


class RowMarks:
    """The clock, the totals of every step by way of decay, and the marks of a lazy optimizer's rows."""

    def __init__(self, histories: Sequence[History], rows: Mapping[str, int], start: int):
        self.clock = tf.Variable(start, trainable=False, dtype=tf.int64, name="clock")
        self.histories = histories
        self.marks = {
            path: tf.Variable(tf.zeros([count], tf.int32), trainable=False, name="marks")
            for path, count in rows.items()
        }
        self.restart(start)

    def restart(self, now: int) -> None:
        """Nothing is owed at step `now`; totals up to there do not matter, so they are zero."""
        for history in self.histories:
            history.restart(now)
        self.clock.assign(now)
        for marks in self.marks.values():
            marks.assign(tf.fill(tf.shape(marks), tf.constant(now, tf.int32)))
        self.settled_at: int | None = now  # the step that all rows are known to have been settled at

    @property
    def settled(self) -> bool:
        """Whether no row of any table owes anything."""
        return not self.marks or self.settled_at == int(self.clock.numpy())

    def restored(self) -> None:
        """Clock and marks are those of a checkpoint."""
        now = int(self.clock.numpy())
        behind = any(int(tf.reduce_min(marks)) < now for marks in self.marks.values())
        self.settled_at = None if behind else now

    def now(self) -> tf.Tensor:
        """The clock, int64."""
        return self.clock.read_value()

    def since(self, path: str, ids: tf.Tensor) -> tf.Tensor:
        """The steps that rows were settled at, int64."""
        return tf.cast(tf.gather(self.marks[path], ids), tf.int64)

    def tick(self, now: tf.Tensor, totals: Sequence[tf.Tensor]) -> Operations:
        """Puts a step on the clock, the totals of each history first."""
        first: Operations = []
        for history, those in zip(self.histories, totals, strict=True):
            first += history.append(now, those)
        with after(first):
            done = tf.raw_ops.AssignVariableOp(resource=self.clock.handle, value=now)
        return [] if done is None else [done]

    def mark(self, path: str, ids: tf.Tensor, now: tf.Tensor) -> Operations:
        """Rows are settled at `now`."""
        return scatter("Update", self.marks[path], ids, tf.fill(tf.shape(ids), now))
