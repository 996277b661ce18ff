"""Aggregated noise has the distribution of the noise it stands for: variances, covariances, shape, independence.

Checked against closed forms worked out here by summing over steps, against simulation of the steps themselves, and by
running the whole optimizer. The checks are shown to have teeth: each rejects a scale wrong by 3%, noise that two rows
share, and a last step that was forgotten.
"""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Seeded, build_by_hand, operations, release_by_hand
from scipy import stats

from tfdp_rec.clipping import ClippedSum
from tfdp_rec.core.mechanism.pending import (
    Debt,
    History,
    Replayed,
    RowMarks,
    WithMomentum,
    WithoutMomentum,
    choose_pending,
    step_on,
)
from tfdp_rec.core.mechanism.row_debts import RowDebts
from tfdp_rec.core.mechanism.rules import Recursion
from tfdp_rec.noise import KeyedNoise, NoiseSource
from tfdp_rec.optimizers import LazyDPSGD

DRAWS = 10**6
NO_GRID = None
UNLIKELY = 5.5  # standard errors: a false alarm once in 10^7
RATES = np.array([0.5, 0.4, 0.4, 0.1, 0.9, 0.3, 0.3])
STDDEVS = np.array([1.0, 1.0, 0.5, 0.5, 1.0, 1.5, 0.6])


def effects(recursion, since, now, rates=RATES, stddevs=STDDEVS):
    """How a unit of noise at each owed step moves (weight, velocity) at `now`, and how they move by themselves.

    By running the recursion on numbers: [steps, 2], and the 2x2 map of (weight, velocity).
    """

    def run(start, weight, velocity, kick):
        for step in range(start, now):
            move = tf.constant(-rates[step] * kick if step == start else 0.0, tf.float64)
            state = tuple(tf.constant(v, tf.float64) for v in (weight, velocity)[: 1 + recursion.has_velocity])
            weight, velocity, *_ = *map(float, recursion.step(state, move, float(rates[step]))), 0.0
        return weight, velocity

    noise = [np.array(run(step, 0.0, 0.0, 1.0)) * stddevs[step] for step in range(since, now)]
    return np.reshape(noise, [-1, 2]), np.array([run(since, 1.0, 0.0, 0.0), run(since, 0.0, 1.0, 0.0)]).T


def history_of(kind, forgotten=0):
    """The totals of all steps; the last ones left out, if asked."""
    history, totals = History(kind.columns), tf.zeros([kind.columns], tf.float64)
    for step, (rate, stddev) in enumerate(zip(RATES, STDDEVS)):
        stddev = 0.0 if step >= len(RATES) - forgotten else stddev
        totals = kind.next_totals(totals, tf.constant(rate, tf.float64), tf.constant(stddev, tf.float64))
        history.append(tf.constant(step + 1, tf.int64), totals)
    return history


def pay(kind, since, draws, scale=1.0, shared=False, forgotten=0, start=(0.0, 0.0), seed=0, for_all_rows=False):
    """Weights and velocities [rows, draws] of some rows, paid at the end, from `start`."""
    generator = np.random.default_rng(seed)

    def unit(count):
        drawn = generator.standard_normal((1 if shared else len(since), count, draws)).astype("float32")
        return tf.constant(scale * np.broadcast_to(drawn, (len(since), count, draws)), tf.float64)

    weight, velocity = (tf.fill([len(since), draws], np.float32(v)) for v in start)
    rows = (weight, velocity) if kind.recursion.has_velocity else (weight,)
    ids, now = tf.range(len(since), dtype=tf.int64), tf.constant(len(RATES), tf.int64)
    since, history = tf.constant(since, tf.int64), history_of(kind, forgotten)
    by_mark = kind.find_debt_by_mark(now, history) if for_all_rows else None

    class Source(NoiseSource):
        def draw(self, requests, step):
            return [request.answer(unit(request.draws)) for request in requests]

    ((weight, *velocity),) = kind.settle_rows([Debt(0, ids, rows)], since, now, history, Source(), NO_GRID, by_mark)
    velocity = velocity[0] if velocity else tf.zeros_like(weight)
    return np.asarray(weight, np.float64), np.asarray(velocity, np.float64)


