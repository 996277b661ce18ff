"""Pending noise: what a row owes that no step has touched since it was last settled.

A row marked h at time t owes the steps j = h … t−1 with gradient zero. Step j has learning rate η_j and noise of
standard deviation s_j. The sum of what it owes is Gaussian and known in closed form, for any schedule of η and s:

*without momentum*, with L_t = Σ_{j<t} log(1 − η_jλ) and V_t = (1 − η_{t−1}λ)² V_{t−1} + η²_{t−1} s²_{t−1}:

    θ_t = a θ_h + N(0, V_t − a² V_h),    a = exp(L_t − L_h)

*with momentum* μ (κ = μ for Nesterov, else 1), k = t − h, and the running sums

    A_t = Σ_{j<t} η_j² s_j²,    P_t = Σ_{j<t} η_j² s_j² μ^{t−1−j},    Q_t = Σ_{j<t} η_j² s_j² μ^{2(t−1−j)}

whose parts since h are ΔA = A_t − A_h, ΔP = P_t − μᵏ P_h, ΔQ = Q_t − μ²ᵏ Q_h:

    v_t = μᵏ v_h + N,    θ_t = θ_h + κμ (1 − μᵏ)/(1 − μ) v_h + M
    Var N = ΔQ,    Cov(N, M) = (ΔP − κμ ΔQ)/(1 − μ),    Var M = (ΔA − 2κμ ΔP + κ²μ² ΔQ)/(1 − μ)²

since step j's noise enters v_t with the factor μ^{t−1−j} and θ_t with (1 − κμ^{t−j})/(1 − μ).

A row's mark is the step it was settled at, 8 bytes; the running sums are kept once for all tables, one row a step
(`History`). A row owes while its mark is behind the clock, which counts steps by itself, so that setting Keras'
`iterations` back forgets no noise. *Replayed* noise, the paper's "without ANS", draws and makes each owed step alone.

Reference:
    Lim et al., "LazyDP", ASPLOS 2024, §5 (aggregated noise sampling), for constant η without momentum.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.branches import choose, has_gpu
from tfdp_rec.core.ground.graph_checks import HOST, place_on_host
from tfdp_rec.core.mechanism.correlated_noise import INDEPENDENT, BufferedToeplitz
from tfdp_rec.core.mechanism.noise.base import NoiseSource, Request
from tfdp_rec.core.mechanism.noise.meeting import grid_of, nearest, on_grid
from tfdp_rec.core.mechanism.rules import Recursion, Rows, Scalar
from tfdp_rec.core.mechanism.tables import Operations, assign, run_after, scatter

_FIRST_CAPACITY = 1024
_MOST_MOMENTUM = 0.999  # from 1 - 10⁻⁸ on, rounding leaves no noise in a weight beside that of its velocity


class History:
    """Running totals, one row a step: row t holds the totals before step t."""

    def __init__(self, columns: int):
        self.columns = columns
        start = np.zeros([_FIRST_CAPACITY, columns])
        with tf.device(HOST):
            self.table = tf.Variable(start, trainable=False, shape=[None, columns], dtype=tf.float64, name="totals")

    @place_on_host
    def look_up(self, steps: tf.Tensor) -> tf.Tensor:
        """The totals before each of `steps`, `[..., columns]`."""
        return tf.gather(self.table, steps)

    @place_on_host
    def columns_at(self, steps: tf.Tensor) -> list[tf.Tensor]:
        """The same, each total by itself."""
        return tf.unstack(self.look_up(steps), num=self.columns, axis=-1)

    @place_on_host
    def append(self, step: tf.Tensor, totals: tf.Tensor) -> Operations:
        """Enters the totals before `step`, in place; the room doubles when it runs out."""
        room = tf.raw_ops.VariableShape(input=self.table.handle, out_type=tf.int64)[0]

        def grow() -> tf.Tensor:
            self.table.assign(tf.concat([self.table, tf.zeros([room, self.columns], tf.float64)], axis=0))
            return tf.constant(True)

        grown = choose(step >= room, grow, lambda: tf.constant(False))
        with tf.control_dependencies([grown]):
            return scatter("Update", self.table, step[None], totals[None])

    def begin(self, step: tf.Tensor, settled: tf.Tensor) -> None:
        """Has the totals begin anew at `step`, if all rows are settled there."""
        # What a row owes is a difference of totals. After a fall of the learning rate the noise of a few steps would be
        # lost in the rounding of the totals of all, and rows that no step touched would be released unchanged.
        totals = self.look_up(step)
        self.append(step, tf.where(settled, tf.zeros_like(totals), totals))

    def restart(self, capacity: int) -> None:
        """Forgets everything, with room for `capacity` steps and more."""
        self.table.assign(tf.zeros([capacity + _FIRST_CAPACITY, self.columns], tf.float64))


@dataclasses.dataclass(frozen=True)
class Debt:
    """Distinct rows of one table that owe noise."""

    # `ids` int64 `[n]`, their `rows` of weights and velocities; `table` is the number that the noise source knows.

    table: int
    ids: tf.Tensor
    rows: Rows

    def noise(
        self, stddev: tf.Tensor | None = None, onto: tuple[tf.Tensor, ...] = (), grid: tf.Tensor | None = None
    ) -> Request:
        """Gaussians for the rows, of these standard deviations `[n, draws]`; unit ones if left out."""
        return Request(self.table, self.ids, self.rows[0].shape[1], stddev, onto, grid)

    @property
    def wide(self) -> Rows:
        """The rows in float64."""
        return tuple(tf.cast(each, tf.float64) for each in self.rows)


class Owed(NamedTuple):
    """Standard deviations `[n, draws]` of the Gaussians that rows owe, and coefficients `[n]` by which these enter."""

    stddev: tf.Tensor
    coefficients: tuple[tf.Tensor, ...] = ()

    def of(self, rows: tf.Tensor) -> Owed:
        """The same of some of the rows."""
        return Owed(tf.gather(self.stddev, rows), tuple(tf.gather(c, rows) for c in self.coefficients))

    def split(self, sizes: Sequence[tf.Tensor]) -> list[Owed]:
        """The same of rows in runs of these sizes."""
        stddev, *coefficients = (tf.split(each, sizes, num=len(sizes)) for each in (self.stddev, *self.coefficients))
        return [Owed(one, tuple(c[place] for c in coefficients)) for place, one in enumerate(stddev)]


class Pending(abc.ABC):
    """A way to total owed noise, and to settle it."""

    columns: int
    history: Callable[[int], History] = History  # makes room for totals of so many columns

    def __init__(self, recursion: Recursion):
        self.recursion = recursion

    @abc.abstractmethod
    def next_totals(self, totals: tf.Tensor, learning_rate: tf.Tensor, stddev: tf.Tensor) -> tf.Tensor:
        """The totals after a step of that learning rate and noise, from those before it. float64."""

    @abc.abstractmethod
    def settle_rows(
        self, debts: Sequence[Debt], since: tf.Tensor, now: tf.Tensor, history: History, source: NoiseSource,
        grid: tf.Tensor, by_mark: Owed | None = None,
    ) -> list[Rows]:
        """The rows of each debt as they stand at `now`, from one draw where possible.

        Args:
            debts: Rows of some tables.
            since: The steps they were settled at, those of each debt after another's.
            now: The step that they are settled at.
            history: The totals.
            source: Where noise comes from.
            grid: Step of the grid that they are rounded to.
            by_mark: What rows owe by their marks, if that is known.
        """

    def find_debt_by_mark(self, now: tf.Tensor, history: History) -> Owed | None:
        """Debt of a row by its mark; None where it is computed row by row."""
        return None


class Aggregated(Pending):
    """All owed steps in as many Gaussians a weight as a step has variables."""

    @abc.abstractmethod
    def find_debt(self, since: tf.Tensor, now: tf.Tensor, history: History) -> Owed:
        """Debt at step `now` of rows marked `since`, float64."""

    @abc.abstractmethod
    def move(self, rows: Rows, coefficients: tuple[tf.Tensor, ...], noise: tf.Tensor, grid: tf.Tensor) -> Rows:
        """The rows after Gaussians `[n, draws, width]` of the standard deviations owed, in float64; see `step_on`."""

    def settle_rows(
        self, debts: Sequence[Debt], since: tf.Tensor, now: tf.Tensor, history: History, source: NoiseSource,
        grid: tf.Tensor, by_mark: Owed | None = None,
    ) -> list[Rows]:
        # Found for the rows of all tables at once: a step has many tables, and a table few rows.
        with tf.device(HOST):
            due = by_mark.of(since) if by_mark else self.find_debt(since, now, history)
            owed = due.split([tf.size(debt.ids) for debt in debts])
        if not due.coefficients:  # one Gaussian, added to the weight
            asked = [debt.noise(each.stddev, (debt.rows[0],), grid) for debt, each in zip(debts, owed)]
            return [(weight,) for weight in source.noisy(asked, now)]
        noise = source.draw([debt.noise(due.stddev) for debt, due in zip(debts, owed)], now)
        moved = (self.move(debt.wide, due.coefficients, drawn, grid) for debt, due, drawn in zip(debts, owed, noise))
        return [weights_on(grid, rows) for rows in moved]

    @place_on_host
    def find_debt_by_mark(self, now: tf.Tensor, history: History) -> Owed:
        # There are fewer steps than rows: where all are settled, what one owes is found once for each possible mark.
        return self.find_debt(tf.range(now + 1), now, history)


def _root(variance: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.maximum(variance, 0.0))


class WithoutMomentum(Aggregated):
    """One Gaussian a row. Totals: log of what decay leaves, and the variance of a row that was never settled."""

    columns = 2

    def next_totals(self, totals: tf.Tensor, learning_rate: tf.Tensor, stddev: tf.Tensor) -> tf.Tensor:
        keep = 1.0 - learning_rate * self.recursion.weight_decay
        added = tf.square(learning_rate * stddev)
        return tf.stack([totals[0] + tf.math.log(keep), tf.square(keep) * totals[1] + added])

    def find_debt(self, since: tf.Tensor, now: tf.Tensor, history: History) -> Owed:
        (log_then, variance_then), (log, variance) = history.columns_at(since), history.columns_at(now)
        if not self.recursion.weight_decay:
            return Owed(tf.expand_dims(_root(variance - variance_then), 1))
        kept = tf.exp(log - log_then)
        return Owed(tf.expand_dims(_root(variance - tf.square(kept) * variance_then), 1), (kept,))

    def move(self, rows: Rows, coefficients: tuple[tf.Tensor, ...], noise: tf.Tensor, grid: tf.Tensor) -> Rows:
        return (coefficients[0][:, None] * rows[0] - noise[:, 0],)


class WithMomentum(Aggregated):
    """Two correlated Gaussians a row: one for the velocity, one for the weight. Totals: A, P, Q."""

    columns = 3

    def __init__(self, recursion: Recursion):
        super().__init__(recursion)
        if recursion.momentum > _MOST_MOMENTUM:
            raise ValueError(
                f"momentum must be at most {_MOST_MOMENTUM} where noise is added late, got {recursion.momentum}: "
                "beyond, what a row owes is less than rounding leaves of its totals."
            )

    def next_totals(self, totals: tf.Tensor, learning_rate: tf.Tensor, stddev: tf.Tensor) -> tf.Tensor:
        added, mu = tf.square(learning_rate * stddev), self.recursion.momentum
        return tf.stack([totals[0] + added, mu * totals[1] + added, mu * mu * totals[2] + added])

    def find_debt(self, since: tf.Tensor, now: tf.Tensor, history: History) -> Owed:
        mu = self.recursion.momentum
        carried = mu if self.recursion.nesterov else 1.0
        power = tf.pow(tf.constant(mu, tf.float64), tf.cast(now - since, tf.float64))
        (a_then, p_then, q_then), (a, p, q) = history.columns_at(since), history.columns_at(now)
        a, p, q = a - a_then, p - power * p_then, q - tf.square(power) * q_then
        cov = (p - carried * mu * q) / (1 - mu)
        var = (a - 2 * carried * mu * p + (carried * mu) ** 2 * q) / (1 - mu) ** 2
        # Cholesky of the 2x2 covariance: velocity first, then what the weight has beside it.
        first, share = _root(q), tf.math.divide_no_nan(cov, q)
        # One step has one Gaussian: what rounding leaves of the second would show which rows were not read.
        second = tf.where(now - since == 1, tf.zeros_like(q), _root(var - share * cov))
        reach = carried * mu * (1 - power) / (1 - mu)
        return Owed(tf.stack([first, second], axis=1), (power, reach, share))

    def move(self, rows: Rows, coefficients: tuple[tf.Tensor, ...], noise: tf.Tensor, grid: tf.Tensor) -> Rows:
        weight, velocity = rows
        power, reach, share = (c[:, None] for c in coefficients)
        left = power * velocity
        new = nearest(left - noise[:, 0], grid)
        return weight + reach * velocity + share * (new - left) - noise[:, 1], new


class Replayed(Pending):
    """Every owed step drawn and made by itself, as eager DP-SGD does. Totals: η and s of the step before."""

    columns = 2

    def __init__(self, recursion: Recursion, strategy: BufferedToeplitz = INDEPENDENT):
        super().__init__(recursion)
        self._strategy = strategy

    def next_totals(self, totals: tf.Tensor, learning_rate: tf.Tensor, stddev: tf.Tensor) -> tf.Tensor:
        return tf.stack([learning_rate, stddev])

    def settle_rows(
        self, debts: Sequence[Debt], since: tf.Tensor, now: tf.Tensor, history: History, source: NoiseSource,
        grid: tf.Tensor, by_mark: Owed | None = None,
    ) -> list[Rows]:
        marks = tf.split(since, [tf.size(debt.ids) for debt in debts], num=len(debts))
        made = (self._replay(debt, own, now, history, source, grid) for debt, own in zip(debts, marks))
        return [weights_on(grid, rows) for rows in made]

    def _replay(
        self, debt: Debt, since: tf.Tensor, now: tf.Tensor, history: History, source: NoiseSource, grid: tf.Tensor
    ) -> Rows:
        own = 1 + self.recursion.has_velocity  # before the buffers

        def body(step: tf.Tensor, *rows: tf.Tensor) -> tuple[tf.Tensor, ...]:
            # The totals *before* step + 1 are the η and s *of* this step.
            eta, stddev = tf.unstack(history.look_up(step + 1))
            # All rows draw, also those that owe less: noise of a step must not depend on which other rows are settled.
            noise, buffers = self._strategy.next_noise(source.draw([debt.noise()], step)[0][:, 0], rows[own:])
            made = (*step_on(grid, self.recursion, rows[:own], -eta * stddev * noise, eta), *buffers)
            due = (since <= step)[:, None]
            return step + 1, *(tf.where(due, new, old) for new, old in zip(made, rows, strict=True))

        first = tf.reduce_min(tf.concat([since, now[None]], axis=0))
        return tf.while_loop(lambda step, *_: step < now, body, (first, *debt.wide), parallel_iterations=1)[1:]


def step_on(grid: tf.Tensor, recursion: Recursion, rows: Rows, move: tf.Tensor, learning_rate: Scalar) -> Rows:
    """A step of rows in float64, the velocity on the grid."""
    # The weight follows from the velocity as it was rounded: of one Gaussian, a second rounding would tell more.
    rows, learning_rate = tuple(tf.cast(each, tf.float64) for each in rows), tf.cast(learning_rate, tf.float64)
    if not recursion.has_velocity:
        return recursion.step(rows, move, learning_rate)
    left = recursion.momentum * rows[1]
    velocity = nearest(left + move, grid)
    return recursion.step(rows, velocity - left, learning_rate)[0], velocity


def weights_on(grid: tf.Tensor, rows: Rows) -> Rows:
    """float64 rows as float32, their weights on the grid, where their velocities are."""
    return on_grid(rows[0], grid), *(tf.cast(each, tf.float32) for each in rows[1:])


def choose_pending(recursion: Recursion, aggregate_noise: bool) -> Pending:
    """The way to settle for a recursion: in one Gaussian (two with momentum), or step by step."""
    if not aggregate_noise:
        return Replayed(recursion)
    return WithMomentum(recursion) if recursion.has_velocity else WithoutMomentum(recursion)


class RowMarks:
    """The clock, the totals of every step by way of decay, and the marks of a lazy optimizer's rows."""

    # A plain object, which neither Keras nor TensorFlow tracks: released files carry none of it, since after settling
    # all marks equal the clock.

    def __init__(self, histories: Sequence[History], rows: Mapping[str, int], start: int, keeps_largest: bool = False):
        self._keeps_largest = keeps_largest  # where a velocity outlives a release, or a schedule says what comes
        self.histories = histories
        # Of the marks of all tables, one after the other.
        self._first = dict(zip(rows, itertools.accumulate(rows.values(), initial=0)))
        with tf.device(HOST):  # where ids come from
            self.clock = tf.Variable(start, trainable=False, dtype=tf.int64, name="clock")
            # The largest η s since all rows were settled, or of all steps. All weights stand on its grid: on which
            # steps a row has been read or settled must not show in a weight's last bits.
            self.largest = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="largest")
            self.marks = tf.Variable(tf.zeros([sum(rows.values())], tf.int64), trainable=False, name="marks")
        self.restart(start)

    def restart(self, now: int, largest: float = 0.0) -> None:
        """Nothing is owed at step `now`; totals up to there do not matter, so they are zero."""
        for history in self.histories:
            history.restart(now)
        self.clock.assign(now)
        self.largest.assign(largest)
        self.settle_all(tf.constant(now, tf.int64))
        self.settled_at: int | None = now  # the step that all rows are known to have been settled at

    @place_on_host
    def settle_all(self, now: tf.Tensor) -> None:
        """Every row is settled at `now`."""
        self.marks.assign(tf.fill(self.marks.shape, now))

    @property
    def is_settled(self) -> bool:
        """Whether no row of any table owes anything."""
        return not self._first or self.settled_at == int(self.clock.numpy())

    @place_on_host
    def now(self) -> tf.Tensor:
        """The clock, int64."""
        return self.clock.read_value()

    def find_places(self, rows: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """The places of rows, by table path, among the marks of all tables: those of each table after another's."""
        ids, first = list(rows.values()), [self._first[path] for path in rows]
        if len(rows) <= 1:
            return ids[0] + first[0] if rows else tf.zeros([0], tf.int64)
        if not has_gpu():
            return tf.concat([each + start for each, start in zip(ids, first, strict=True)], axis=0)
        # They leave a GPU in one copy. To each id the first place of its table is added: steps from table to table,
        # added up along the ids. Where nothing is copied that takes twice as long.
        sizes, together = [tf.size(each, tf.int64) for each in ids], tf.concat(ids, axis=0)
        with tf.device(HOST):
            starts = tf.cumsum(tf.stack([0, *sizes]))
            begin, end = starts[:-1, None], starts[-1:] + 1  # a table without ids may come last
            steps = tf.constant(np.diff(first, prepend=0), tf.int64)
            return together + tf.cumsum(tf.scatter_nd(begin, steps, end))[:-1]

    @place_on_host
    def read_marks(self, places: tf.Tensor) -> tf.Tensor:
        """The steps that the rows of some places were settled at, int64."""
        return tf.gather(self.marks, places)

    @property
    @place_on_host
    def grid(self) -> tf.Tensor:
        """Step of the grid that all weights stand on."""
        return grid_of(self.largest.read_value())

    @place_on_host
    def tick(self, now: tf.Tensor, totals: Sequence[tf.Tensor], scale: tf.Tensor) -> Operations:
        """Puts a step on the clock: the largest η s of its noise and the totals of each history first."""
        first = assign(self.largest, tf.maximum(self.largest.read_value(), tf.abs(scale)))
        for history, those in zip(self.histories, totals, strict=True):
            first += history.append(now, those)
        with run_after(first):
            return assign(self.clock, now)

    @place_on_host
    def begin_totals(self, now: tf.Tensor) -> None:
        """Has the totals begin anew at `now`, if all rows are settled there."""
        settled = tf.reduce_min(self.marks) >= now
        if not self._keeps_largest:
            self.largest.assign(tf.where(settled, tf.zeros_like(self.largest), self.largest))
        for history in self.histories:
            history.begin(now, settled)

    @place_on_host
    def mark(self, places: tf.Tensor, now: tf.Tensor) -> Operations:
        """The rows of some places are settled at `now`."""
        return scatter("Update", self.marks, places, now)

    @place_on_host
    def owe_noise(self, places: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """Whether the rows of some places owe noise of a step before `now`.

        Places may be outside, of ids that the read refuses.
        """
        least, most = tf.constant(0, tf.int64), tf.constant(self.marks.shape[0] - 1, tf.int64)
        inside = tf.raw_ops.ClipByValue(t=places, clip_value_min=least, clip_value_max=most)
        return self.read_marks(inside) < now
