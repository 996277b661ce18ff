"""Where data and noise meet: what is released is on a public grid, and its last bits are those of the noise."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import build_by_hand, release_by_hand
from scipy import stats

import tfdp_rec
from tfdp_rec.clipping import ClippedSum
from tfdp_rec.core.mechanism.base import Step
from tfdp_rec.core.mechanism.noise import gaussian as module
from tfdp_rec.core.mechanism.noise.meeting import add_on_grid, grid_of, on_grid, within
from tfdp_rec.core.mechanism.weight_bound import WeightBound
from tfdp_rec.noise import EntropyNoise, KeyedNoise, Request, SecureNoise
from tfdp_rec.privacy import optimised_correlation
from tfdp_rec.sparse.preselection import Preselection

SOURCES = {"entropy": EntropyNoise, "entropy, not compiled": lambda: EntropyNoise(jit_compile=False),
           "secure": SecureNoise, "keyed": lambda: KeyedNoise(11)}  # fmt: skip
STEP = tf.constant(5, tf.int64)


@pytest.mark.parametrize("stddev", [1.0, 0.3, 7.0, 1e-9, 1e-30, 2.0**-100])
def test_a_step_of_the_grid_is_a_power_of_two_below_the_noise(stddev):
    grid = float(grid_of(tf.constant(stddev)))
    mantissa, exponent = np.frexp(grid)
    assert mantissa == 0.5 and np.float32(stddev) / 2**21 < grid <= np.float32(stddev) / 2**20
    assert float(grid_of(tf.constant(-stddev, tf.float64))) == float(grid_of(tf.constant(stddev, tf.float64)))


def test_without_noise_there_is_no_grid():
    assert float(grid_of(0.0)) == 0.0
    values = tf.constant([0.1, -1e-30], tf.float64)
    np.testing.assert_array_equal(on_grid(values, grid_of(0.0)), np.float32(values))


def test_sums_are_rounded_to_the_nearest_step_once():
    grid, x = tf.constant(2.0**-10, tf.float64), tf.constant([1.0, 1e-3, -5.0], tf.float32)
    noise = tf.constant([2.0**-11 * 1.001, 0.0, 2.0**-12], tf.float64)
    assert add_on_grid(noise, [x], grid).numpy().tolist() == [1 + 2.0**-10, 2.0**-10, -5.0]


def test_float32_noise_is_refused():
    with pytest.raises(TypeError, match="must give float64, got float32"):
        add_on_grid(tf.zeros([1]), [tf.zeros([1])], grid_of(1.0))
    with pytest.raises(TypeError, match="must give float64"):
        asked(1, 2).answer(tf.zeros([2]))


def asked(rows, width, scale=0.3, fill=0.1):
    x = tf.fill([rows, width], np.float32(fill))
    return Request(0, tf.range(rows, dtype=tf.int64), width, tf.constant(scale), (x,), grid_of(tf.constant(scale)))


@pytest.mark.slow_cases("False-entropy, not compiled", "True-entropy")
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("by_row", [False, True])
def test_the_last_bits_are_those_of_the_noise(name, by_row):
    """Float32 noise has no such bits where it cancels its data, and those of the data come to light."""
    source, request = SOURCES[name](), asked(4000, 25)
    if by_row:
        scale = tf.fill([4000, 1], request.scale)
        request = Request(0, request.rows, 25, scale, request.onto, request.grid)
    (found,) = source.noisy([request], STEP)
    assert found.dtype == tf.float32 and found.shape == (4000, 25)
    steps = np.asarray(found, np.float64).ravel() / float(request.grid)
    assert (steps == np.round(steps)).all()
    near = steps[np.abs(found.numpy().ravel()) < 0.05]  # noise and data cancel there but for a sixth
    assert len(near) > 10_000 and stats.chisquare(np.bincount(near.astype(int) % 16, minlength=16)).pvalue > 1e-7
    noise = (np.asarray(found, np.float64) - 0.1).ravel() / 0.3
    assert stats.kstest(noise, "norm").pvalue > 1e-7
    assert stats.kstest(1.06 * noise, "norm").pvalue < 1e-7


@pytest.mark.parametrize("name", ["entropy", "secure"])
def test_gaussians_are_finer_than_any_grid_that_they_come_to(name):
    drawn = SOURCES[name]().normal(0, tf.range(1000, dtype=tf.int64), STEP, 50).numpy().ravel()
    assert stats.kstest((drawn * 2.0**36) % 1.0, "uniform").pvalue > 1e-7  # float32 has nothing behind 2⁻²⁴
    assert len(np.unique(drawn)) == len(drawn)


def test_the_fused_loop_is_the_arithmetic_step_by_step():
    key, pairs = tf.random.Generator.from_seed(1).uniform_full_int([3], dtype=tf.uint64), tf.constant(2**14)
    x, scale, grid = tf.random.normal([2**15]), tf.constant(0.7, tf.float64), grid_of(tf.constant(0.7))
    unit = tf.reshape(tf.bitcast(module._sample(pairs, key), tf.float64), [-1])
    words = module._join_words(key, scale, grid)
    fused = tf.reshape(tf.bitcast(module._COMPILED_NOISY(pairs, words, [x]), tf.float32), [-1])
    apart = np.abs(fused - add_on_grid(scale * unit, [x], grid)) / float(grid)
    assert np.mean(apart > 0) < 1e-4 and apart.max() <= 1  # a tie that a last bit of a sine decides
    move, bound = tf.random.normal([2**15]), tf.constant(1.0)
    fused = module._COMPILED_NOISY(pairs, module._join_words(key, scale, grid, bound), [x, move])
    bounded = add_on_grid(scale * unit, [x, within(x, move, bound)], grid)
    apart = np.abs(tf.reshape(tf.bitcast(fused, tf.float32), [-1]) - bounded) / float(grid)
    assert np.mean(apart > 0) < 1e-4 and apart.max() <= 1 and np.mean(within(x, move, bound) != move) > 0.1
    rows = tf.fill([2**10], np.float32(0.7))
    halves = tf.split(tf.reshape(x, [2**10, 32]), [2**9, 2**9])
    by_row = module._COMPILED_ROWS(32, rows, module._join_words(key, grid), [halves])
    apart = np.abs(tf.reshape(by_row, [-1]) - add_on_grid(np.float64(np.float32(0.7)) * unit, [x], grid)) / float(grid)
    assert np.mean(apart > 0) < 1e-4 and apart.max() <= 1


# The mechanisms.

ROWS, WIDTH = 40, 8
BASICS = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4.0}
PLAN = optimised_correlation(10, 10)
KINDS = {
    "DPSGD": (tfdp_rec.DPSGD, {}),
    "LazyDPSGD": (tfdp_rec.LazyDPSGD, {}),
    "LazyDPSGD, momentum": (tfdp_rec.LazyDPSGD, {"momentum": 0.9}),
    "LazyDPSGD, decay": (tfdp_rec.LazyDPSGD, {"weight_decay": 0.1}),
    "LazyDPSGD, replayed": (tfdp_rec.LazyDPSGD, {"aggregate_noise": False}),
    "LazyDPFTRL": (tfdp_rec.LazyDPFTRL, {"correlation": PLAN}),
    "DPFTRL": (tfdp_rec.DPFTRL, {"correlation": PLAN}),
    "FEST": (tfdp_rec.FEST, {"preselection": Preselection({"table": range(ROWS)})}),
    "EANA": (tfdp_rec.EANA, {}),
}


@pytest.mark.fast_cases(
    "DPSGD-True", "LazyDPSGD-False", "LazyDPSGD, momentum-True", "LazyDPSGD, decay-False",
    "LazyDPSGD, replayed-False", "LazyDPFTRL-True", "DPFTRL-False", "FEST-False", "EANA-False",
)  # fmt: skip
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_released_weights_stand_on_a_grid_that_no_data_decide(kind, secure):
    """What a row has been through, and with which gradients, is not in its last bits: two data sets, one grid."""
    make, options = KINDS[kind]
    for gradient in (0.0, 0.3712345):  # without and with an example's
        table, dense = (keras.Variable(np.zeros(shape, "float32"), name=name)
                        for shape, name in (([ROWS, WIDTH], "table"), ([50], "dense")))  # fmt: skip
        optimizer = make(0.5, **BASICS, secure=secure, **options)
        build_by_hand(optimizer, [table, dense], [table])
        for step in range(3):
            if "Lazy" in kind:  # the grid is that of the largest rate since all rows were settled
                optimizer.learning_rate = (0.5, 0.11, 0.05)[step]
            ids = tf.constant([0, 1 + step], tf.int64)
            if optimizer.pays_late:
                optimizer.debts.settle_before_reads({table.path: ids})
            slices = tf.IndexedSlices(tf.fill([2, WIDTH], np.float32(gradient)), ids)
            sums = {table.path: slices, dense.path: tf.fill([50], np.float32(gradient))}
            optimizer.apply(ClippedSum(sums, tf.zeros([1]), tf.constant(1.0), tf.zeros([1])))
            if step == 0 and "momentum" not in options:
                first = np.asarray(dense, np.float64)
                assert (first != 0).any()
        optimizer.settle()
        grid = 0.5 * float(grid_of(0.25))  # of a dense gradient's noise, and of a row's: η s = 0.125
        for weights in (table, dense):
            if weights is dense and (options or "Lazy" in kind):
                continue  # what is no table moves by functions of what was released
            steps = np.asarray(weights, np.float64) / grid
            assert (steps == np.round(steps)).all() and (steps[0] != 0).any()


# What a hostile reader found in lazy mechanisms.


def step(optimizer, table, ids, gradient=0.0):
    ids = tf.constant(ids, tf.int64)
    if optimizer.pays_late:
        optimizer.debts.settle_before_reads({table.path: ids})
    slices = tf.IndexedSlices(tf.fill([len(ids), table.shape[1]], np.float32(gradient)), ids)
    optimizer.apply(ClippedSum({table.path: slices}, tf.zeros([1]), tf.constant(1.0), tf.zeros([1])))


def table_and(make, rate=0.5, start=0.0, width=500, **options):
    table = keras.Variable(np.full([4, width], start, "float32"), name="table")
    optimizer = make(rate, **{**BASICS, **options})
    build_by_hand(optimizer, [table], [table])
    return table, optimizer


@pytest.mark.fast_cases("False-LazyDPSGD", "True-LazyDPFTRL")
@pytest.mark.parametrize("make", [tfdp_rec.LazyDPSGD, tfdp_rec.LazyDPFTRL])
@pytest.mark.parametrize("nesterov", [False, True])
def test_one_owed_step_of_momentum_is_a_step(make, nesterov):
    """A row that was read moves by its velocity; one that was not moved by a little more, the root of an error."""
    plan = {"correlation": PLAN} if make is tfdp_rec.LazyDPFTRL else {}
    table, optimizer = table_and(make, momentum=0.99, nesterov=nesterov, **plan)
    for rate in (0.5, 0.37, 0.41, 0.13, 0.49, 0.3):  # what is left of a variance is an error that comes and goes
        optimizer.learning_rate = rate
        before = [np.asarray(each, np.float64) for each in optimizer.tables[table.path].stored_variables]
        step(optimizer, table, [0])
        optimizer.settle()
        after = [np.asarray(each, np.float64) for each in optimizer.tables[table.path].stored_variables]
        velocity, move = after[1], after[1] - 0.99 * before[1]
        expected = 0.99 * velocity + move if nesterov else velocity
        # Half a step of the grid, and float32 numbers: the weight, and velocities of which some are added up.
        speeds = np.float32(np.maximum(np.abs(velocity), np.abs(before[1])))
        last = 0.5 * np.spacing(np.float32(np.abs(after[0]))) + 1.5 * np.spacing(speeds)
        off = np.abs(after[0] - before[0] - expected) - last * (2 if nesterov else 1)
        assert (off <= 0.5 * 0.5 * float(grid_of(0.25))).all(), off.max(axis=1) / float(grid_of(0.125))


@pytest.mark.parametrize("make", [tfdp_rec.LazyDPSGD, tfdp_rec.LazyDPFTRL])
def test_momentum_does_not_move_rows_without_noise(make):
    plan = {"correlation": PLAN} if make is tfdp_rec.LazyDPFTRL else {}
    table, optimizer = table_and(make, momentum=0.9, **plan)
    step(optimizer, table, [0])
    optimizer.settle()  # the velocity outlives a release
    for rate in (0.0, 1e-8):
        optimizer.learning_rate = rate
        with pytest.raises(Exception, match="momentum still moves the weights"):
            step(optimizer, table, [0])
    optimizer.learning_rate = 0.04
    step(optimizer, table, [0])
    saved = {}  # as a file has it
    optimizer.save_own_variables(saved)
    loaded, again = table_and(make, momentum=0.9, **plan)
    again.load_own_variables({name: np.asarray(value) for name, value in saved.items()})
    for rate in (0.0, 1e-6):
        again.learning_rate = rate
        with pytest.raises(Exception, match="momentum still moves the weights"):
            step(again, loaded, [0])
    again.learning_rate = 1e-3
    step(again, loaded, [0])
    fresh, first = table_and(make, rate=0.0, momentum=0.9, **plan)
    step(first, fresh, [0])  # a schedule may begin at 0: nothing moves yet
    still, optimizer = table_and(make, **plan)
    for rate in (0.5, 0.0):
        optimizer.learning_rate = rate
        step(optimizer, still, [0])  # nothing moves
    optimizer.settle()


def test_decay_is_the_same_for_rows_that_are_read_and_others(monkeypatch):
    """In float32 what decay leaves was off by up to 2⁻²⁵: a shift of all of a row's weights, beside the clip."""
    monkeypatch.setattr(WeightBound, "room", 2.0**22)  # for a noise that hides none of it
    table, optimizer = table_and(
        tfdp_rec.LazyDPSGD, 0.1, start=0.999, width=1_000_000, weight_decay=1e-6, noise_multiplier=4e-5
    )
    step(optimizer, table, [0])
    optimizer.settle()
    read, *others = np.asarray(table, np.float64).mean(axis=1) - np.float64(np.float32(0.999))
    assert max(abs(each + 0.999e-7) for each in (read, *others)) < 8e-9  # eight deviations of their means