@pytest.mark.parametrize("recursion", [Recursion(), Recursion(weight_decay=0.3), Recursion(momentum=0.8)])
@pytest.mark.parametrize("aggregate", [True, False])
def test_a_row_pays_the_same_alone_and_with_all_others(recursion, aggregate):
    since, kind = [0, 7, 3, 3, 6], choose_pending(recursion, aggregate)
    alone, among_all = (pay(kind, since, 4, start=(0.5, 0.25), for_all_rows=way) for way in (False, True))
    for one, other in zip(alone, among_all):
        np.testing.assert_array_equal(one, other)


def assert_right(recursion, since, weights, velocities):
    """Means, 2x2 covariances, normality and independence of rows, each within sampling error."""
    draws = weights.shape[1]
    for row, at in enumerate(since):
        noise, _ = effects(recursion, at, len(RATES))
        covariance = noise.T @ noise
        for found, expected in ((weights[row], covariance[0, 0]), (velocities[row], covariance[1, 1])):
            if expected == 0:
                assert np.all(found == 0)
                continue
            assert abs(np.mean(found)) < UNLIKELY * np.sqrt(expected / draws)
            assert abs(np.mean(found**2) / expected - 1) < UNLIKELY * np.sqrt(2 / draws)
            assert stats.kstest(found[: 10**5] / np.sqrt(expected), "norm").pvalue > 1e-7
        both = weights[row] * velocities[row]
        error = np.sqrt((covariance[0, 0] * covariance[1, 1] + covariance[0, 1] ** 2) / draws)
        assert abs(np.mean(both) - covariance[0, 1]) <= UNLIKELY * error
    for one in range(len(since)):
        for other in range(one):
            assert_independent(weights[one], weights[other])


def assert_independent(one, other):
    scale = np.std(one) * np.std(other)
    if scale:
        assert abs(np.mean(one * other)) < UNLIKELY * scale / np.sqrt(len(one))


RECURSIONS = {
    "plain": Recursion(),
    "decay": Recursion(weight_decay=0.6),
    "momentum": Recursion(momentum=0.9),
    "nesterov": Recursion(momentum=0.7, nesterov=True),
    "little momentum": Recursion(momentum=0.01),
}
ALL = pytest.mark.parametrize("recursion", RECURSIONS.values(), ids=RECURSIONS)
SINCE = [0, 3, 6, 7]  # never settled, settled in the middle, one step ago, just now


