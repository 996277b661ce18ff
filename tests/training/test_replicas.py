"""Two devices share the steps of a fit: number for number that of one device, in every way to write it.

A process has its devices from the start, so all of it is one program of its own.
"""

import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tfdp_rec

TWO = """
import warnings; warnings.simplefilter("ignore")
import contextlib, keras, numpy as np, tensorflow as tf, tfdp_rec
from keras import layers
from tfdp_rec.noise import KeyedNoise
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
assert strategy.num_replicas_in_sync == 2
rng = np.random.default_rng(0)
IDS, BOTH = rng.integers(0, 30, 400), tuple(strategy.extended.worker_devices)
assert [each[-5:] for each in BOTH] == ["CPU:0", "CPU:1"]
Y = (IDS % 2).astype("float32")[:, None]
LOSS = lambda: keras.losses.BinaryCrossentropy(from_logits=True)
SETTINGS = dict(epsilon=3.0, batch_size=100, epochs=2, learning_rate=0.1, accountant="rdp")

def plain():
    keras.utils.set_random_seed(3)
    inputs = keras.Input([], dtype="int64", name="item")
    hidden = layers.Dropout(0.1)(layers.Dense(8, activation="relu")(layers.Embedding(30, 4)(inputs)))
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile("adam", LOSS(), metrics=["AUC"])
    return model
"""


def run(script):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TWO + script], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()


EQUAL = """
def trained(name, scope, **options):
    with scope:
        keras.utils.set_random_seed(3)
        inputs = keras.Input([], dtype="int64")
        hidden = layers.Dense(8, activation="relu")(layers.Embedding(30, 4)(inputs))
        model = tfdp_rec.PrivateModel(inputs, layers.Dense(1)(hidden))
        choice = dict(contribution_clip=1.0, contribution_noise_multiplier=1.0, threshold=2.0)
        own = choice if name == "AdaFEST" else {}
        optimizer = getattr(tfdp_rec, name)(
            0.5, l2_norm_clip=0.1, noise_multiplier=0.5, expected_batch_size=41, noise=KeyedNoise(7), **own
        )
        model.compile(optimizer, LOSS(), metrics=["accuracy", keras.metrics.AUC(from_logits=True)], **options)
    history = model.fit(IDS, Y, batch_size=41, epochs=2, verbose=0, shuffle=False).history
    return model, history

for name in NAMES:
    one, of_one = trained(name, contextlib.nullcontext())
    two, of_two = trained(name, strategy.scope())
    assert one.private_step.devices == () and two.private_step.devices == BOTH
    kinds = {type(v._value) for v in two.variables + two.optimizer.variables}
    assert not any(issubclass(kind, tf.distribute.DistributedValues) for kind in kinds)
    for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6)
    assert len(of_one) == 3
    np.testing.assert_allclose([*of_one.values()], [*of_two.values()], rtol=1e-4)
    np.testing.assert_allclose(one.predict(IDS[:9], verbose=0), two.predict(IDS[:9], verbose=0), atol=1e-5)
    part, _ = trained(name, strategy.scope(), microbatch_size=8)
    for a, b in zip(one.get_weights(), part.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6)
    print(name)
"""


@pytest.mark.fast_cases("LazyDPSGD")
@pytest.mark.parametrize("name", ["LazyDPSGD", "DPSGD", "EANA", "AdaFEST"])
def test_two_devices_train_as_one_under_keyed_noise(name):
    assert run(f"NAMES = {[name]!r}{EQUAL}") == [name]