FAST = {
    "momentum": (tfdp_rec.LazyDPSGD, {}),
    "nesterov": (tfdp_rec.LazyDPSGD, {"nesterov": True}),
    "replayed": (tfdp_rec.LazyDPSGD, {"aggregate_noise": False}),
    "replayed, nesterov": (tfdp_rec.LazyDPSGD, {"aggregate_noise": False, "nesterov": True}),
    "correlated": (tfdp_rec.LazyDPFTRL, {"correlation": PLAN, "nesterov": True}),
    "correlated, replayed": (tfdp_rec.LazyDPFTRL, {"correlation": PLAN, "aggregate_noise": False}),
}


@pytest.mark.fast_cases("momentum", "replayed, nesterov", "correlated")
@pytest.mark.parametrize("kind", FAST)
def test_velocities_of_a_saved_file_stand_on_the_grid_of_the_weights(kind):
    """7% of them did: a lazy velocity was a float32 number next to its gradient, with that one's last bits."""
    make, options = FAST[kind]
    table, optimizer = table_and(make, width=200, momentum=0.9, **options)
    for number, rate in enumerate((0.3, 0.5, 0.11, 0.05)):
        optimizer.learning_rate = rate
        step(optimizer, table, [0, 1 + number % 2], gradient=0.3712345)  # row 3 is read by none
        if number == 1:
            optimizer.settle()
    touched = np.float64(optimizer.tables[table.path].read(tf.constant([0, 2], tf.int64))[1])  # ahead of a release
    saved = {}
    optimizer.save_own_variables(saved)
    velocity = np.float64(next(value for name, value in saved.items() if np.shape(value) == (4, 200)))
    grid = 0.5 * float(grid_of(0.25))
    for values in (velocity, touched, np.float64(table)):
        assert (values / grid == np.round(values / grid)).all() and (values != 0).all()
    assert stats.chisquare(np.bincount((velocity[:3] / grid).astype(int).ravel() % 8, minlength=8)).pvalue > 1e-7