@pytest.mark.fast_cases("plain", "nesterov")
@ALL
def test_a_million_draws(recursion):
    assert_right(recursion, SINCE, *pay(choose_pending(recursion, True), SINCE, DRAWS // 4))
    assert_right(recursion, [2], *pay(choose_pending(recursion, True), [2], DRAWS))


@ALL
@pytest.mark.parametrize("wrong", [{"scale": 1.03}, {"scale": 0.97}, {"shared": True}, {"forgotten": 1}])
def test_wrong_noise_is_rejected(recursion, wrong):
    with pytest.raises(AssertionError):
        assert_right(recursion, SINCE, *pay(choose_pending(recursion, True), SINCE, DRAWS // 10, **wrong))


@ALL
def test_simulated_steps_are_distributed_alike(recursion):
    """The steps themselves, one by one, pass the same checks and agree by a two-sample test."""
    replayed = pay(Replayed(recursion), [2], 50_000)
    assert_right(recursion, [2], *replayed)
    weights, velocities = pay(choose_pending(recursion, True), [2], 50_000, seed=1)
    assert stats.ks_2samp(replayed[0][0], weights[0]).pvalue > 1e-6
    if recursion.has_velocity:
        assert stats.ks_2samp(replayed[1][0], velocities[0]).pvalue > 1e-6


@ALL
def test_what_a_row_does_without_noise(recursion):
    """Decay and momentum carry on exactly."""
    weights, velocities = pay(choose_pending(recursion, True), SINCE, 1, scale=0.0, start=(1.5, -0.25))
    for row, since in enumerate(SINCE):
        _, moves = effects(recursion, since, len(RATES))
        expected = moves @ [1.5, -0.25 if recursion.has_velocity else 0.0]
        assert weights[row, 0] == pytest.approx(expected[0], rel=2e-6)
        if recursion.has_velocity:
            assert velocities[row, 0] == pytest.approx(expected[1], rel=2e-6)


@pytest.mark.parametrize("name", ["momentum", "nesterov", "little momentum"])
def test_a_weight_moves_by_its_velocity_as_it_was_rounded(name):
    """By the unrounded one it would show the bits that the rounding takes: of one Gaussian there are two roundings."""
    recursion, grid, rng = RECURSIONS[name], tf.constant(2.0**-6, tf.float64), np.random.default_rng(0)
    kind, since = WithMomentum(recursion), [0, 3, 6]  # at the end one owed step, which is the last
    rows = tuple(tf.constant(rng.normal(size=[3, 200])) for _ in range(2))
    owed = kind.find_debt(tf.constant(since, tf.int64), tf.constant(len(RATES), tf.int64), history_of(kind))
    noise = tf.constant(rng.normal(size=[3, 2, 200])) * owed.stddev[:, :, None]
    exact, rounded = (kind.move(rows, owed.coefficients, noise, on) for on in (NO_GRID, grid))
    by_weight, by_velocity = (np.asarray(one - other) for one, other in zip(rounded, exact, strict=True))
    assert 2.0**-8 < np.max(np.abs(by_velocity)) <= 2.0**-7 and not np.any(np.asarray(rounded[1]) % 2.0**-6)
    for row, at in enumerate(since):
        effect, _ = effects(recursion, at, len(RATES))
        share = effect[:, 0] @ effect[:, 1] / (effect[:, 1] @ effect[:, 1])
        np.testing.assert_allclose(by_weight[row], share * by_velocity[row], atol=1e-12)
    weight, velocity = step_on(grid, recursion, rows, noise[:, 0], 0.5)  # that is made at once
    moved = np.asarray(velocity - recursion.momentum * rows[1])
    expected = recursion.momentum * velocity + moved if recursion.nesterov else velocity
    np.testing.assert_allclose(weight - rows[0], expected, atol=1e-12)
    assert not np.any(np.asarray(velocity) % 2.0**-6)


def test_constant_rates_give_the_geometric_sums():
    """The closed forms of momentum SGD with constant learning rate, k steps owed."""
    mu, eta, s, k = 0.9, 0.3, 0.7, 12
    kind = WithMomentum(Recursion(momentum=mu))
    history, totals = History(3), tf.zeros([3], tf.float64)
    for step in range(k + 5):
        totals = kind.next_totals(totals, tf.constant(eta, tf.float64), tf.constant(s, tf.float64))
        history.append(tf.constant(step + 1, tf.int64), totals)
    rows = (tf.zeros([2, 1], tf.float64), tf.zeros([2, 1], tf.float64))
    owed = kind.find_debt(tf.constant([5, 5], tf.int64), tf.constant(k + 5, tf.int64), history)
    units = tf.reshape(tf.eye(2, dtype=tf.float64), [2, 2, 1])  # row 0 draws (1, 0), row 1 draws (0, 1)
    weight, velocity = kind.move(rows, owed.coefficients, units * owed.stddev[:, :, None], NO_GRID)
    factor = np.concatenate([np.asarray(velocity), np.asarray(weight)], axis=1)
    m = np.arange(1, k + 1)
    expected = (eta * s) ** 2 * np.array(
        [
            [np.sum(mu ** (2 * (m - 1))), np.sum(mu ** (m - 1) * (1 - mu**m)) / (1 - mu)],
            [np.sum(mu ** (m - 1) * (1 - mu**m)) / (1 - mu), np.sum((1 - mu**m) ** 2) / (1 - mu) ** 2],
        ]
    )
    np.testing.assert_allclose(factor.T @ factor, expected, rtol=1e-5)


def test_history_grows_and_stays_exact():
    kind = WithoutMomentum(Recursion())
    history, totals = History(2), tf.zeros([2], tf.float64)

    @tf.function
    def steps(first, totals):
        for step in tf.range(first, first + 1000):
            totals = kind.next_totals(totals, tf.constant(0.5, tf.float64), tf.constant(2.0, tf.float64))
            with tf.control_dependencies(history.append(step + 1, totals)):
                totals = tf.identity(totals)
        return totals

    for first in (0, 1000, 2000):
        totals = steps(tf.constant(first, tf.int64), totals)
    assert history.table.numpy().shape == (4096, 2)
    since = tf.constant([0, 1, 2999], tf.int64)
    owed = kind.find_debt(since, tf.constant(3000, tf.int64), history).stddev[:, 0]
    np.testing.assert_allclose(np.square(owed), [3000, 2999, 1], rtol=1e-6)


def test_a_learning_rate_that_falls_by_ten_thousand_is_still_paid_in_full():
    kind = WithoutMomentum(Recursion())
    history, totals = History(2), tf.zeros([2], tf.float64)
    for step in range(400):
        rate = 1.0 if step < 200 else 1e-4
        totals = kind.next_totals(totals, tf.constant(rate, tf.float64), tf.constant(1.0, tf.float64))
        history.append(tf.constant(step + 1, tf.int64), totals)
    owed = kind.find_debt(tf.constant([200, 399], tf.int64), tf.constant(400, tf.int64), history).stddev[:, 0]
    np.testing.assert_allclose(owed, [1e-4 * np.sqrt(200), 1e-4], rtol=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_after_a_release_no_noise_is_lost_in_the_totals_of_earlier_steps(momentum):
    """At 10⁻⁹ of the earlier rate, rows that no step touched were released unchanged beside those that moved."""
    table = keras.Variable(np.zeros([40, 100], "float32"), name="table")
    optimizer = LazyDPSGD(
        1.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=1.0, noise=Seeded(3), momentum=momentum
    )
    build_by_hand(optimizer, [table], [table])
    low = 1e-5 if momentum else 1e-9  # momentum refuses less
    for rate in (1.0, low):
        optimizer.learning_rate = rate
        table.assign(np.zeros([40, 100]))  # where float32 has room for what is small
        if momentum:
            optimizer.tables[table.path].state.assign(np.zeros([40, 100]))
        for _ in range(3):
            slices = tf.IndexedSlices(tf.zeros([1, 100]), tf.constant([0], tf.int64))
            if optimizer.pays_late:
                optimizer.debts.settle_before_reads({table.path: slices.indices})
            optimizer.apply(ClippedSum({table.path: slices}, tf.zeros([1]), tf.constant(1.0), tf.zeros([1])))
        release_by_hand(optimizer)
    noise, _ = effects(Recursion(momentum=momentum), 0, 3, [low] * 3, [1.0] * 3)
    expected = np.sum(noise[:, 0] ** 2)
    found = np.mean(np.asarray(table._value, np.float64)[1:] ** 2)
    assert abs(found / expected - 1) < UNLIKELY * np.sqrt(2 / 3900)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 0), (3, 0, 3)])
@pytest.mark.parametrize("recursion", [Recursion(), Recursion(momentum=0.9), Recursion(weight_decay=0.3)])
def test_rows_of_several_tables_owe_what_each_owes_alone(recursion, sizes):
    """The debts of all tables are found together, in one draw. The source is a function of table and row."""
    kind, noise, now = choose_pending(recursion, True), KeyedNoise(3), tf.constant(len(RATES), tf.int64)
    history, rng, debts, marks = history_of(kind), np.random.default_rng(0), [], []
    for number, size in enumerate(sizes):
        state = tuple(tf.constant(rng.normal(size=[size, 4]), tf.float32) for _ in range(1 + recursion.has_velocity))
        debts.append(Debt(number, tf.range(size, dtype=tf.int64), state))
        marks.append(tf.constant(rng.integers(0, len(RATES), size) * (1 - number % 2)))
    settled = kind.settle_rows(debts, tf.concat(marks, axis=0), now, history, noise, NO_GRID)
    for debt, since, together in zip(debts, marks, settled, strict=True):
        (alone,) = kind.settle_rows([debt], since, now, history, noise, NO_GRID)
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one, other)


def test_totals_stay_while_a_row_owes():
    history = History(2)
    marks = RowMarks([history], {"table": 3}, start=0)
    marks.tick(tf.constant(1, tf.int64), [tf.constant([0.5, 4.0], tf.float64)], tf.constant(-0.5, tf.float64))
    for row in range(3):
        marks.begin_totals(marks.now())
        assert history.look_up(1).numpy().tolist() == [0.5, 4.0] and float(marks.largest) == 0.5
        marks.mark(tf.constant([row], tf.int64), tf.constant(1, tf.int64))
    marks.begin_totals(marks.now())
    assert history.look_up(1).numpy().tolist() == [0.0, 0.0] and float(marks.largest) == 0.0


def test_marks_of_several_tables_are_those_of_each():
    """All are in one variable; some tables have no ids, first, in between and last."""
    sizes = {"a": 3, "b": 2, "c": 4, "d": 2}
    marks, expected = RowMarks([], sizes, start=0), {path: np.zeros(size) for path, size in sizes.items()}
    rng = np.random.default_rng(0)
    for now in range(1, 20):
        paths = rng.permutation(list(sizes))[: rng.integers(0, 5)]
        rows = {path: rng.permutation(sizes[path])[: rng.integers(0, sizes[path] + 1)] for path in paths}
        places = marks.find_places({path: tf.constant(own, tf.int64) for path, own in rows.items()})
        owing = marks.owe_noise(places, tf.constant(now // 2, tf.int64)).numpy()
        assert owing.tolist() == [expected[path][row] < now // 2 for path, own in rows.items() for row in own]
        marks.mark(places, tf.constant(now, tf.int64))
        for path, own in rows.items():
            expected[path][own] = now
        for path, size in sizes.items():
            places = marks.find_places({path: tf.range(size, dtype=tf.int64)})
            np.testing.assert_array_equal(marks.read_marks(places), expected[path])


# The whole optimizer: every row of a table, whichever way it came to be settled.


def test_a_mark_waits_for_the_noise_that_it_tells_of():
    """In a graph nothing else orders two variables' writes: cut short in between, a row would lose its noise."""
    table = keras.Variable(np.zeros([6, 2], "float32"), name="table")
    optimizer = LazyDPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=1.0)
    build_by_hand(optimizer, [table], [table])
    graph = tf.function(optimizer.debts.settle_all, autograph=False).get_concrete_function().graph
    writes = [each for each in operations(graph) if each.type == "ResourceScatterUpdate"]
    marks = [each for each in writes if each.get_attr("dtype") == tf.int64]
    assert marks and len(marks) < len(writes)
    for mark in marks:
        before = waited_for(mark)
        assert any(each in before and each.get_attr("dtype") == tf.float32 for each in writes)


def waited_for(operation):
    before, ahead = set(), [operation]
    while ahead:
        operation = ahead.pop()
        new = {*operation.control_inputs, *(each.op for each in operation.inputs)} - before
        before |= new
        ahead += new
    return before


def test_rows_wait_for_the_bound_that_their_step_raises():
    """A step that is cut short in between would leave weights beyond what others know of."""
    tables = [keras.Variable(np.zeros([6, 2], "float32"), name=f"table_{number}") for number in range(3)]
    optimizer = LazyDPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=1.0)
    build_by_hand(optimizer, tables, tables)

    def step():
        gradients = {table.path: tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1], tf.int64)) for table in tables}
        optimizer.apply(ClippedSum(gradients, tf.zeros([3]), tf.constant(1.0), tf.zeros([3])))

    graph = tf.function(step, autograph=False).get_concrete_function().graph
    sizes = {id(size.handle) for size in optimizer.debts.bound.sizes}
    raising = [each for each in graph.get_operations() if each.type == "If"]
    raising = [each for each in raising if sizes <= {id(captured_by(graph, given)) for given in each.inputs}]
    rows = [each for each in graph.get_operations() if each.type == "ResourceScatterUpdate"]
    rows = [each for each in rows if each.get_attr("dtype") == tf.float32]
    assert raising and len(rows) == 3 and all(set(raising) & waited_for(each) for each in rows)


