"""With noise that is a pure function of (table, row, step) and no aggregation, lazy is eager, number for number.

Random histories run through three implementations: lazy, eager, and a loop in numpy that is obviously right. With
correlated noise that loop has the matrix C⁻¹ written out, and no buffers.
"""

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from helpers import Seeded, build_by_hand
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfdp_rec
from tfdp_rec.clipping import ClippedSum
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.kept import kept_variables, restoration
from tfdp_rec.core.mechanism.row_debts import RowDebts
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.privacy import BufferedToeplitz, Correlation
from tfdp_rec.training.lookahead import LookAhead, lookahead

BASICS = {"l2_norm_clip": 1.0, "noise_multiplier": 0.8, "expected_batch_size": 4.0}
TOLERANCE = 1e-5
SHAPES = {"users": (11, 4), "items": (7, 3), "shared": (5, 1)}


PENALTIES = {"users": 0.15, "items": 0.4}  # l2 of two of the tables


class Weights:
    """Three tables of different width and a dense variable, the same at every start; tables may be penalised."""

    def __init__(self, penalties=()):
        rng = np.random.default_rng(1)
        start = {name: rng.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}
        self.tables = {name: keras.Variable(value, name=name) for name, value in start.items()}
        self.dense = keras.Variable(rng.normal(size=[3]).astype("float32"), name="dense")
        for name in penalties:
            kind = keras.regularizers.L2 if name == "users" else keras.regularizers.L1L2
            self.tables[name].regularizer = kind(l2=penalties[name])
        self.all = [*self.tables.values(), self.dense]


def gradient_of_rows(rows):
    """A loss that depends on what was read: a row read too early, without its noise, shows."""
    return 0.4 * np.tanh(rows) + 0.1


class Training:
    """A mechanism that trains `Weights` on batches given as {table: ids, with repeats}."""

    def __init__(self, make, penalties=()):
        self.make, self.weights, self.optimizer = make, Weights(penalties), make()
        self._build()

    def _build(self):
        build_by_hand(self.optimizer, self.weights.all, self.weights.tables.values())

    def step(self, batch, announced):
        gradients, total = {}, 0.0
        for name, table in self.weights.tables.items():
            if name not in batch:
                continue
            ids = tf.constant(batch[name], tf.int64)
            if self.optimizer.pays_late:
                self.optimizer.debts.settle_before_reads({table.path: ids})
            values = gradient_of_rows(np.asarray(tf.gather(table._value, ids)))
            total += values.sum()
            gradients[table.path] = tf.IndexedSlices(tf.constant(values, tf.float32), ids)
        gradients[self.weights.dense.path] = tf.fill([3], tf.constant(np.tanh(total), tf.float32))
        size = tf.zeros([len(batch)])
        clipped = ClippedSum(gradients, size, tf.constant(self.optimizer.l2_norm_clip, tf.float32), size)
        upcoming = {self.weights.tables[name].path: tf.constant(ids, tf.int64) for name, ids in announced.items()}
        self.optimizer.apply(clipped, upcoming=upcoming)

    def save_and_load(self):
        """A release, loaded by a new optimizer of the same making."""
        store = {}
        self.optimizer.save_own_variables(store)
        self.optimizer = self.make()
        self._build()
        self.optimizer.load_own_variables(store)

    def interrupt_and_resume(self):
        """What a training checkpoint does, which is settled."""
        old = self.optimizer
        old.settle()
        self.optimizer = self.make()
        self._build()
        with restoration(self.optimizer):
            for new, kept in zip(self.optimizer.variables, old.variables, strict=True):
                new._value.assign(kept._value)
            for name, variable in kept_variables(self.optimizer).items():
                variable.assign(kept_variables(old)[name])

    def results(self):
        self.optimizer.settle()
        state = {v.path: np.asarray(v._value) for v in self.weights.all}
        state |= {f"{i}": np.asarray(v._value) for i, v in enumerate(self.optimizer.variables) if v.ndim == 2}
        return state