@pytest.mark.fast_cases("nesterov", "replayed, nesterov", "correlated")
@pytest.mark.parametrize("kind", FAST)
def test_a_velocity_that_is_rounded_takes_its_weight_along(kind):
    """Two roundings of one Gaussian to grids that lie apart would place it between them."""
    make, options = FAST[kind]
    table, optimizer = table_and(make, width=200, momentum=0.9, start=2.0**-30, **options)  # off the grid
    grid = 0.5 * float(grid_of(0.25))
    for _ in range(3):
        before = [np.float64(each) for each in optimizer.tables[table.path].stored_variables]
        step(optimizer, table, [0])  # row 0 at once, the others when they are settled
        optimizer.settle()
        weight, velocity = (np.float64(each) for each in optimizer.tables[table.path].stored_variables)
        move = velocity - 0.9 * before[1]
        exact = before[0] + (0.9 * velocity + move if options.get("nesterov") else velocity)
        small = (np.abs(weight) < 1) & (np.abs(velocity) < 1)  # float32 has every step of the grid there
        assert small.mean() > 0.5 and (np.abs(weight - exact) <= (0.5 + 1e-6) * grid)[small].all()


def test_a_loaded_velocity_goes_on_along_a_grid():
    table, optimizer = table_and(tfdp_rec.LazyDPSGD, momentum=0.9)
    step(optimizer, table, [0, 1])
    saved = {}
    optimizer.save_own_variables(saved)
    loaded, again = table_and(tfdp_rec.LazyDPSGD, momentum=0.9)
    again.load_own_variables({name: np.asarray(value) for name, value in saved.items()})
    step(again, loaded, [1, 2], gradient=0.3712345)
    again.settle()
    grid = float(again.debts.marks.grid)
    for kept in again.tables[loaded.path].stored_variables:
        values = np.float64(kept) / grid
        assert (values == np.round(values)).all()