def captured_by(graph, tensor):
    return next((outer for outer, inner in graph.captures if inner is tensor), None)


ROWS, WIDTH, STEPS = 25, 40_000, 6


def trained(recursion, noise, mechanism=LazyDPSGD, sigma=1.0):
    """Noise alone, over steps that read some rows, announce some and settle now and then. [ROWS, WIDTH]."""
    table = keras.Variable(np.zeros([ROWS, WIDTH], "float32"), name="table")
    optimizer = mechanism(
        0.5, l2_norm_clip=2.0, noise_multiplier=sigma, expected_batch_size=4.0, noise=noise,
        momentum=recursion.momentum, nesterov=recursion.nesterov,
        weight_decay=recursion.weight_decay,
    )  # fmt: skip
    build_by_hand(optimizer, [table], [table])
    for step in range(STEPS):
        optimizer.learning_rate = RATES[step]
        read = tf.constant([step, step, 2 * step], tf.int64)
        optimizer.debts.settle_before_reads({table.path: read})
        slices = tf.IndexedSlices(tf.zeros([3, WIDTH]), read)
        clipped = ClippedSum({table.path: slices}, tf.zeros([3]), tf.constant(2.0), tf.zeros([3]))
        optimizer.apply(clipped, upcoming={table.path: tf.constant([step + 1, 20, 20, -1, 99], tf.int64)})
        if step == 3:
            optimizer.settle()
    optimizer.settle()
    return np.asarray(table._value, np.float64)