class ByHand:
    """Eager DP-SGD as the papers write it, in numpy and float64."""

    def __init__(self, momentum, nesterov, decay, rate, inverse=(1.0,), penalties=(), fixed=()):
        weights = Weights()
        names = {**weights.tables, "dense": weights.dense}
        self.value = {name: np.asarray(v._value, np.float64) for name, v in names.items()}
        self.speed = {name: np.zeros_like(value) for name, value in self.value.items()}
        self.momentum, self.nesterov, self.decay, self.rate, self.time = momentum, nesterov, decay, rate, 0
        self.settings = {**BASICS, **dict(fixed)}
        self.noise, self.inverse, self.drawn = KeyedNoise(7), inverse, []
        self.penalties = dict(penalties)

    def begin_plan(self):
        self.drawn = []

    def step(self, batch):
        update, total = {}, 0.0
        for name in SHAPES:
            update[name] = np.zeros(SHAPES[name])
            for row in batch.get(name, []):
                gradient = gradient_of_rows(self.value[name][row])
                update[name][row] += gradient
                total += gradient.sum()
        update["dense"] = np.full(3, np.tanh(total))
        size, rate = self.settings["expected_batch_size"], self.rate(self.time)
        scale = self.settings["noise_multiplier"] * self.settings["l2_norm_clip"] / size
        self.drawn.append([self._noise(number, update[name].shape) for number, name in enumerate(update)])
        for number, name in enumerate(update):
            several = zip(self.inverse, reversed(self.drawn))  # (C⁻¹ z)_t = Σ_i (C⁻¹)_i z_{t−i}
            noisy = update[name] / size + scale * sum(entry * z[number] for entry, z in several)
            noisy += 2 * self.penalties.get(name, 0.0) * self.value[name]  # what no example decides
            self._move(name, noisy, rate)
        self.time += 1

    def _noise(self, number, shape):
        rows, width = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
        drawn = self.noise.normal(number, tf.range(rows, dtype=tf.int64), tf.constant(self.time, tf.int64), width)
        return np.asarray(drawn).reshape(shape)

    def _move(self, name, gradient, rate):
        if not self.momentum:
            self.value[name] = (1 - rate * self.decay) * self.value[name] - rate * gradient
            return
        self.speed[name] = self.momentum * self.speed[name] - rate * gradient
        ahead = self.momentum * self.speed[name] - rate * gradient
        self.value[name] = self.value[name] + (ahead if self.nesterov else self.speed[name])


def assert_close(found, expected):
    for name, value in expected.items():
        scale = np.max(np.abs(value)) + 1e-12
        assert np.max(np.abs(found[name] - value)) <= TOLERANCE * scale, name


BATCHES = st.dictionaries(
    st.sampled_from(sorted(SHAPES)), st.lists(st.integers(0, 4), max_size=6), max_size=3
)  # ids repeat, tables are left out, batches are empty
FAR = st.dictionaries(st.sampled_from(sorted(SHAPES)), st.lists(st.integers(-3, 40), max_size=6))
EVENTS = st.one_of(
    st.tuples(st.just("step"), BATCHES),
    st.tuples(st.just("step"), BATCHES),
    st.tuples(st.just("settle"), st.none()),
    st.tuples(st.just("release"), st.none()),
    st.tuples(st.just("resume"), st.none()),
)
FIXED = st.fixed_dictionaries(
    {
        "l2_norm_clip": st.floats(0.3, 3.0),
        "noise_multiplier": st.just(0.0) | st.floats(0.2, 3.0),
        "expected_batch_size": st.floats(1.0, 9.0),
    }
)
RECURSIONS = st.sampled_from(
    [(0.0, False, None), (0.0, False, 0.3), (0.9, False, None), (0.6, True, None), (0.05, True, None)]
)
RATES = st.sampled_from([0.3, "halving", "warm"])


def rate_of(kind):
    """(what the optimizer takes, what the rate is at a step)."""
    if kind == "halving":
        return keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5), lambda t: 0.5 * 0.5 ** (t / 3)
    if kind == "warm":
        return keras.optimizers.schedules.PolynomialDecay(0.01, 6, 0.5), lambda t: 0.01 + 0.49 * min(t, 6) / 6
    return kind, lambda t: kind


STRATEGIES = {
    "independent": None,
    "no buffer": BufferedToeplitz(),
    "one": BufferedToeplitz([0.46], [0.954]),
    "all taken back": BufferedToeplitz([1.0], [0.0]),
    "three": BufferedToeplitz([0.3, 0.2, 0.4], [0.99, 0.7, 0.2]),
}
HISTORIES = given(
    strategy=st.sampled_from(list(STRATEGIES)),
    recursion=RECURSIONS,
    rate=RATES,
    events=st.lists(EVENTS, min_size=6, max_size=16),
    announce=st.sampled_from(["right", "nothing", "wrong"]),
    lies=FAR,
    penalties=st.sampled_from([{}, PENALTIES]),
    fixed=FIXED,
)
CHECKED = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@pytest.mark.slow
@settings(max_examples=12, **CHECKED)
@HISTORIES
def test_any_history(strategy, recursion, rate, events, announce, lies, penalties, fixed):
    own = {} if recursion[0] else penalties
    assert_lazy_is_eager(strategy, recursion, rate, events, announce, lies, own, fixed)