@pytest.mark.slow
def test_of_models_that_share_a_table_the_coarsest_grid_comes_last():
    """The finest came last if its model was compiled last, and rows of its last batch stood on the coarse grid."""
    table = keras.layers.Embedding(64, 128, embeddings_initializer="zeros", name="items")

    def model(rate):
        ids = keras.Input([1], dtype="int64")
        made = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
        optimizer = tfdp_rec.LazyDPSGD(rate, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8.0)
        made.compile(optimizer, loss="mse")
        return made

    x, y = np.arange(8)[:, None], np.ones([8, 1], "float32")
    for rates in ((0.5, 0.25), (0.25, 0.5)):
        one, other = map(model, rates)
        for each in (one, other):
            each.prepare((x, y))
        for each in (one, other, one):
            each.train_on_batch(x, y)
        one.settle()
        steps = np.float64(table.get_weights()[0]) / float(grid_of(0.5 / 8))
        assert (steps == np.round(steps)).all()


# Noise too small for float32: a row that is read stays where it is, and one that is not moves by that of many steps.


LAZY = [tfdp_rec.LazyDPSGD, tfdp_rec.LazyDPFTRL]


def plan_of(make, steps=16):
    return {"correlation": optimised_correlation(steps, steps)} if make is tfdp_rec.LazyDPFTRL else {}