WAYS = """
def made(inside, outside):
    with strategy.scope():
        found = inside()
    return outside(found)

def shared(private):
    history = private.fit(verbose=0).history
    assert private.model.private_step.devices == BOTH and 2.5 < history["epsilon"][-1] <= 3.0, history
    assert private.predict(IDS[:2], verbose=0).shape == (2, 1) and "epsilon" in str(private.plan.accountant.statement())
    return private

own = plain()
make = lambda model: tfdp_rec.make_private(model, (IDS, Y), **SETTINGS)
made(plain, lambda model: shared(make(model)))
made(lambda: make(plain()), shared)
made(lambda: shared(make(plain())), lambda private: private.evaluate(IDS, Y, verbose=0))
made(lambda: make(own), shared)
assert len(own.evaluate(IDS, Y, verbose=0)) == 2
with tf.distribute.OneDeviceStrategy("CPU:1").scope():
    alone = make(plain())
alone.fit(verbose=0)
assert alone.model.private_step.devices == BOTH[1:]
print("shared")

# Adam ahead of it, on both devices, is in the statement.
with strategy.scope():
    earlier = plain()
earlier.fit(IDS, Y, verbose=0)
private = make(earlier)
private.fit(verbose=0)
assert private.epsilon is None or private.epsilon == float("inf"), private.epsilon
print("told")

# Files, batches by hand, a second compile.
with strategy.scope():
    private = make(plain())
    private.fit(verbose=0)
    private.model.save(FOLDER + "/model.keras")
    loaded = keras.models.load_model(FOLDER + "/model.keras")
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), private.model.predict(IDS, verbose=0))
    optimizer = lambda: tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=40)
    loaded.compile(optimizer(), LOSS())
    loaded.train_on_batch(IDS[:40], Y[:40])
loaded.compile(optimizer(), LOSS())
loaded.fit(IDS, Y, batch_size=40, verbose=0)
assert loaded.private_step.devices == BOTH
cut = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((IDS, Y)).batch(40))))
try:
    loaded.train_on_batch(*cut)
except tfdp_rec.NotPrivate as problem:
    assert "without experimental_distribute_dataset" in str(problem)
    print("kept")

# No product of the second device waits for one of the first.
step = tf.function(loaded.train_step).get_concrete_function((tf.constant(IDS[:40]), tf.constant(Y[:40])))
products = {place: [op for op in step.graph.get_operations() if op.type == "MatMul" and op.device.endswith(place)]
            for place in ("CPU:0", "CPU:1")}

def ahead(operation):
    seen, todo = set(), [operation]
    while todo:
        one = todo.pop()
        for before in [t.op for t in one.inputs] + list(one.control_inputs):
            if before not in seen:
                seen.add(before)
                todo.append(before)
    return seen

assert len(products["CPU:1"]) == len(products["CPU:0"]) > 2
assert not any(ahead(one) & set(products["CPU:0"]) for one in products["CPU:1"])
print("apart")
"""


@pytest.mark.slow
def test_every_way_to_write_it(tmp_path):
    assert run(f"FOLDER = {str(tmp_path)!r}{WAYS}") == ["shared", "told", "kept", "apart"]


IDS, Y = tf.range(40), tf.ones([40, 1])


def of_scope(strategy, optimizer=None):
    with strategy.scope():
        inputs = keras.Input([], dtype="int64")
        outputs = keras.layers.Dense(1)(keras.layers.Embedding(40, 2)(inputs))
        model = tfdp_rec.PrivateModel(inputs, outputs)
        made = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
        model.compile(optimizer or made, loss="mse")
    return model