@pytest.mark.slow
@settings(max_examples=75, **CHECKED)
@HISTORIES
def test_many_histories(strategy, recursion, rate, events, announce, lies, penalties, fixed):
    own = {} if recursion[0] else penalties
    assert_lazy_is_eager(strategy, recursion, rate, events, announce, lies, own, fixed)


def pair_of(strategy):
    """The lazy and the eager mechanism of some noise, and the first entries of C⁻¹."""
    if STRATEGIES[strategy] is None:
        return tfdp_rec.LazyDPSGD, tfdp_rec.DPSGD, {}, np.eye(20)[0]
    plan = {"correlation": Correlation(STRATEGIES[strategy], steps=20, separation=5)}
    steps = np.arange(20)
    whole = sum((STRATEGIES[strategy].coefficients(20)[i] * np.eye(20, k=-i) for i in steps), np.zeros([20, 20]))
    return tfdp_rec.LazyDPFTRL, tfdp_rec.DPFTRL, plan, np.linalg.inv(whole)[:, 0]


def assert_lazy_is_eager(strategy, recursion, rate, events, announce, lies, penalties=(), fixed=()):
    momentum, nesterov, decay = recursion
    lazily, eagerly, plan, inverse = pair_of(strategy)
    given_rate, rate_at = rate_of(rate)
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay, **plan}

    def mechanism(kind, **more):
        return lambda: kind(given_rate, **{**BASICS, **dict(fixed)}, noise=KeyedNoise(7), **options, **more)

    lazy = Training(mechanism(lazily, aggregate_noise=False), penalties)
    eager = Training(mechanism(eagerly), penalties)
    by_hand = ByHand(momentum, nesterov, decay or 0.0, rate_at, inverse, penalties, fixed)
    batches = [what for event, what in events if event == "step"]
    done = 0
    for event, what in events:
        if event == "step":
            done += 1
            true = batches[done] if done < len(batches) else {}
            lazy.step(what, {"right": true, "nothing": {}, "wrong": lies}[announce])
            eager.step(what, {})
            by_hand.step(what)
        elif event == "settle":
            lazy.optimizer.settle()
        elif event == "release":
            lazy.save_and_load()
            eager.save_and_load()
            by_hand.begin_plan()  # the buffers are in no release
        elif event == "resume":
            lazy.interrupt_and_resume()
            eager.interrupt_and_resume()
    found, expected = lazy.results(), eager.results()
    assert_close(found, expected)
    assert_close({name: found[name] for name in by_hand.value}, by_hand.value)


ONE_OF_EACH = [
    ("step", {"users": [1, 1], "items": [2]}), ("step", {"users": [3]}), ("settle", None),
    ("step", {"shared": [0]}), ("resume", None), ("step", {"users": [1]}),
    ("step", {}), ("release", None), ("step", {"users": [1], "items": [0]}),
    ("step", {}), ("step", {"items": [0, 3]}),
]  # fmt: skip


@pytest.mark.fast_cases("three")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_kind_of_noise(strategy):
    assert_lazy_is_eager(strategy, (0.6, True, None), "halving", ONE_OF_EACH, "right", {})


@pytest.mark.fast_cases("recursion0")
@pytest.mark.parametrize("recursion", [(0.6, False, None), (0.0, False, 0.3)])
def test_large_tables_are_settled_in_chunks_by_a_graph(recursion, monkeypatch):
    monkeypatch.setattr("tfdp_rec.core.mechanism.tables.CHUNK_VALUES", 4)
    monkeypatch.setattr(RowDebts, "settle_all", not_eagerly(RowDebts.settle_all))
    assert_lazy_is_eager("independent", recursion, "halving", ONE_OF_EACH, "right", {})


def not_eagerly(settle_all):
    def settle(debts):
        assert not tf.executing_eagerly()
        settle_all(debts)

    return settle


@pytest.mark.fast_cases("independent-None")
@pytest.mark.parametrize("decay", [None, 0.3])
@pytest.mark.parametrize("strategy", ["independent", "three"])
def test_a_regularizer_is_the_gradient_of_its_penalty(strategy, decay):
    assert_lazy_is_eager(strategy, (0.0, False, decay), "halving", ONE_OF_EACH, "right", {}, PENALTIES)