@pytest.mark.parametrize("make", LAZY)
@pytest.mark.parametrize("ids", [[0], [], [3]])
def test_noise_that_weights_would_swallow_is_refused_whatever_is_read(make, ids):
    """With 10⁻⁸ beside 1, 3,000 steps moved a row that none of them read five times as far as one that all did."""
    values = np.float32([0.1, 0.1, 0.1, 2.1])  # one of them is too large for η s = 2⁻¹⁶
    for rate, largest, refused in ((2.0**-14, 1.9, False), (2.0**-14, 2.1, True), (2.0**-15, 1.9, True)):
        table, optimizer = table_and(make, rate, **plan_of(make))
        table.assign(np.repeat(np.minimum(values, largest)[:, None], 500, axis=1))
        with pytest.raises(Exception, match="less than a hundred-thousandth") if refused else contextlib.nullcontext():
            step(optimizer, table, ids)
        release_by_hand(optimizer)  # nothing was cut short
    still, without = table_and(make, 1e-9, start=1.0, noise_multiplier=0.0, **plan_of(make))
    step(without, still, [0])  # nothing hides there, and nothing is claimed


def test_what_the_rows_of_a_batch_hold_ends_no_training():
    """A training that read a large row ended when its schedule had fallen, and one that did not read it went on."""
    made = {}
    for read in (0, 3):
        rate = keras.optimizers.schedules.ExponentialDecay(2.0**-10, 1, 0.5)
        table, optimizer = table_and(tfdp_rec.LazyDPSGD, rate, width=4)
        table.assign(np.repeat(np.float32([0.1, 0.1, 0.1, 3.0])[:, None], 4, axis=1))
        moved = []
        for _ in range(12):
            before = optimizer.debts.marks.largest.numpy()
            (account,) = optimizer.debts.accounts.values()
            step(optimizer, table, [read])
            clock = optimizer.debts.marks.now()
            totals = account.history.look_up(tf.stack([clock - 1, clock])).numpy()
            moved.append(bool(totals[1, 1] > totals[0, 1]))
            assert optimizer.debts.marks.largest.numpy() >= before
        release_by_hand(optimizer)
        made[read] = moved
    assert made[0] == made[3] == [True] * 4 + [False] * 8  # 2⁻¹² η s 2⁻ⁿ is at least 2⁻¹⁹ · 4 · 3


