"""An L2 regularizer of a table is a decay of all its rows: trained, saved, resumed and shown, or refused in words."""

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from helpers import tensors_of_shape
from keras.regularizers import L1, L1L2, L2, OrthogonalRegularizer

import tfdp_rec
from tfdp_rec.callbacks import TrainingCheckpoint
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.optimizers import Adagrad, Preselection
from tfdp_rec.privacy import Accountant, BufferedToeplitz, Correlation, PoissonSampling
from tfdp_rec.training.validation import _check_tables

ROWS, WIDTH, SIZE = 53, 5, 4
RNG = np.random.default_rng(4)
IDS = RNG.integers(0, ROWS, [12, 3]).astype("int32")
LABELS = RNG.normal(size=[12, 1]).astype("float32")
BASICS = {"l2_norm_clip": 1.0, "noise_multiplier": 0.7, "expected_batch_size": SIZE}
WITHOUT_PRIVACY = {**BASICS, "l2_norm_clip": 1e6, "noise_multiplier": 0.0}
VOTE = {"contribution_clip": 1.0, "contribution_noise_multiplier": 1.0, "threshold": 1.0}


def batches():
    return tf.data.Dataset.from_tensor_slices((IDS, LABELS)).batch(SIZE)


class Halved(L2):
    """What looks like L2 and is not."""

    def __call__(self, x):
        return 0.5 * super().__call__(x)


STRONG, WEAK = L2(0.2), L2(0.03)


def model_of(optimizer, regularizer=STRONG, other=WEAK, **options):
    seeding.seed(0)
    ids = keras.Input([3], dtype="int32")
    some = keras.layers.Embedding(ROWS, WIDTH, embeddings_regularizer=regularizer, name="some")(ids)
    others = keras.layers.Embedding(ROWS, 2, embeddings_regularizer=other, name="others")(ids)
    free = keras.layers.Embedding(ROWS, 3, name="free")(ids)
    hidden = keras.layers.Flatten()(keras.layers.Concatenate()([some, others, free]))
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1, kernel_regularizer=L2(0.1))(hidden))
    model.compile(optimizer, loss="mse", **options)
    return model


def assert_alike(some, others, rtol=2e-5):
    for one, other in zip(some, others, strict=True):
        assert np.max(np.abs(one - other)) <= rtol * np.max(np.abs(other))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [tfdp_rec.LazyDPSGD, tfdp_rec.DPSGD], ids=lambda kind: kind.__name__)
def test_without_clip_and_noise_it_is_what_keras_trains(kind):
    """Keras adds the penalty to the loss, and its SGD reads all of the table for it."""
    rates = lambda: keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)  # noqa: E731
    keras_own, private = model_of(keras.optimizers.SGD(rates())), model_of(kind(rates(), **WITHOUT_PRIVACY))
    for model in (keras_own, private):
        model.fit(batches(), epochs=3, verbose=0, shuffle=False)
    assert_alike(private.get_weights(), keras_own.get_weights())


@pytest.mark.slow
def test_a_saved_model_goes_on_as_if_it_had_not_been_saved(tmp_path):
    make = lambda: tfdp_rec.LazyDPSGD(0.4, **{**BASICS, "noise_multiplier": 0.0})  # noqa: E731
    whole, first = model_of(make()), model_of(make())
    whole.fit(batches(), epochs=4, verbose=0)
    first.fit(batches(), epochs=2, verbose=0)
    first.save(tmp_path / "model.keras")
    second = keras.models.load_model(tmp_path / "model.keras")
    second.fit(batches(), epochs=2, verbose=0)
    assert_alike(second.get_weights(), whole.get_weights())


def resumed(directory, **options):
    model = model_of(tfdp_rec.LazyDPSGD(0.4, **BASICS, noise=KeyedNoise(2), aggregate_noise=False), **options)
    event, sampling = model.optimizer.dp_event(), PoissonSampling(len(IDS), BASICS["expected_batch_size"])
    accountant = Accountant(event, sampling, delta=1e-3, accountant="rdp", ledger=directory / "ledger.jsonl")
    checkpoint = TrainingCheckpoint(directory / "training", every=1, accountant=accountant)
    model.prepare((IDS[:1], LABELS[:1]))
    try:
        checkpoint.resume(model)
    finally:
        accountant.close()
    return model, checkpoint


@pytest.mark.slow
def test_a_checkpoint_keeps_what_regularized_rows_owe_and_their_regularizer(tmp_path):
    eager = model_of(tfdp_rec.DPSGD(0.4, **BASICS, noise=KeyedNoise(2)))
    eager.fit(batches(), epochs=2, verbose=0)
    for _ in range(2):
        model, checkpoint = resumed(tmp_path)
        model.fit(batches(), initial_epoch=0, epochs=2, verbose=0, callbacks=[checkpoint, _StopAfter(3)])
    model, _ = resumed(tmp_path)
    assert int(model.optimizer.iterations) == 6
    assert_alike(model.get_weights(), eager.get_weights())
    with pytest.raises(ValueError, match="regularizers of tables.*0.4.*0.6"):
        resumed(tmp_path, regularizer=L2(0.3))


