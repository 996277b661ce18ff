"""Adagrad and Adam on tables see what plain SGD would have moved a row by, noise included, and nothing else.

The oracle is that: a twin of the mechanism without a rule, of learning rate 1 and the same noise, makes each step from
a table of zeros, so that what it moves by is −u; the rule, in numpy, is fed with u.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp_rec
from tfdp_rec.clipping import ClippedSum
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.optimizers import Adagrad, Adam, Preselection
from tfdp_rec.privacy import BufferedToeplitz, Correlation

ROWS, WIDTH = 40, 3
BASICS = {"l2_norm_clip": 2.0, "noise_multiplier": 0.8, "expected_batch_size": 4.0}
OWN = {
    tfdp_rec.DPSGD: {},
    tfdp_rec.EANA: {},
    tfdp_rec.FEST: {"preselection": Preselection({"table": [0, 3, 5, 30]})},
    tfdp_rec.AdaFEST: {"contribution_clip": 1.0, "contribution_noise_multiplier": 1.0, "threshold": 2.0},
    tfdp_rec.ExponentialSelectionSGD: {"num_survivors": 5, "selection_epsilon": 0.5},
}
RULES = [Adagrad(), Adagrad(rowwise=False, initial=0.3), Adam(beta_2=0.9)]
STEPS = [([1, 3, 3], 0.4), ([3, 5], -0.3), ([7], 0.2), ([1, 3, 39], 0.5)]


class Reads:
    """Who read which rows of the table."""

    def __init__(self, ids):
        self.example, self.ids = tf.range(len(ids), dtype=tf.int64), tf.constant(ids, tf.int64)
        self.shared = tf.zeros([0], tf.int64)


class Run:
    """A mechanism on one table."""

    def __init__(self, kind, rule, start, rate, **options):
        self.table = keras.Variable(start, name="table")
        self.optimizer = kind(rate, **{**BASICS, **OWN[kind], **options}, table_rule=rule, noise=KeyedNoise(3))
        self.optimizer.build([self.table], {self.table.path: None})

    def step(self, ids, value):
        slices = tf.IndexedSlices(tf.fill([len(ids), WIDTH], np.float32(value)), tf.constant(ids, tf.int64))
        one = tf.ones([len(ids)])
        reads = {self.table.path: Reads(ids)}
        self.optimizer.apply(ClippedSum({self.table.path: slices}, one, tf.constant(2.0), one, reads))

    @property
    def weights(self):
        return np.array(self.table._value, np.float64)

    @property
    def state(self):
        return np.array(self.optimizer.tables[self.table.path].state._value, np.float64)


class ByHand:
    """The rules as textbooks have them, for some rows, in float64."""

    def __init__(self, rule):
        self.rule, self.sums, self.means = rule, np.zeros([ROWS, WIDTH]), np.zeros([ROWS, WIDTH])
        self.count = np.zeros(ROWS)

    def direction(self, rows, u):
        if isinstance(self.rule, Adagrad):
            squares = np.mean(u**2, axis=1, keepdims=True) * np.ones(WIDTH) if self.rule.rowwise else u**2
            self.sums[rows] += squares
            return u / (np.sqrt(self.rule.initial + self.sums[rows]) + self.rule.epsilon)
        one, two = self.rule.beta_1, self.rule.beta_2
        self.count[rows] += 1
        self.means[rows] += (1 - one) * (u - self.means[rows])
        self.sums[rows] += (1 - two) * (u**2 - self.sums[rows])
        k = self.count[rows][:, None]
        return self.means[rows] / (1 - one**k) / (np.sqrt(self.sums[rows] / (1 - two**k)) + self.rule.epsilon)


@pytest.mark.fast_cases(
    "Adagrad(rowwise=True, initial=0.0, epsilon=1e-10)-DPSGD",
    "Adagrad(rowwise=True, initial=0.0, epsilon=1e-10)-AdaFEST",
    "Adagrad(rowwise=False, initial=0.3, epsilon=1e-10)-DPSGD",
    "Adagrad(rowwise=False, initial=0.3, epsilon=1e-10)-AdaFEST", "Adam(beta_1=0.9, beta_2=0.9, epsilon=1e-10)-EANA",
    "Adam(beta_1=0.9, beta_2=0.9, epsilon=1e-10)-FEST",
    "Adam(beta_1=0.9, beta_2=0.9, epsilon=1e-10)-ExponentialSelectionSGD",
)  # fmt: skip
@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rule_is_fed_with_what_plain_sgd_moves_by(kind, rule):
    start = np.random.default_rng(0).normal(size=[ROWS, WIDTH]).astype("float32")
    run, expected, by_hand, moved_ever = Run(kind, rule, start, 0.05), start.astype(np.float64), ByHand(rule), set()
    for number, (ids, value) in enumerate(STEPS):
        twin = Run(kind, None, np.zeros([ROWS, WIDTH], "float32"), 1.0)
        twin.optimizer.iterations.assign(number)
        twin.step(ids, value)
        rows = np.flatnonzero(np.any(twin.weights != 0, axis=1))
        gradient = np.bincount(ids, minlength=ROWS)[:, None] * value / BASICS["expected_batch_size"]
        assert np.all(np.abs(-twin.weights - gradient)[rows] > 1e-5)  # each number of each row has noise
        before = run.table._value.numpy(), run.state
        run.step(ids, value)
        expected[rows] -= 0.05 * by_hand.direction(rows, -twin.weights[rows])
        np.testing.assert_allclose(run.weights, expected, rtol=1e-4, atol=1e-5)
        still = np.setdiff1d(np.arange(ROWS), rows)
        assert np.array_equal(run.table._value.numpy()[still], before[0][still])
        assert np.array_equal(run.state[still], before[1][still])
        moved_ever |= set(rows.tolist())
    assert moved_ever and (len(moved_ever) < ROWS) == (kind is not tfdp_rec.DPSGD)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_learning_rate_of_nought_still_learns_the_state(rule):
    run = Run(tfdp_rec.EANA, rule, np.zeros([ROWS, WIDTH], "float32"), 0.0)
    run.step([1, 2], 0.5)
    assert np.all(run.weights == 0) and np.count_nonzero(np.any(run.state != 0, axis=1)) == 2


def test_gradients_of_nothing_leave_finite_weights():
    for rule in RULES:
        run = Run(tfdp_rec.DPSGD, rule, np.ones([ROWS, WIDTH], "float32"), 0.1, noise_multiplier=0.0)
        run.step([1], 0.0)
        np.testing.assert_array_equal(run.weights, 1.0)


class Both(Run):
    """A mechanism on a table and a dense variable."""

    def __init__(self, kind, rate, table, dense, **options):
        self.table, self.dense = keras.Variable(table, name="table"), keras.Variable(dense, name="dense")
        self.optimizer = kind(rate, **BASICS, **OWN[kind], noise=KeyedNoise(3), **options)
        self.optimizer.build([self.table, self.dense], {self.table.path: None})

    def step(self, ids, value):
        slices = tf.IndexedSlices(tf.fill([len(ids), WIDTH], np.float32(value)), tf.constant(ids, tf.int64))
        one, found = tf.ones([len(ids)]), {self.table.path: slices, self.dense.path: tf.fill([2], np.float32(value))}
        self.optimizer.apply(ClippedSum(found, one, tf.constant(2.0), one, {self.table.path: Reads(ids)}))

    def moved_from(self, table, dense):
        return self.weights - table, np.array(self.dense._value, np.float64) - dense


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_one_line_gives_adagrad_to_the_tables_and_any_optimizer_to_the_rest(kind):
    table, dense = np.zeros([ROWS, WIDTH], "float32"), np.zeros(2, "float32")
    both = Both(kind, 0.05, table, dense, table_rule=Adagrad(), dense_optimizer=keras.optimizers.Adam(0.01))
    adagrad, adam, alone = ByHand(Adagrad()), keras.optimizers.Adam(0.01), keras.Variable(dense)
    expected = table.astype(np.float64)
    for number, (ids, value) in enumerate(STEPS):
        twin = Both(kind, 1.0, table, dense)
        twin.optimizer.iterations.assign(number)
        for run in (twin, both):
            run.step(ids, value)
        by_table, by_dense = twin.moved_from(table, dense)
        rows = np.flatnonzero(np.any(by_table != 0, axis=1))
        expected[rows] -= 0.05 * adagrad.direction(rows, -by_table[rows])
        adam.apply([tf.constant(-by_dense, tf.float32)], [alone])
    np.testing.assert_allclose(both.weights, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(both.dense.numpy(), alone.numpy(), rtol=1e-4, atol=1e-7)
    assert np.any(both.weights) and np.any(both.dense.numpy())


PLAN = {"correlation": Correlation(BufferedToeplitz([0.3], [0.9]), steps=5, separation=5)}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (tfdp_rec.LazyDPSGD, {"table_rule": Adagrad()}, "not linear.*Use DPSGD, or AdaFEST.*dense_optimizer="),
        (tfdp_rec.DPFTRL, {"table_rule": Adam(), **PLAN}, "takes back.*Use DPSGD"),
        (tfdp_rec.LazyDPFTRL, {"table_rule": Adagrad(), **PLAN}, "takes back"),
        (tfdp_rec.DPSGD, {"table_rule": keras.optimizers.Adagrad()}, "dense_optimizer takes any"),
        (tfdp_rec.DPSGD, {"table_rule": "adam"}, "must be one of"),
        (tfdp_rec.DPSGD, {"table_rule": Adam(), "momentum": 0.9}, "no momentum"),
        (tfdp_rec.EANA, {"table_rule": Adagrad(), "weight_decay": 0.1}, "no weight_decay"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(kind, options, words):
    with pytest.raises(ValueError, match=words) as refusal:
        kind(0.1, **BASICS, **options)
    assert len(str(refusal.value)) < 500 and str(refusal.value).endswith(".")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Adagrad(initial=-1.0),
        lambda: Adagrad(epsilon=0.0),
        lambda: Adam(beta_1=1.0),
        lambda: Adam(beta_2=-0.1),
        lambda: Adam(epsilon=0.0),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="must"):
        make()


def test_parameter_servers_refuse_rules():
    from tfdp_rec.distribute.parameter_server import refuse_unserved

    with pytest.raises(NotPrivate, match="table_rule.*parameter servers"):
        refuse_unserved(tfdp_rec.EANA(0.1, **BASICS, table_rule=Adagrad()))


def test_a_file_of_before_loads_without_row_scales_and_is_refused_with_them():
    config = tfdp_rec.DPSGD(0.1, **BASICS).get_config()
    assert tfdp_rec.DPSGD.from_config({**config, "row_scale": None}).get_config() == config
    with pytest.raises(ValueError, match="row_scale: it brought no gain and was removed.*compile=False.$"):
        tfdp_rec.DPSGD.from_config({**config, "row_scale": ["bag"]})
