"""What rows owe under correlated noise is what a matrix C⁻¹, written out, says: maps, covariances, and joint releases.

The checks have teeth: they reject a wrong scale, buffers that are not brought up to date, independent noise.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Seeded, build_by_hand
from scipy import linalg

from tfdp_rec.clipping import ClippedSum
from tfdp_rec.core.mechanism.pending import History, RowMarks, WithMomentum, WithoutMomentum
from tfdp_rec.core.mechanism.rules import Recursion
from tfdp_rec.correlated.lazy_dp_ftrl import DebtsWithBuffers
from tfdp_rec.correlated.maps import Correlated, Maps, factors
from tfdp_rec.optimizers import DPFTRL, LazyDPFTRL
from tfdp_rec.privacy import BufferedToeplitz, Correlation

RATES = np.array([0.5, 0.4, 0.4, 0.1, 0.9, 0.3, 0.3])
STDDEVS = np.array([1.0, 1.0, 0.5, 0.5, 1.0, 1.5, 0.6])
NOW = len(RATES)
NO_GRID = None
RECURSIONS = {
    "plain": Recursion(),
    "decay": Recursion(weight_decay=0.6),
    "momentum": Recursion(momentum=0.9),
    "nesterov": Recursion(momentum=0.7, nesterov=True),
}
STRATEGIES = {
    0: BufferedToeplitz(),
    1: BufferedToeplitz([0.46], [0.954]),
    2: BufferedToeplitz([0.3, 0.5], [0.99, 0.2]),
    3: BufferedToeplitz([0.3, 0.2, 0.5], [0.99, 0.7, 0.2]),
}
ALL = pytest.mark.parametrize("recursion", RECURSIONS.values(), ids=RECURSIONS)
EVERY = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=[f"{d} buffers" for d in STRATEGIES])


def inverse_of(strategy, steps):
    return np.linalg.inv(linalg.toeplitz(strategy.coefficients(steps), np.eye(1, steps)[0]))


def states(recursion, strategy, rates=RATES, stddevs=STDDEVS):
    """Weight, velocity and buffers before each step as sums over z: [steps + 1, size, steps], by C⁻¹ and by hand."""
    steps = len(rates)
    inverse = inverse_of(strategy, steps)
    weight, velocity, kept, found = np.zeros(steps), np.zeros(steps), [np.zeros(steps)] * strategy.buffers, []
    for t in range(steps + 1):
        found.append(np.array([weight, *([velocity] if recursion.momentum else []), *kept]))
        if t < steps:
            kept = [decay * each + inverse[t] for decay, each in zip(strategy.decays, kept)]
            move = -rates[t] * stddevs[t] * inverse[t]
            velocity = recursion.momentum * velocity + move
            ahead = recursion.momentum * velocity + move if recursion.nesterov else velocity
            weight = (1 - rates[t] * recursion.weight_decay) * weight + ahead
    return np.array(found)


def history_of(kind, rates=RATES, stddevs=STDDEVS):
    history = kind.history(kind.columns)
    for step, (rate, stddev) in enumerate(zip(rates, stddevs)):
        now = tf.constant(step, tf.int64)
        totals = kind.next_totals(history.look_up(now), tf.constant(rate, tf.float64), tf.constant(stddev, tf.float64))
        history.append(now + 1, totals)
    return history


def paid(kind, since, now, history):
    """A and a root of Σ of one mark, as payments have them."""
    owed = kind.find_debt(tf.constant([since] * kind.size, tf.int64), tf.constant(now, tf.int64), history)

    def rows(values):
        return tuple(tf.constant(v, tf.float64)[:, None] for v in values)

    def flat(moved):
        return np.stack([np.asarray(v)[:, 0] for v in moved])

    unit, nothing = np.eye(kind.size), np.zeros([kind.size, kind.size])
    maps = flat(kind.move(rows(unit), owed.coefficients, tf.zeros([kind.size, kind.size, 1], tf.float64), NO_GRID))
    scaled = tf.constant(unit[:, :, None], tf.float64) * owed.stddev[:, :, None]  # row i draws the i-th unit
    return maps, flat(kind.move(rows(nothing), owed.coefficients, scaled, NO_GRID))


@ALL
@EVERY
@pytest.mark.parametrize("block", [3, pytest.param(256, marks=pytest.mark.slow)])  # 1 and others: below
def test_maps_and_covariances_are_those_of_the_matrix(recursion, strategy, block, monkeypatch):
    monkeypatch.setattr(Maps, "block", block)
    kind, whole = Correlated(recursion, strategy), states(recursion, strategy)
    history = history_of(kind)
    for since in range(NOW + 1):
        maps, root = paid(kind, since, NOW, history)
        np.testing.assert_allclose(maps @ whole[since], np.where(np.arange(NOW) < since, whole[NOW], 0), atol=3e-6)
        owed = whole[NOW][:, since:]
        np.testing.assert_allclose(root @ root.T, owed @ owed.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 256])
def test_what_rows_owe_before_the_last_step_is_kept_too(block, monkeypatch):
    """A step cut short between maps and clock is made again, from the maps of its own step."""
    monkeypatch.setattr(Maps, "block", block)
    kind = Correlated(Recursion(), STRATEGIES[1])
    history = history_of(kind)
    since, now = tf.constant([2], tf.int64), tf.constant(NOW - 1, tf.int64)
    before, _ = kind.find_debt(since, now, history)
    expected, _ = kind.find_debt(since, now, history_of(kind, RATES[:-1]))
    np.testing.assert_array_equal(before, expected)


def test_a_release_that_a_row_owes_after_leaves_the_maps():
    """They were brought forward by a step that keeps nothing: what the row owed was 0."""
    kind = Correlated(Recursion(), STRATEGIES[1])
    history = history_of(kind)
    before = history.table.numpy()
    marks = RowMarks([], {"table": 2}, start=0)
    marks.histories, now = [history], tf.constant(NOW, tf.int64)
    marks.mark(tf.constant([0], tf.int64), now)
    marks.begin_totals(now)
    np.testing.assert_array_equal(history.table, before)


@ALL
def test_without_buffers_it_is_the_closed_forms(recursion):
    kind = Correlated(recursion, STRATEGIES[0])
    known = (WithMomentum if recursion.momentum else WithoutMomentum)(recursion)
    maps, closed, totals = history_of(kind), History(known.columns), tf.zeros([known.columns], tf.float64)
    for step, (rate, stddev) in enumerate(zip(RATES, STDDEVS)):
        totals = known.next_totals(totals, tf.constant(rate, tf.float64), tf.constant(stddev, tf.float64))
        closed.append(tf.constant(step + 1, tf.int64), totals)
    since, now = tf.range(NOW + 1, dtype=tf.int64), tf.constant(NOW, tf.int64)
    _, covariance = maps.entries_between(since, now)
    theirs = known.find_debt(since, now, closed)
    if not recursion.momentum:
        np.testing.assert_allclose(tf.sqrt(covariance[0][0]), theirs.stddev[:, 0], rtol=1e-6, atol=1e-7)
        return
    first, second = tf.unstack(tf.cast(theirs.stddev, tf.float64), axis=1)
    share = tf.cast(theirs.coefficients[2], tf.float64)
    np.testing.assert_allclose(covariance[1][1], first**2, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(covariance[0][1], share * first**2, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(covariance[0][0], second**2 + (share * first) ** 2, rtol=1e-6, atol=1e-7)


def test_factors_of_what_has_no_full_rank():
    rng = np.random.default_rng(0)
    for size, rank in [(1, 0), (2, 1), (3, 1), (4, 2), (5, 5), (4, 0)]:
        root = rng.normal(size=[size, rank]) * np.geomspace(1e-8, 1, size)[:, None]
        covariance = root @ root.T
        pivots, shares = factors([[tf.constant(v, tf.float64) for v in row] for row in covariance])
        upper = np.array([[1.0 if i == j else float(shares[i][j]) * (i < j) for j in range(size)] for i in range(size)])
        scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance))) + 1e-300
        assert np.max(np.abs(upper @ np.diag(np.array(pivots, float)) @ upper.T - covariance) / scale) < 1e-9
        assert np.sum(np.array(pivots, float) > 0) == rank


@EVERY
@pytest.mark.parametrize("name", ["momentum", "nesterov"])
def test_a_weight_moves_by_its_velocity_as_it_was_rounded(name, strategy):
    """As if the noise of the last step had taken the velocity there."""
    recursion, rng = RECURSIONS[name], np.random.default_rng(0)
    kind, grid = Correlated(recursion, strategy), tf.constant(2.0**-6, tf.float64)
    owed = kind.find_debt(tf.constant([0, 3, 6], tf.int64), tf.constant(NOW, tf.int64), history_of(kind))
    rows = tuple(tf.constant(rng.normal(size=[3, 200])) for _ in range(kind.size))
    noise = tf.constant(rng.normal(size=[3, kind.size, 200])) * owed.stddev[:, :, None]
    exact, rounded = (kind.move(rows, owed.coefficients, noise, on) for on in (NO_GRID, grid))
    by_weight, by_velocity, *others = (np.asarray(one - other) for one, other in zip(rounded, exact, strict=True))
    assert 2.0**-8 < np.max(np.abs(by_velocity)) <= 2.0**-7 and not np.any(np.asarray(rounded[1]) % 2.0**-6)
    share = 1 + recursion.momentum * recursion.nesterov
    np.testing.assert_allclose(by_weight, share * by_velocity, atol=1e-12)
    assert not np.any(others)


@pytest.mark.parametrize("rate", [1e-8, 1e4])
def test_no_scale_of_learning_rate_loses_noise(rate):
    """Over hundreds of steps, a schedule that falls by ten thousand, in a history that grew."""
    steps, strategy = 600, STRATEGIES[1]
    rates, stddevs = rate * np.geomspace(1, 1e-4, steps), np.ones(steps)
    kind = Correlated(Recursion(momentum=0.9), strategy)
    history, one = kind.history(kind.columns), tf.constant(1.0, tf.float64)

    @tf.function
    def train():
        for step in tf.range(tf.constant(steps, tf.int64)):
            totals = kind.next_totals(history.look_up(step), tf.constant(rates)[step], one)
            with tf.control_dependencies(history.append(step + 1, totals)):
                tf.no_op()

    train()
    whole = states(Recursion(momentum=0.9), strategy, rates, stddevs)
    for since in (0, 300, steps - 3, steps - 1):
        _, root = paid(kind, since, steps, history)
        root, owed = np.float64(root), whole[steps][:, since:]
        expected = owed @ owed.T
        scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
        np.testing.assert_allclose((root @ root.T) / scale, expected / scale, atol=2e-6)


# The whole optimizer: rows read or not, and what two releases have in common.

ROWS, WIDTH, STEPS, RELEASED = 12, 100_000, 6, 3
UNLIKELY = 5.5


def trained(mechanism, recursion, strategy, sigma=1.0, seed=3):
    """Noise alone: the table as it was released in the middle, and at the end. [2, ROWS, WIDTH]."""
    table, found = keras.Variable(np.zeros([ROWS, WIDTH], "float32"), name="table"), []
    optimizer = mechanism(
        0.5, l2_norm_clip=2.0, noise_multiplier=sigma, expected_batch_size=4.0, noise=Seeded(seed),
        momentum=recursion.momentum, nesterov=recursion.nesterov, weight_decay=recursion.weight_decay,
        correlation=Correlation(strategy, steps=STEPS, separation=3),
    )  # fmt: skip
    build_by_hand(optimizer, [table], [table])
    for step in range(STEPS):
        optimizer.learning_rate = RATES[step]
        read = tf.constant([step, step, 2 * step], tf.int64)
        if optimizer.pays_late:
            optimizer.debts.settle_before_reads({table.path: read})
        clipped = ClippedSum(
            {table.path: tf.IndexedSlices(tf.zeros([3, WIDTH]), read)}, tf.zeros([3]), tf.constant(2.0), tf.zeros([3])
        )
        optimizer.apply(clipped, upcoming={table.path: tf.constant([step + 1, 7, 7, -1, 99], tf.int64)})
        if step + 1 in (RELEASED, STEPS):
            optimizer.settle()
            found.append(np.asarray(table._value, np.float64))
    return np.array(found)


def assert_right(recursion, strategy, found):
    """Variances and covariance of both releases, for every row; and rows independent."""
    whole = states(recursion, strategy, RATES[:STEPS], np.full(STEPS, 2.0 / 4.0))[[RELEASED, STEPS], 0]
    expected = whole @ whole.T
    for row in range(ROWS):
        covariance = found[:, row] @ found[:, row].T / WIDTH
        error = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / WIDTH)
        assert np.all(np.abs(covariance - expected) < UNLIKELY * error)
    for release in found:
        correlations = np.corrcoef(release) - np.eye(ROWS)
        assert np.max(np.abs(correlations)) < UNLIKELY / np.sqrt(WIDTH)


class ForgottenBuffers(DebtsWithBuffers):
    def write_rows(self, table, ids, values):
        return super().write_rows(table, ids, (values[0], *self.optimizer.course.buffers.read(table.path, ids)))


class ForgetsTheBuffers(LazyDPFTRL):
    """Pays weights and leaves buffers as they are."""

    debts_kind = ForgottenBuffers


CASES = [("plain", 1), ("plain", 3), ("nesterov", 1), ("momentum", 2), ("decay", 2)]


@pytest.mark.fast_cases("LazyDPFTRL-momentum-2")
@pytest.mark.parametrize("name, buffers", CASES)
@pytest.mark.parametrize("mechanism", [LazyDPFTRL, DPFTRL])
def test_releases_have_the_matrix_law(mechanism, name, buffers):
    recursion, strategy = RECURSIONS[name], STRATEGIES[buffers]
    assert_right(recursion, strategy, trained(mechanism, recursion, strategy))


@pytest.mark.fast_cases("3% too little", "buffers forgotten")
@pytest.mark.parametrize(
    "wrong",
    [
        lambda r, s: trained(LazyDPFTRL, r, s, sigma=1.03),
        lambda r, s: trained(LazyDPFTRL, r, s, sigma=0.97),
        lambda r, s: trained(LazyDPFTRL, r, STRATEGIES[0]),
        lambda r, s: trained(ForgetsTheBuffers, r, s),
    ],
    ids=["3% too much", "3% too little", "independent", "buffers forgotten"],
)
def test_what_is_wrong_is_found_out(wrong):
    recursion, strategy = RECURSIONS["plain"], STRATEGIES[1]
    with pytest.raises(AssertionError):
        assert_right(recursion, strategy, wrong(recursion, strategy))


def test_a_history_has_room():
    history = Maps(2)
    history.restart(5000)
    assert len(history.table.numpy()) >= 2 * 5000