class _StopAfter(keras.callbacks.Callback):
    keeps_off_weights = True

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training = self.left == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}])
def test_no_step_reads_a_table_for_its_penalty_and_the_loss_shown_is_the_examples(options):
    model = model_of(tfdp_rec.LazyDPSGD(0.1, **BASICS), **options)
    model.prepare((IDS[:1], LABELS[:1]))
    step = tf.function(lambda *batch: model.train_step(batch), autograph=False)
    graph = step.get_concrete_function(*batches().element_spec).graph
    assert tensors_of_shape(graph, [ROWS, WIDTH]) == []
    expected = np.mean((model(IDS[:SIZE]).numpy() - LABELS[:SIZE]) ** 2)
    found = model.train_on_batch(IDS[:SIZE], LABELS[:SIZE], return_dict=True)["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


LAZY = tfdp_rec.LazyDPSGD
REFUSED = {
    "L1": (L1(0.1), lambda: LAZY(0.1, **BASICS), "L1, which would touch every row.*use keras.regularizers.L2"),
    "L1 and L2": (L1L2(0.1, 0.1), lambda: LAZY(0.1, **BASICS), r"L1L2\(l1=0.1\)"),
    "one of one's own": (Halved(0.1), lambda: LAZY(0.1, **BASICS), "Halved"),
    "another of Keras": (OrthogonalRegularizer(), lambda: LAZY(0.1, **BASICS), "OrthogonalRegularizer"),
    "EANA": (L2(0.1), lambda: tfdp_rec.EANA(0.1, **BASICS), "EANA moves only some rows"),
    "AdaFEST": (L2(0.1), lambda: tfdp_rec.AdaFEST(0.1, **BASICS, **VOTE), "AdaFEST moves only some rows"),
    "FEST": (
        L2(0.1), lambda: tfdp_rec.FEST(0.1, **BASICS, preselection=Preselection({"some/embeddings": [1]})),
        "FEST moves only some rows",
    ),
    "exponential": (
        L2(0.1), lambda: tfdp_rec.optimizers.ExponentialSelectionSGD(
            0.1, **BASICS, num_survivors=3, selection_epsilon=1.0
        ), "moves only some rows",
    ),
    "momentum": (L2(0.1), lambda: LAZY(0.1, **BASICS, momentum=0.5), "momentum has no exact lazy form"),
    "Nesterov": (L2(0.1), lambda: tfdp_rec.DPSGD(0.1, **BASICS, momentum=0.5, nesterov=True), "momentum has no exact"),
    "correlated momentum": (
        L2(0.1), lambda: tfdp_rec.LazyDPFTRL(
            0.1, **BASICS, momentum=0.5, correlation=Correlation(BufferedToeplitz(), steps=9, separation=3)
        ), "momentum has no exact lazy form",
    ),
    "a rule": (L2(0.1), lambda: tfdp_rec.DPSGD(0.1, **BASICS, table_rule=Adagrad()), r"table_rule=Adagrad"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_exact_decay_is_refused_in_training_and_told_before(name):
    regularizer, optimizer, match = REFUSED[name]
    model = model_of(optimizer(), regularizer, None)
    with pytest.raises(NotPrivate, match=match) as refused:
        model.train_on_batch(IDS[:SIZE], LABELS[:SIZE])
    assert [str(refused.value)] == _check_tables(model, {"some/embeddings"})
    if name in ("L1", "EANA"):  # the whole of it takes seconds
        assert [str(refused.value)] == list(tfdp_rec.validate(model, (IDS, LABELS)).refusals)
    assert len(str(refused.value)) < 500 and str(refused.value).endswith(".")


@pytest.mark.slow
def test_a_step_that_would_leave_nothing_of_a_weight_is_refused_when_it_is_known():
    model = model_of(LAZY(2.5, **BASICS))
    with pytest.raises(ValueError, match="2.5 . 0.4 with the regularizer of 'some/embeddings'"):
        model.train_on_batch(IDS[:SIZE], LABELS[:SIZE])
    model = model_of(LAZY(2.0, **BASICS))
    model.train_on_batch(IDS[:SIZE], LABELS[:SIZE])
    before = model.get_weights()
    model.optimizer.learning_rate = 2.5
    with pytest.raises(tf.errors.InvalidArgumentError, match="must stay below 1 for lazy decay"):
        model.train_on_batch(IDS[:SIZE], LABELS[:SIZE])
    assert_alike(model.get_weights(), before, rtol=0)


def test_a_constraint_is_refused():
    model = model_of(LAZY(0.1, **BASICS))
    model.get_layer("some").embeddings.constraint = keras.constraints.NonNeg()
    with pytest.raises(NotPrivate, match="has a constraint"):
        model.train_on_batch(IDS[:SIZE], LABELS[:SIZE])


@pytest.mark.slow
def test_a_regularized_table_that_two_models_share_is_refused():
    table = keras.layers.Embedding(ROWS, WIDTH, embeddings_regularizer=L2(0.1), name="items")

    def sharing():
        ids = keras.Input([3], dtype="int32")
        model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
        model.compile(LAZY(0.1, **BASICS), loss="mse")
        return model

    sharing().train_on_batch(IDS[:SIZE], LABELS[:SIZE])
    with pytest.raises(NotPrivate, match="has a regularizer"):
        sharing().train_on_batch(IDS[:SIZE], LABELS[:SIZE])


@pytest.mark.slow
def test_compiled_anew_it_goes_on():
    model, steps, unread = model_of(LAZY(0.1, **WITHOUT_PRIVACY)), len(batches()), np.setdiff1d(np.arange(ROWS), IDS)
    before = np.array(model.get_layer("some").embeddings)[unread]
    model.fit(batches(), verbose=0)
    model.compile(LAZY(0.2, **WITHOUT_PRIVACY), loss="mse")
    model.fit(batches(), verbose=0)
    after = np.array(model.get_layer("some").embeddings)[unread]
    assert len(unread) and steps > 1
    np.testing.assert_allclose(after, before * ((1 - 0.1 * 0.4) * (1 - 0.2 * 0.4)) ** steps, rtol=1e-5)


class Seeing(
    keras.regularizers.Regularizer, keras.constraints.Constraint, keras.optimizers.schedules.LearningRateSchedule
):
    """A regularizer, a constraint and a schedule of something that a step has computed."""

    def __init__(self, seen):
        self.seen = seen

    def __call__(self, given):
        return self.seen() * tf.cast(given, "float32")

    def get_config(self):
        return {}


class Shows(tfdp_rec.PrivateTraining, keras.Model):
    """Notes its batch in a metric, and in an attribute."""

    def __init__(self, of, **options):
        super().__init__()
        self.total = keras.metrics.Sum(name="total")
        self.kept = [tf.Variable(1000.0)]  # held by nothing that Keras looks into
        sees = {
            "a metric": self.total.result,
            "the batch": lambda: tf.reduce_sum(self.x),
            "another variable": lambda: tf.identity(self.kept[0]),
            "another weight": lambda: tf.reduce_sum(tf.convert_to_tensor(self.dense.bias)),
            "a constant": lambda: 1.0,
        }
        self.sees = sees[of]
        options = {name: Seeing(self.sees) for name in options}
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros", **options)

    def per_example_loss(self, data, training=True):
        self.x = data
        self.total.update_state(data)
        return tf.square(self.dense(data)[:, 0])


@pytest.mark.slow_cases("kernel_regularizer-a constant", "kernel_constraint-a constant")
@pytest.mark.parametrize("of", ["a metric", "the batch", "another variable", "another weight", "a constant"])
@pytest.mark.parametrize(
    "by", ["kernel_regularizer", "kernel_constraint", "a schedule", "another schedule", "a function"]
)
def test_what_moves_weights_beside_the_clipped_sum_sees_no_data(by, of):
    """One example in four moved the weights by 8e8 clips through a regularizer, without noise."""
    model = Shows(of, **({by: None} if by.startswith("kernel") else {}))
    settings = {**BASICS, "learning_rate": 0.1, "l2_norm_clip": 1e-6}
    if by == "a schedule":
        settings["learning_rate"] = Seeing(model.sees)
    elif by.startswith("a"):
        rate = Seeing(model.sees) if by == "another schedule" else model.sees
        settings["dense_optimizer"] = keras.optimizers.SGD(rate)
    model.compile(tfdp_rec.DPSGD(**settings))
    rows = tf.data.Dataset.from_tensors(np.array([[1000.0, 1.0], [1.0, 1.0]], "float32"))
    if of == "a constant":
        model.fit(rows, verbose=0)
        return
    with pytest.raises(NotPrivate, match="depends on the batch, on a metric"):
        model.fit(rows, verbose=0)
    assert not np.any(model.dense.get_weights()[0])


class Writes(keras.constraints.Constraint, keras.optimizers.schedules.LearningRateSchedule):
    """A constraint and a schedule that keep what a step's loss has left in Python."""

    def __init__(self, left, bank):
        self.left, self.bank = left, bank

    def __call__(self, given):
        for rows in self.left:
            self.bank.assign(rows[0])
        return tf.constant(0.1) if isinstance(given, tf.Tensor) and given.shape.rank == 0 else given

    def get_config(self):
        return {}


@pytest.mark.parametrize("by", ["constraint", "rate"])
def test_what_moves_weights_beside_the_clipped_sum_keeps_no_data(by):
    left, bank = [], tf.Variable([0.0, 0.0])

    class Leaves(tfdp_rec.PrivateTraining, keras.Model):
        def per_example_loss(self, data, training=True):
            left.append(data)
            return tf.square(self.dense(data)[:, 0])

    model = Leaves()
    model.dense = keras.layers.Dense(1, kernel_constraint=Writes(left, bank) if by == "constraint" else None)
    model.compile(tfdp_rec.DPSGD(**BASICS, learning_rate=Writes(left, bank) if by == "rate" else 0.1))
    with pytest.raises(NotPrivate, match="depends on the batch"):
        model.fit(tf.data.Dataset.from_tensors(np.ones([2, 2], "float32")), verbose=0)
    assert not np.any(bank)


class Scaled(keras.layers.Layer):
    """Its input, times what something computes."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def call(self, x):
        return x * (1.0 + self.by())


@pytest.mark.fast_cases("kernel_regularizer", "loss", "rate")
@pytest.mark.parametrize("by", ["kernel_regularizer", "kernel_constraint", "loss", "call", "rate", "nothing"])
def test_a_metric_given_to_compile_is_a_metric_before_it_has_seen_a_batch(by):
    """Keras lists its variables from the first update on. One example of 1e6 moved all weights by more than 1e8."""
    seen = keras.metrics.MeanSquaredError()
    options = {by: Seeing(seen.result)} if by.startswith("kernel") else {}
    inputs = keras.Input([3])
    dense = keras.layers.Dense(1, **options)
    outputs = dense(inputs)
    model = tfdp_rec.PrivateModel(inputs, Scaled(seen.result)(outputs) if by == "call" else outputs)
    loss = (lambda y, p: tf.reduce_mean(tf.square(y - p), -1) * (1.0 + seen.result())) if by == "loss" else "mse"
    rate = Seeing(seen.result) if by == "rate" else 0.1
    model.compile(tfdp_rec.DPSGD(**{**BASICS, "learning_rate": rate}), loss, metrics=[seen])
    before = dense.get_weights()[0]
    x, y = np.ones([4, 3], "float32"), np.ones([4, 1], "float32")
    if by == "nothing":
        model.fit(x, y, batch_size=2, verbose=0)
        return
    with pytest.raises(NotPrivate, match="metric"):
        model.fit(x, y, batch_size=2, verbose=0)
    np.testing.assert_array_equal(dense.get_weights()[0], before)


@pytest.mark.parametrize("by", ["call", "loss"])
def test_so_it_is_ahead_of_any_fit(by):
    """In predictions, and in sums that are made by hand."""
    seen = keras.metrics.MeanSquaredError()
    inputs = keras.Input([3])
    outputs = keras.layers.Dense(1)(inputs)
    model = tfdp_rec.PrivateModel(inputs, Scaled(seen.result)(outputs) if by == "call" else outputs)
    loss = (lambda y, p: tf.reduce_mean(tf.square(y - p), -1) * (1.0 + seen.result())) if by == "loss" else "mse"
    model.compile(tfdp_rec.DPSGD(**BASICS, learning_rate=0.1), loss, metrics=[seen])
    x, y = tf.ones([4, 3]), tf.ones([4, 1])
    with pytest.raises(NotPrivate, match="metric"):
        model(x) if by == "call" else tfdp_rec.clipping.clipped_sum(model, (x, y), 1.0)


@pytest.mark.parametrize("by", ["a constraint", "a schedule"])
def test_nor_may_they_in_a_loop_of_ones_own(by):
    seen = keras.metrics.Sum()
    dense = keras.layers.Dense(1, kernel_constraint=Seeing(seen.result) if by == "a constraint" else None)
    inputs = keras.Input([3])
    model = tfdp_rec.PrivateModel(inputs, dense(inputs))
    rate = Seeing(seen.result) if by == "a schedule" else 0.1
    model.compile(tfdp_rec.DPSGD(**{**BASICS, "learning_rate": rate}), "mse")
    batch = (tf.ones([2, 3]), tf.ones([2, 1]))
    model.prepare(batch)
    clipped = tfdp_rec.clipping.clipped_sum(model, batch, 1.0)
    with pytest.raises(NotPrivate, match="on a metric"):
        model.optimizer.apply(clipped)
    assert int(model.optimizer.iterations) == 0


def test_an_optimizer_of_ones_own_is_not_known_to_read_no_metric():
    class Adds(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient + 1.0, variable, learning_rate)

    with pytest.raises(NotPrivate, match="class of Keras' own, got Adds"):
        tfdp_rec.DPSGD(**BASICS, learning_rate=0.1, dense_optimizer=Adds())