@pytest.mark.fast_cases("LazyDPSGD")
@pytest.mark.parametrize("kind", [tfdp_rec.LazyDPSGD, tfdp_rec.LazyDPFTRL], ids=lambda kind: kind.__name__)
def test_noise_drawn_at_once_decays_as_its_table_does(kind):
    """Every table's own rate, where all it owes comes in one draw: rows without noise, and the spread of noise."""
    steps, rate = 6, 0.5
    plan = {"correlation": Correlation(BufferedToeplitz(), steps, 1)} if kind is tfdp_rec.LazyDPFTRL else {}
    settings = {**BASICS, "expected_batch_size": 1.0, "noise_multiplier": 1.0, "weight_decay": 0.1, **plan}
    big = {name: (4000, 5) for name in SHAPES}
    for noise in (0.0, 1.0):
        optimizer = kind(rate, **{**settings, "noise_multiplier": noise}, noise=Seeded(1))
        tables = {name: keras.Variable(np.full(shape, 2.0, "float32"), name=name) for name, shape in big.items()}
        for name, l2 in PENALTIES.items():
            tables[name].regularizer = keras.regularizers.L2(l2)
        build_by_hand(optimizer, [*tables.values()], tables.values())
        for _ in range(steps):
            optimizer.apply(ClippedSum({}, tf.zeros([0]), tf.constant(1.0), tf.zeros([0])))
        optimizer.settle()
        for name, table in tables.items():
            keep = 1 - rate * (0.1 + 2 * PENALTIES.get(name, 0.0))
            expected = np.full(big[name], 2.0 * keep**steps)
            off = np.asarray(table._value) - expected
            spread = noise * rate * np.sqrt(np.sum(keep ** (2 * np.arange(steps))))
            assert abs(off.std() - spread) <= 6 * spread / np.sqrt(2 * off.size) + 1e-6, name
            assert abs(off.mean()) <= 6 * spread / np.sqrt(off.size) + 1e-6, name


def test_learning_rate_set_in_mid_training():
    runs = [
        Training(lambda: tfdp_rec.LazyDPSGD(0.5, **BASICS, aggregate_noise=False, noise=KeyedNoise(1))),
        Training(lambda: tfdp_rec.DPSGD(0.5, **BASICS, noise=KeyedNoise(1))),
    ]
    for rate in (0.5, 0.3, 2.0):
        for run in runs:
            run.optimizer.learning_rate = rate
            run.step({"users": [1, 1], "items": [2]}, {})
    assert_close(runs[0].results(), runs[1].results())


def test_setting_iterations_back_forgets_no_noise():
    """Users set `iterations` to restart a schedule; rows that wait owe the steps that were made all the same."""
    run = Training(lambda: tfdp_rec.LazyDPSGD(0.5, **BASICS, noise=KeyedNoise(1)))
    for _ in range(5):
        run.step({"users": [0]}, {})
    run.optimizer.settle()
    before = np.asarray(run.weights.tables["users"]._value)
    run.optimizer.iterations.assign(0)
    run.step({"users": [0]}, {})
    run.optimizer.settle()
    assert np.all(np.asarray(run.weights.tables["users"]._value) != before)


def test_dense_optimizer_gets_the_same_noise():
    def with_adam(kind, **more):
        return lambda: kind(0.5, **BASICS, dense_optimizer=keras.optimizers.Adam(0.1), noise=KeyedNoise(1), **more)

    lazy = Training(with_adam(tfdp_rec.LazyDPSGD, aggregate_noise=False))
    eager = Training(with_adam(tfdp_rec.DPSGD))
    for batch in ({"users": [1, 1]}, {}, {"items": [3], "shared": [0, 1]}):
        lazy.step(batch, {})
        eager.step(batch, {})
    assert_close(lazy.results(), eager.results())


def test_a_sum_from_before_the_last_step_is_refused():
    run = Training(lambda: tfdp_rec.LazyDPSGD(0.5, **BASICS))
    table = run.weights.tables["users"]
    slices = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([2], tf.int64))
    stale = ClippedSum({table.path: slices}, tf.ones([1]), tf.constant(1.0), tf.ones([1]))
    run.step({"users": [3]}, {})  # which leaves row 2 owing
    before = np.asarray(table._value)
    with pytest.raises(tf.errors.InvalidArgumentError, match="read before their pending noise"):
        run.optimizer.apply(stale)
    assert np.array_equal(np.asarray(table._value), before)


