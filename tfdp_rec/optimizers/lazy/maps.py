"""Pending noise that is correlated: what a row owes when its state is more than its weight.

Per coordinate everything is linear. With the state x = (θ, v, T_1 … T_d), weight, velocity, buffers, one step without a
gradient is x ← M_t x + b_t z_t, z_t ~ N(0, 1), so that a row marked h owes at step t

    x_t = A(h, t) x_h + N(0, Σ(h, t)),    A(h, t) = M_{t−1} … M_h,
    Σ(h, t) = Σ_{h ≤ j < t} A(j+1, t) b_j b_jᵀ A(j+1, t)ᵀ.

A and Σ are small matrices, the same for all coordinates, rows and tables. They are kept for every mark h ≤ t and
brought forward with every step, all marks at once: A ← M A, Σ ← M Σ Mᵀ + b bᵀ. Nothing cancels, and any schedule of η
and s is exact. M_t and b_t are read off the step itself, made on unit vectors: there is no second formula to get wrong.

Paying draws the whole state. Σ = U D Uᵀ with U unit upper triangular, found from the last state, a buffer, to the
first: the buffers are of the size of z whatever the learning rate. k steps have rank k at most: a pivot that float64
cannot tell from 0 is 0, and what it leaves over stays noise of the states before it.

Closed forms with running totals (`pending.py`) are faster and are the case d = 0; tests hold the two to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp_rec.optimizers.lazy.pending import Aggregated, History, Owed, Rows
from tfdp_rec.optimizers.recursion import Recursion
from tfdp_rec.optimizers.tables import Operations, scatter
from tfdp_rec.privacy.correlated import BufferedToeplitz

_FIRST_CAPACITY = 1024
_NO_PIVOT = 1e-13  # of a variance: below it a pivot is rounding


class Maps(History):
    """A and Σ of every mark, as they stand at the present step, and beside them as they stood before it.

    A step cut short between the maps and the clock leaves those of the clock's own step untouched: step t is kept at
    t mod 2.

    Args:
        size: of the state.
    """

    def __init__(self, size: int):
        self.size = size
        shape = [2, size, 2, None, size]  # [t mod 2, row, A or Σ, mark, column]
        self.table = tf.Variable(_start(size, _FIRST_CAPACITY), trainable=False, shape=shape, name="totals")

    def at(self, steps: tf.Tensor) -> tf.Tensor:
        """Of a step that was settled just now: nothing but itself, so that nobody needs it."""
        return tf.zeros([self.size, self.size + 1], tf.float64)

    def between(self, since: tf.Tensor, now: tf.Tensor) -> tuple[list[list[tf.Tensor]], list[list[tf.Tensor]]]:
        """The entries of A(since, now) and Σ(since, now), float64 `[n]` each.

        Args:
            since: marks `[n]`.
            now: the present step.
        """
        found = tf.gather(tf.gather(self.table, now % 2), since, axis=2)
        both = [[[found[i, kind, :, j] for j in range(self.size)] for i in range(self.size)] for kind in (0, 1)]
        return both[0], both[1]

    def append(self, step: tf.Tensor, totals: tf.Tensor) -> Operations:
        """Brings all marks before `step` forward by the step that leads to it.

        Args:
            step: the one that begins.
            totals: M and b of the step that ended, `[size, size + 1]`.
        """
        room = tf.shape(self.table, tf.int64)[3]

        def grow() -> tf.Tensor:
            self.table.assign(tf.concat([self.table, _start(self.size, room)], axis=3))
            return tf.constant(True)

        grown = tf.cond(step >= room, grow, lambda: tf.constant(False))
        with tf.control_dependencies([grown]):
            before = tf.gather(self.table, (step + 1) % 2)
            marked = tf.range(tf.shape(before, tf.int64)[2])[:, None] < step
            after = tf.where(marked, self._forward(before, totals), _start(self.size, 1)[0])
            return scatter("Update", self.table, (step % 2)[None], after[None])

    def _forward(self, before: tf.Tensor, totals: tf.Tensor) -> tf.Tensor:
        move, entry = totals[:, :-1], totals[:, -1]
        moved = tf.reshape(move @ tf.reshape(before, [self.size, -1]), tf.shape(before))
        noise = tf.reshape(tf.reshape(moved[:, 1], [-1, self.size]) @ tf.transpose(move), tf.shape(moved[:, 1]))
        return tf.stack([moved[:, 0], noise + entry[:, None, None] * entry], axis=1)

    def restart(self, capacity: int) -> None:
        self.table.assign(_start(self.size, capacity + _FIRST_CAPACITY))


def _start(size: int, marks: int | tf.Tensor) -> tf.Tensor:
    """A = 1 and Σ = 0 for every mark, twice."""
    nothing = np.stack([np.eye(size), np.zeros([size, size])], axis=1)  # [row, A or Σ, column]
    return tf.tile(tf.constant(nothing)[None, :, :, None], tf.stack([2, 1, 1, tf.cast(marks, tf.int32), 1]))


class Correlated(Aggregated):
    """As many Gaussians a weight as a state has numbers.

    Args:
        recursion: the step's.
        strategy: of its noise.
    """

    def __init__(self, recursion: Recursion, strategy: BufferedToeplitz):
        super().__init__(recursion)
        self._strategy = strategy
        # A weight depends on all of a state, a velocity on itself and the buffers, a buffer on buffers.
        self._kinds = [0] + [1] * recursion.has_velocity + [2] * strategy.buffers
        self.size = len(self._kinds)

    def new_history(self) -> Maps:
        return Maps(self.size)

    def next_totals(self, totals: tf.Tensor, learning_rate: tf.Tensor, stddev: tf.Tensor) -> tf.Tensor:
        """M_t and b_t, `[size, size + 1]`: the step, made on unit vectors."""
        *state, unit = tf.unstack(tf.eye(self.size + 1, dtype=tf.float64))
        noise, buffers = self._strategy.next_noise(unit, state[self.size - self._strategy.buffers :])
        velocity = state[1] if self.recursion.has_velocity else None
        moved = self.recursion.step(state[0], velocity, -learning_rate * stddev * noise, learning_rate)
        return tf.stack([each for each in (*moved, *buffers) if each is not None])

    def owed(self, since: tf.Tensor, now: tf.Tensor, history: History) -> Owed:
        assert isinstance(history, Maps)
        maps, covariance = history.between(since, now)
        pivots, shares = factors(covariance)
        kept = [maps[i][j] for i, j in self._entries()]
        mixed = [shares[i][j] for i in range(self.size) for j in range(i + 1, self.size)]
        narrow = [tf.cast(number, tf.float32) for number in (*kept, *mixed)]
        return Owed(tf.cast(tf.sqrt(tf.stack(pivots, axis=1)), tf.float32), tuple(narrow))

    def moved(self, rows: Rows, coefficients: tuple[tf.Tensor, ...], noise: tf.Tensor) -> Rows:
        numbers = iter(number[:, None] for number in coefficients)
        state = [each for each in rows if each is not None]
        sums = [[noise[:, i]] for i in range(self.size)]
        for i, j in self._entries():
            sums[i].append(next(numbers) * state[j])
        for i in range(self.size):
            sums[i] += [next(numbers) * noise[:, j] for j in range(i + 1, self.size)]
        found = [tf.add_n(several) for several in sums]
        return tuple(found) if self.recursion.has_velocity else (found[0], None, *found[1:])

    def _entries(self) -> list[tuple[int, int]]:
        """Those of A that are not always 0."""
        kinds, every = self._kinds, range(self.size)
        return [(i, j) for i in every for j in every if kinds[i] <= kinds[j]]


def factors(covariance: Sequence[Sequence[tf.Tensor]]) -> tuple[list[tf.Tensor], list[list[tf.Tensor]]]:
    """D and the unit upper triangular U with U D Uᵀ = Σ, entry by entry, also where Σ is not of full rank.

    Args:
        covariance: entries of any shape.
    """
    size, left = len(covariance), [list(row) for row in covariance]
    pivots, shares = list[tf.Tensor](left[0]), [list(row) for row in covariance]
    for k in reversed(range(size)):
        pivots[k] = tf.where(left[k][k] > _NO_PIVOT * covariance[k][k], left[k][k], tf.zeros_like(left[k][k]))
        for i in range(k):
            shares[i][k] = tf.math.divide_no_nan(left[i][k], pivots[k])
        for i in range(k):
            for j in range(k):
                left[i][j] -= shares[i][k] * shares[j][k] * pivots[k]
    return pivots, shares