MOVES = {
    "plain": {}, "decay": {"weight_decay": 0.01}, "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip


@pytest.mark.fast_cases("plain-LazyDPSGD", "momentum-LazyDPSGD", "nesterov-LazyDPFTRL")
@pytest.mark.parametrize("make", LAZY)
@pytest.mark.parametrize("name", MOVES)
def test_no_gradient_takes_a_weight_past_its_bound(make, name):
    """Far past it, float32 would hold no noise of later steps. Steps of noise alone are as they were."""
    options = {**MOVES[name], **plan_of(make, steps=180), "noise": KeyedNoise(3)}
    if make is tfdp_rec.LazyDPFTRL and name == "decay":
        options.pop("weight_decay")
    table, optimizer = table_and(make, 2.0**-14, width=3, **options)
    has_less_room = "momentum" in options or make is tfdp_rec.LazyDPFTRL
    largest = 2.0 if has_less_room else 4.0  # four times the weights that were released; 2¹⁸ η s
    start = np.float32([[0.5, -0.5, 0.1], [0.5, -0.5, 0.1], [0.0, 0.0, 0.0], [0.5, -0.5, 0.1]])
    table.assign(start)
    for _ in range(15):
        step(optimizer, table, [0], gradient=-32000.0)  # −η ĝ / B is some 2⁻¹
        step(optimizer, table, [1], gradient=32000.0)
        step(optimizer, table, [3])
    release_by_hand(optimizer)
    found = np.asarray(table)
    assert np.abs(found).max() < largest + 0.01
    assert (found[0] > largest - 0.1 * largest).all() and (found[1] < 0.1 * largest - largest).all()
    assert np.abs(found[3] - start[3]).max() < 0.2 and np.abs(found[2]).max() < 0.01


def limited(optimizer, table, made):
    """A table's move, and as it meets its noise."""
    own = optimizer.tables[table.path]
    move = made.move(own).values
    return move, within(made.rows(own)[0], move, optimizer.debts.bound.limit(made))


def test_a_step_raises_the_bound_of_every_table():
    """Another optimizer may train the one with small weights alone."""
    tables = [keras.Variable(np.full([4, 2], size, "float32"), name=f"of_{size}") for size in (100.0, 0.1)]
    optimizer = tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=1.0)
    build_by_hand(optimizer, tables, tables)
    step(optimizer, tables[0], [0])
    first, second = (float(size) for size in optimizer.debts.bound.sizes)
    assert first == second == 100.0  # more than noise raises it to