@pytest.mark.fast_cases("all")
@pytest.mark.parametrize("inside", ["model", "all"])
def test_make_private_in_a_scope(inside):
    inputs, strategy = keras.Input([], dtype="int64"), tf.distribute.MirroredStrategy(["CPU:0"])
    settings = dict(epsilon=3.0, batch_size=10, epochs=1, learning_rate=0.1, accountant="rdp")

    def private_of(model):
        return tfdp_rec.make_private(model, (IDS.numpy(), Y.numpy()), **settings)

    with strategy.scope():
        outputs = keras.layers.Dense(1)(keras.layers.Embedding(40, 2)(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("adam", "mse", metrics=["mae", keras.metrics.MeanSquaredError()])
        private = private_of(model) if inside == "all" else None
    private = private or private_of(model)
    history = private.fit(verbose=0).history
    assert private.model.private_step.devices == tuple(strategy.extended.worker_devices)
    assert 2.0 < history["epsilon"][-1] <= 3.0 and len(model.evaluate(IDS, Y, verbose=0)) == 3


def test_a_step_that_each_replica_would_make_is_refused():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    model = of_scope(strategy)
    model.prepare((IDS, Y))
    with pytest.raises(tfdp_rec.NotPrivate, match="each replica of a strategy would clip and add noise separately"):
        strategy.run(model.train_step, args=((IDS[:8], Y[:8]),))
    clipped = tfdp_rec.clipping.clipped_sum(model, (IDS[:8], Y[:8]), 1.0)
    with pytest.raises(tfdp_rec.NotPrivate, match="each replica"):
        strategy.run(model.optimizer.apply, args=(clipped,))
    assert int(model.optimizer.iterations) == 0


def test_a_fit_in_a_scope_that_compile_was_not_in_is_refused():
    """It trained on one device, without a word."""
    model = of_scope(tf.distribute.get_strategy())
    for fit in (lambda: model.fit(IDS, Y, verbose=0), lambda: model.train_on_batch(IDS[:8], Y[:8])):
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            with pytest.raises(tfdp_rec.NotPrivate, match="not compiled in it: make and compile the model in the sc"):
                fit()


def test_batches_that_a_strategy_has_cut_up_are_refused():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    cut = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((IDS, Y)).batch(8))
    with pytest.raises(tfdp_rec.NotPrivate, match="without experimental_distribute_dataset"):
        of_scope(strategy).fit(cut, verbose=0)


def test_strategies_of_other_kinds_are_refused_with_what_to_use_instead():
    class Own(tf.distribute.MirroredStrategy):
        """Whose replicas may do anything."""

    for strategy in (Own(["CPU:0"]), tf.distribute.MultiWorkerMirroredStrategy()):
        with pytest.raises(tfdp_rec.NotPrivate, match="under tf.distribute.MirroredStrategy; on several machines"):
            of_scope(strategy)


def test_an_ordinary_optimizer_of_a_strategy_may_be_replaced():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    model = of_scope(strategy, "sgd")
    model.fit(IDS, Y, batch_size=8, verbose=0)
    with strategy.scope():
        model.compile("adam", "mse")  # its steps could not be read
    assert type(model.optimizer) is keras.optimizers.Adam


def test_ordinary_training_of_a_model_that_was_private_is_refused_in_a_scope_alone():
    """It ended in an assertion without words."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    model = of_scope(strategy)
    model.fit(IDS, Y, batch_size=8, verbose=0)
    with strategy.scope(), pytest.raises(ValueError, match="have one copy since .* outside the scope, or make a new m"):
        model.compile("sgd", "mse")
    model.compile("sgd", "mse")
    for fit in (lambda: model.fit(IDS, Y, verbose=0), lambda: model.train_on_batch(IDS[:8], Y[:8])):
        with strategy.scope(), pytest.raises(ValueError, match="have one copy"):
            fit()
    model.fit(IDS, Y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 5


def test_a_dense_optimizer_and_a_grown_model_of_a_scope():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        settings = dict(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
        optimizer = tfdp_rec.LazyDPSGD(0.1, dense_optimizer=keras.optimizers.Adam(0.01), **settings)
    model = of_scope(strategy, optimizer)
    model.fit(IDS, Y, batch_size=8, verbose=0)
    assert int(optimizer.dense_optimizer.iterations) == 5
    inputs = keras.Input([], dtype="int64")
    outputs = keras.layers.Dense(1)(keras.layers.Embedding(50, 2)(inputs))
    grown = model.grow_into(tfdp_rec.PrivateModel(inputs, outputs))
    assert grown.private_step.devices == model.private_step.devices != ()


def test_variables_that_are_made_after_compile_have_one_copy():
    class Late(tfdp_rec.PrivateTraining, keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.out = keras.layers.Embedding(40, 2), keras.layers.Dense(1)

        def call(self, ids):
            return self.out(self.table(ids))

    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = Late()
        model.compile(tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8), "mse")
        model(IDS)
        assert model.weights[0].value.shape == (40, 2)
    model.fit(IDS, Y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 5