def assert_every_row_right(recursion, values):
    noise, _ = effects(recursion, 0, STEPS, stddevs=np.full(len(STDDEVS), 2.0 / 4.0))  # s = σ C / B
    expected = np.sum(noise[:, 0] ** 2)
    for row in values:
        assert abs(np.mean(row**2) / expected - 1) < UNLIKELY * np.sqrt(2 / WIDTH)
    assert stats.kstest(values[:, :4000].ravel() / np.sqrt(expected), "norm").pvalue > 1e-7
    correlations = np.corrcoef(values) - np.eye(len(values))
    assert np.max(np.abs(correlations)) < UNLIKELY / np.sqrt(WIDTH)


class OneDrawForAllRows(Seeded):
    def unit(self, request):
        one = super().unit(dataclasses.replace(request, rows=request.rows[:1]))
        return tf.repeat(one, tf.size(request.rows), axis=0)


class LastStepForgotten(RowDebts):
    def settle_all(self):
        for table in self.tables.values():
            self.settle_rows({table.path: tf.range(table.rows, dtype=tf.int64)}, self.marks.now() - 1)


class ForgetsTheLastStep(LazyDPSGD):
    debts_kind = LastStepForgotten


class MarkedBeforePaid(RowDebts):
    def settle_rows(self, rows, now, by_mark=None):
        self.marks.mark(self.marks.find_places(rows), now)
        super().settle_rows(rows, now, by_mark)