def test_a_bounded_move_changes_no_more_than_the_move():
    """Beside the bound two sums that differ by one example differ by no more, and without a gradient by nothing."""
    table, optimizer = table_and(tfdp_rec.LazyDPSGD, 2.0**-14, width=200)
    rng = np.random.default_rng(0)
    table.assign(rng.uniform(-1.0, 1.0, [4, 200]).astype("float32"))
    step(optimizer, table, [])
    table.assign(np.asarray(table) * rng.choice([1.0, 7.0], [4, 200]))  # some are past the bound, as by noise
    one, small = tf.constant(1.0), tf.constant(2.0**-16, tf.float64)
    moves = []
    for each in (*rng.normal(size=[2, 4, 200]) * 3.0, np.zeros([4, 200])):
        slices = tf.IndexedSlices(tf.constant(each, tf.float32), tf.range(4, dtype=tf.int64))
        clipped = ClippedSum({table.path: slices}, tf.zeros([1]), one, tf.zeros([1]))
        made = Step(clipped, tf.constant(1.0, tf.float64), small, one, one, -small, {}, optimizer.debts.bound.find())
        move, found = limited(optimizer, table, made)
        moves.append((move.numpy(), found.numpy()))
    (one, kept), (other, also), (_, nothing) = moves
    assert (nothing == 0).all() and (kept != one).any() and (kept == one).any()
    assert (np.abs(np.float64(kept) - also) <= np.abs(np.float64(one) - other)).all()


def test_a_bounded_move_is_a_function_of_its_row():
    """Beside another row's large move this one was cut by half a step of float32, and alone it was not."""
    table, optimizer = table_and(tfdp_rec.LazyDPSGD, 2.0**-14, width=1)
    table.assign(np.float32([[0.9], [0.3], [0.0], [1.0]]))
    step(optimizer, table, [])
    one, small, found = tf.constant(1.0), tf.constant(2.0**-16, tf.float64), []
    move = np.float32(4.0) - np.float32(0.9)
    for other in (0.0, -9.0):
        gradients = -tf.constant([[np.nextafter(move, np.float32(9))], [other]])
        slices = tf.IndexedSlices(gradients, tf.range(2, dtype=tf.int64))
        clipped = ClippedSum({table.path: slices}, tf.zeros([1]), one, tf.zeros([1]))
        made = Step(clipped, tf.constant(1.0, tf.float64), small, one, one, -small, {}, optimizer.debts.bound.find())
        found.append(float(limited(optimizer, table, made)[1][0, 0]))
    assert found[0] == found[1] == move


@pytest.mark.fast_cases("0.0-LazyDPSGD", "0.1-LazyDPFTRL")
@pytest.mark.parametrize("make", LAZY)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_that_are_faint_beside_earlier_ones_are_left_out(make, decay):
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0], [2.0**-7, 2.0**-15])
    table, optimizer = table_and(make, rate, weight_decay=decay or None, **plan_of(make))
    step(optimizer, table, [0, 1])
    before = optimizer.tables[table.path].read(tf.range(4))[0].numpy()
    (account,) = optimizer.debts.accounts.values()
    owed = account.history.look_up(tf.constant(1, tf.int64)).numpy()
    for _ in range(5):
        step(optimizer, table, [0], gradient=0.3)
    if make is tfdp_rec.LazyDPSGD:
        np.testing.assert_array_equal(account.history.look_up(tf.constant(6, tf.int64)), owed)
    with pytest.warns(UserWarning, match="left out 5 steps"):
        release_by_hand(optimizer)
    np.testing.assert_array_equal(np.asarray(table)[:2], before[:2])  # read, and not read
    assert (np.asarray(table)[2:] != before[2:]).any(axis=1).all()  # the first step's noise
    step(optimizer, table, [0], gradient=0.3)  # all rows are released: this is the largest now
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        release_by_hand(optimizer)
    assert (np.asarray(table)[0] != before[0]).any()