def test_an_optimizer_without_an_owner_is_refused():
    """Nothing would withhold the rows that owe noise."""
    table = keras.Variable(np.zeros([4, 2], "float32"), name="table")
    optimizer = tfdp_rec.LazyDPSGD(0.5, **BASICS)
    optimizer.build([table], {table.path: None})
    with pytest.raises(NotPrivate, match="owner"):
        optimizer.apply(ClippedSum({}, tf.zeros([0]), tf.constant(1.0), tf.zeros([0])))
    assert int(optimizer.iterations) == 0 and not np.asarray(table).any()


# Whole models under fit: graphs, the look-ahead stage, shared tables, batches of any size.


def model_of(kind, **options):
    seeding.seed(0)
    context, label = keras.Input([3], dtype="int32", name="context"), keras.Input([], dtype="int32", name="label")
    items, users = keras.layers.Embedding(20, 4, name="items"), keras.layers.Embedding(6, 2, name="users")
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(items(context)), items(label), users(label % 6)])
    model = tfdp_rec.PrivateModel({"context": context, "label": label}, keras.layers.Dense(1)(joined))
    compile_options = {k: options.pop(k) for k in ("steps_per_execution", "run_eagerly", "microbatch_size") if
    k in options}
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 0.7, "expected_batch_size": 4, **options}
    optimizer = kind(0.3, noise=KeyedNoise(3), **settings)
    model.compile(optimizer=optimizer, loss="mse", **compile_options)
    return model


def data_of(sizes):
    rng = np.random.default_rng(5)
    batches = [
        (
            {"context": rng.integers(0, 20, (n, 3)).astype("int32"), "label": rng.integers(0, 20, n).astype("int32")},
            rng.normal(size=(n, 1)).astype("float32"),
        )
        for n in sizes
    ]
    signature = (
        {"context": tf.TensorSpec([None, 3], tf.int32), "label": tf.TensorSpec([None], tf.int32)},
        tf.TensorSpec([None, 1], tf.float32),
    )
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)


def announce_wrongly(data, model):
    wrong = {"items/embeddings": tf.constant([19, 3, 25, -1], tf.int64), "users/embeddings": tf.zeros([0], tf.int64)}
    return lookahead(data, model).map(lambda element: LookAhead(element.batch, wrong))


SIZES = [4, 0, 5, 1, 3, 4, 2]


@pytest.fixture(scope="module")
def eager_weights():
    found = {}

    def weights(**options):
        key = tuple(options.items())
        if key not in found:
            model = model_of(tfdp_rec.DPSGD, **options)
            model.fit(data_of(SIZES), epochs=2, verbose=0)
            found[key] = model.get_weights()
        return found[key]

    return weights


@pytest.mark.fast_cases("on-settings0-options0")
@pytest.mark.parametrize(
    ("ahead", "settings", "options"),
    [
        ("on", {"momentum": 0.8}, {}),
        ("off", {}, {}),
        ("wrong", {"weight_decay": 0.2}, {}),
        ("on", {"l2_norm_clip": "auto"}, {}),
        pytest.param("on", {}, {"steps_per_execution": 3}, marks=pytest.mark.slow),
        pytest.param("off", {}, {"run_eagerly": True}, marks=pytest.mark.slow),
        pytest.param("off", {}, {"microbatch_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_fit(eager_weights, ahead, settings, options):
    model = model_of(tfdp_rec.LazyDPSGD, aggregate_noise=False, **settings, **options)
    data = data_of(SIZES)
    if ahead == "wrong":
        data = announce_wrongly(data, model)
    if ahead == "off":
        for _ in range(2):
            for x, y in data:
                model.train_on_batch(x, y)
    else:
        model.fit(data, epochs=2, verbose=0)
    for found, expected in zip(model.get_weights(), eager_weights(**settings), strict=True):
        assert np.max(np.abs(found - expected)) <= TOLERANCE * np.max(np.abs(expected))


@pytest.mark.slow
def test_sums_taken_by_hand_settle_what_they_read():
    few = SIZES[2:5]
    eager = model_of(tfdp_rec.DPSGD)
    eager.fit(data_of(few), verbose=0)
    model = model_of(tfdp_rec.LazyDPSGD, aggregate_noise=False)
    for batch in data_of(few):
        model.prepare(batch)
        model.optimizer.apply(tfdp_rec.clipping.clipped_sum(model, batch, l2_norm_clip=1.0))
    for found, expected in zip(model.get_weights(), eager.get_weights(), strict=True):
        assert np.max(np.abs(found - expected)) <= TOLERANCE * np.max(np.abs(expected))
