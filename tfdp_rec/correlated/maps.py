"""Pending noise that is correlated: what a row owes when its state is more than its weight.

Per coordinate everything is linear. With the state x = (θ, v, T_1 … T_d), weight, velocity, buffers, one step without a
gradient is x ← M_t x + b_t z_t, z_t ~ N(0, 1), so that a row marked h owes at step t

    x_t = A(h, t) x_h + N(0, Σ(h, t)),    A(h, t) = M_{t−1} … M_h,
    Σ(h, t) = Σ_{h ≤ j < t} A(j+1, t) b_j b_jᵀ A(j+1, t)ᵀ.

A and Σ are small matrices, the same for all coordinates, rows and tables. They are brought forward with every step, all
at once: A ← M A, Σ ← M Σ Mᵀ + b bᵀ. Nothing cancels, and any schedule of η and s is exact. M_t and b_t are read off the
step itself, made on unit vectors: there is no second formula to get wrong.

Marks are kept in blocks of K. The maps of a mark come forward to the end e of its block, and from there on one map of
the block does for all of them, so that a step brings forward K + t/K maps and not t:

    A(h, t) = A(e, t) A(h, e),    Σ(h, t) = A(e, t) Σ(h, e) A(e, t)ᵀ + Σ(e, t).

Paying draws the whole state. Σ = U D Uᵀ with U unit upper triangular, found from the last state, a buffer, to the
first: the buffers are of the size of z whatever the learning rate. k steps have rank k at most: a pivot that float64
cannot tell from 0 is 0, and what it leaves over stays noise of the states before it.

Closed forms with running totals (`pending.py`) are faster and are the case d = 0; tests hold the two to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.branches import choose
from tfdp_rec.core.mechanism.correlated_noise import BufferedToeplitz
from tfdp_rec.core.mechanism.noise.meeting import nearest
from tfdp_rec.core.mechanism.pending import Aggregated, History, Owed
from tfdp_rec.core.mechanism.rules import Recursion, Rows
from tfdp_rec.core.mechanism.tables import Operations, scatter

Entries = Sequence[Sequence[tf.Tensor]]
Places = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

_FIRST_CAPACITY = 1024
_NO_PIVOT = 1e-13  # of a variance: below it a pivot is rounding


class Maps(History):
    """A and Σ of every mark and block, at the present step and at the step before it."""

    # Step t is kept in places of the parity of t: a step cut short between the maps and the clock leaves those of the
    # clock's own step untouched.

    block = 256  # K

    def __init__(self, size: int):
        self.size = size
        shape = [None, size, 2, size]  # [place, row, A or Σ, column]
        self.table = tf.Variable(self._room_for(_FIRST_CAPACITY), trainable=False, shape=shape, name="totals")

    def look_up(self, steps: tf.Tensor) -> tf.Tensor:
        """The maps of a row settled at the present step: the identity, which is never looked up."""
        return tf.zeros([self.size, self.size + 1], tf.float64)

    def entries_between(self, since: tf.Tensor, now: tf.Tensor) -> tuple[Entries, Entries]:
        """The entries of A(since, now) and Σ(since, now), float64 `[n]` each."""
        within_maps, within = self._entries(self._places_of_marks(since, now))
        # Nothing, before a block has ended.
        maps, after = self._entries(self._places_of_blocks(since // self.block, now))
        noise = _product(_product(maps, within), list(zip(*maps)))
        every = range(self.size)
        return _product(maps, within_maps), [[noise[i][j] + after[i][j] for j in every] for i in every]

    def _entries(self, places: tf.Tensor) -> tuple[Entries, Entries]:
        """Those of A and Σ, each a vector over the places: small matrices side by side are slow to multiply."""
        found = tf.transpose(tf.gather(self.table, places), [1, 2, 3, 0])
        first, second = tf.unstack(found, axis=1)
        return [tf.unstack(row) for row in tf.unstack(first)], [tf.unstack(row) for row in tf.unstack(second)]

    def append(self, step: tf.Tensor, totals: tf.Tensor) -> Operations:
        """Brings marks and blocks forward by the step that leads to `step`; `totals` are its M and b."""
        # Not tf.shape, which would read the table, and what is read is copied before it is written.
        capacity = tf.raw_ops.VariableShape(input=self.table.handle, out_type=tf.int64)[0] // 2

        def grow() -> tf.Tensor:
            self.table.assign(tf.concat([self.table, self._room_for(capacity)], axis=0))
            return tf.constant(True)

        grown = choose(self._blocks(step) * (self.block + 1) > capacity, grow, lambda: tf.constant(False))
        with tf.control_dependencies([grown]):
            last = (step - 1) // self.block
            marks, blocks = tf.range(last * self.block, (last + 1) * self.block), tf.range(self._blocks(step))
            done = self._bring_forward(self._places_of_marks, marks, marks < step, step, totals)
            done += self._bring_forward(self._places_of_blocks, blocks, (blocks + 1) * self.block < step, step, totals)
            # A block that has come to its end stands, at both parities.
            stand = tf.range(tf.maximum(last - 1, 0) * self.block, last * self.block)
            kept = tf.gather(self.table, self._places_of_marks(stand, step - 1))
            return done + scatter("Update", self.table, self._places_of_marks(stand, step), kept)

    def _bring_forward(
        self, places: Places, which: tf.Tensor, begun: tf.Tensor, step: tf.Tensor, totals: tf.Tensor
    ) -> Operations:
        move, entry = totals[:, :-1], totals[:, -1]
        before = tf.gather(self.table, places(which, step - 1))
        moved = tf.einsum("ij,njkl->nikl", move, before)
        noise = tf.einsum("nij,kj->nik", moved[:, :, 1], move) + entry[:, None] * entry
        after = tf.stack([moved[:, :, 0], noise], axis=2)
        after = tf.where(begun[:, None, None, None], after, tf.constant(self._nothing))
        return scatter("Update", self.table, places(which, step), after)

    def begin(self, step: tf.Tensor, settled: tf.Tensor) -> None:
        """Leaves the maps as they are: nothing in them is a difference."""

    def restart(self, capacity: int) -> None:
        self.table.assign(self._room_for(capacity + capacity // self.block + _FIRST_CAPACITY))

    # Places: a block's marks and, after them, the block's own; two each, for even steps and for odd ones.

    def _places_of_marks(self, marks: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return 2 * (marks + marks // self.block) + step % 2

    def _places_of_blocks(self, blocks: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return 2 * ((blocks + 1) * (self.block + 1) - 1) + step % 2

    def _blocks(self, step: tf.Tensor) -> tf.Tensor:
        """Number of blocks once `step` may be a mark."""
        return step // self.block + 1

    @property
    def _nothing(self) -> np.ndarray:
        """A = 1 and Σ = 0."""
        return np.stack([np.eye(self.size), np.zeros([self.size, self.size])], axis=1)

    def _room_for(self, several: int | tf.Tensor) -> tf.Tensor:
        return tf.tile(tf.constant(self._nothing)[None], tf.stack([2 * tf.cast(several, tf.int32), 1, 1, 1]))


def _product(one: Entries, other: Entries) -> Entries:
    """Of two matrices."""
    return [[tf.add_n([x * y for x, y in zip(row, column)]) for column in zip(*other)] for row in one]


class Correlated(Aggregated):
    """Payment by as many Gaussians a weight as a state has numbers."""

    history = Maps

    def __init__(self, recursion: Recursion, strategy: BufferedToeplitz):
        super().__init__(recursion)
        self._strategy = strategy
        # A weight depends on all of a state, a velocity on itself and the buffers, a buffer on buffers.
        self._kinds = [0] + [1] * recursion.has_velocity + [2] * strategy.buffers
        self.size = self.columns = len(self._kinds)

    def next_totals(self, totals: tf.Tensor, learning_rate: tf.Tensor, stddev: tf.Tensor) -> tf.Tensor:
        """M_t and b_t, `[size, size + 1]`: the step, made on unit vectors."""
        *state, unit = tf.unstack(tf.eye(self.size + 1, dtype=tf.float64))
        own = self.size - self._strategy.buffers
        noise, buffers = self._strategy.next_noise(unit, state[own:])
        moved = self.recursion.step(tuple(state[:own]), -learning_rate * stddev * noise, learning_rate)
        return tf.stack([*moved, *buffers])

    def find_debt(self, since: tf.Tensor, now: tf.Tensor, history: History) -> Owed:
        assert isinstance(history, Maps)
        maps, covariance = history.entries_between(since, now)
        pivots, shares = factors(covariance)
        kept = [maps[i][j] for i, j in self._entries()]
        mixed = [shares[i][j] for i in range(self.size) for j in range(i + 1, self.size)]
        return Owed(tf.sqrt(tf.stack(pivots, axis=1)), (*kept, *mixed))

    def move(self, rows: Rows, coefficients: tuple[tf.Tensor, ...], noise: tf.Tensor, grid: tf.Tensor) -> Rows:
        numbers = iter(number[:, None] for number in coefficients)
        sums = [[noise[:, i]] for i in range(self.size)]
        for i, j in self._entries():
            sums[i].append(next(numbers) * rows[j])
        for i in range(self.size):
            sums[i] += [next(numbers) * noise[:, j] for j in range(i + 1, self.size)]
        weight, *others = (tf.add_n(several) for several in sums)
        if self.recursion.has_velocity:
            velocity = nearest(others[0], grid)  # as if the noise of the last step had taken it there
            weight += (1 + self.recursion.momentum * self.recursion.nesterov) * (velocity - others[0])
            others[0] = velocity
        return weight, *others

    def _entries(self) -> list[tuple[int, int]]:
        """Those of A that are not always 0."""
        kinds, every = self._kinds, range(self.size)
        return [(i, j) for i in every for j in every if kinds[i] <= kinds[j]]


def factors(covariance: Sequence[Sequence[tf.Tensor]]) -> tuple[list[tf.Tensor], list[list[tf.Tensor]]]:
    """D and the unit upper triangular U with U D Uᵀ = Σ, entry by entry, also for a Σ not of full rank."""
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