class MarksBeforePaying(LazyDPSGD):
    debts_kind = MarkedBeforePaid


@pytest.mark.slow_cases("momentum", "little momentum")
@ALL
def test_every_row_of_a_trained_table(recursion):
    assert_every_row_right(recursion, trained(recursion, Seeded(2)))


@pytest.mark.slow_cases("plain-3% too much", "plain-one draw for all rows")
@pytest.mark.parametrize(
    "broken",
    [
        lambda r: trained(r, Seeded(2), sigma=1.03),
        lambda r: trained(r, Seeded(2), sigma=0.97),
        lambda r: trained(r, OneDrawForAllRows(2)),
        lambda r: trained(r, Seeded(2), mechanism=ForgetsTheLastStep),
        lambda r: trained(r, Seeded(2), mechanism=MarksBeforePaying),
    ],
    ids=["3% too much", "3% too little", "one draw for all rows", "last step forgotten", "marked before paid"],
)
@pytest.mark.parametrize(
    "recursion",
    [RECURSIONS["plain"], pytest.param(RECURSIONS["momentum"], marks=pytest.mark.slow)],
    ids=["plain", "momentum"],
)
def test_broken_optimizers_are_found_out(recursion, broken):
    with pytest.raises(AssertionError):
        assert_every_row_right(recursion, broken(recursion))