@pytest.mark.parametrize("make", LAZY)
def test_a_rate_is_lowered_after_a_release(make):
    """Elsewhere its steps would be left out without a word: no schedule says that it is to fall."""
    table, optimizer = table_and(make, 2.0**-12, **plan_of(make))
    for rate in (1.0, 0.6, 0.1):
        optimizer.learning_rate = rate * 2.0**-12
        with pytest.raises(Exception, match="call model.settle") if rate == 0.1 else contextlib.nullcontext():
            step(optimizer, table, [0])
    release_by_hand(optimizer)
    step(optimizer, table, [0])
    optimizer.learning_rate = 0.0
    step(optimizer, table, [0])  # nothing moves


@pytest.mark.parametrize("make", LAZY)
def test_a_schedule_may_end_at_nothing(make):
    """Its last steps are left out: below 2⁻⁷ of the largest since a release, or where weights have no room for them."""
    rate = keras.optimizers.schedules.ExponentialDecay(2.0**-10, 1, 0.5)
    table, optimizer = table_and(make, rate, width=50, start=0.01, **plan_of(make))
    for number in range(16):
        if number == 10:
            release_by_hand(optimizer)
        before = optimizer.tables[table.path].read(tf.range(4))[0].numpy()[0]
        step(optimizer, table, [0])
        after = optimizer.tables[table.path].read(tf.range(4))[0].numpy()[0]
        assert (after != before).any() == (number <= 7 or 10 <= number <= 11)


def test_a_long_plan_of_correlated_noise_has_less_room():
    """Its noise cancels from step to step, and what roundings add to a row that is read at every step does not."""
    long = plan_of(tfdp_rec.LazyDPFTRL, steps=10_000)
    for rate, refused in ((2.0**-10, False), (2.0**-12, True)):
        table, optimizer = table_and(tfdp_rec.LazyDPFTRL, rate, start=1.0, width=4, **long)
        with pytest.raises(Exception, match="less than a hundred-thousandth") if refused else contextlib.nullcontext():
            step(optimizer, table, [0])


@pytest.mark.parametrize("make", LAZY)
def test_noise_finer_than_the_grid_that_is_kept_is_left_out(make):
    """Weights that were put back to zero hide what they stood on: rows that steps read stayed at zero."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 1e-7])
    table, optimizer = table_and(make, rate, width=4, **plan_of(make))
    step(optimizer, table, [0])
    release_by_hand(optimizer)
    table.assign(np.zeros([4, 4], "float32"))
    for _ in range(5):
        step(optimizer, table, [0])
    with pytest.warns(UserWarning, match="left out 5 steps"):
        release_by_hand(optimizer)
    assert not np.asarray(table).any()


def test_a_velocity_that_came_from_a_checkpoint_does_not_move_rows_without_noise(tmp_path):
    """The largest noise so far does not come with it: a step at a rate of 0 was taken for a first one, at rest."""
    first, optimizer = table_and(tfdp_rec.LazyDPSGD, momentum=0.9, width=4)
    step(optimizer, first, [0])
    release_by_hand(optimizer)
    saved = tf.train.Checkpoint(velocity=optimizer.tables[first.path].state.value)
    path = saved.write(str(tmp_path / "velocity"))
    table, optimizer = table_and(tfdp_rec.LazyDPSGD, rate=0.0, momentum=0.9, width=4)
    step(optimizer, table, [0])
    release_by_hand(optimizer)
    tf.train.Checkpoint(velocity=optimizer.tables[table.path].state.value).read(path).assert_consumed()
    with pytest.raises(Exception, match="momentum still moves"):
        step(optimizer, table, [0])


def test_a_compiled_step_finds_how_large_weights_are_after_each_release():
    ids = keras.Input([1], dtype="int32")
    layer = keras.layers.Embedding(4, 2, embeddings_initializer="ones")
    model = tfdp_rec.PrivateModel(ids, keras.layers.Flatten()(layer(ids)))
    model.compile(tfdp_rec.LazyDPSGD(2.0**-14, **BASICS), loss="mse")
    batch = np.zeros([1, 1], "int32"), np.ones([1, 2], "float32")
    model.train_on_batch(*batch)
    model.set_weights([np.full([4, 2], 99.0, "float32")])
    with pytest.raises(Exception, match="less than a hundred-thousandth"):
        model.train_on_batch(*batch)
