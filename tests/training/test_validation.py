"""`validate` says all at once what training would say one by one, and trains nothing."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp_rec
from tfdp_rec.core.sensitivity.independence import ByExample, reading, rule

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=[6, 3]).astype("float32"), RNG.normal(size=[6, 1]).astype("float32")
IDS = RNG.integers(0, 9, size=[6, 4])
SEQUENCES = RNG.normal(size=[6, 5, 3]).astype("float32")


class Layered(tfdp_rec.PrivateTraining, keras.Model):
    """Layers in a row under a loss of one's own."""

    def __init__(self, parts, loss=None, **options):
        super().__init__(**options)
        self.parts, self.loss_of = parts, loss or (lambda h: tf.reduce_sum(tf.square(h), axis=-1))

    def per_example_loss(self, data, training=True):
        for part in self.parts:
            data = part(data)
        return self.loss_of(data)


def private():
    return tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=6)


def said_in_training(model, batch):
    """What the first step says."""
    model.compile(private())
    with pytest.raises(ValueError) as refused:
        model.train_on_batch(batch)
    return str(refused.value)


def in_batch_negatives(h):
    logits = tf.matmul(h, h, transpose_b=True)
    return tf.reduce_logsumexp(logits, axis=1)


def over_the_batch(h):
    return tf.reduce_sum(h - tf.reduce_mean(h, axis=0), axis=-1)


def two_faults(h):
    return in_batch_negatives(h) + over_the_batch(h)


@pytest.mark.slow
def test_a_model_that_can_be_trained_is_described():
    parts = [layers.Embedding(1000, 4, name="ids"), layers.SimpleRNN(3, name="rnn"), layers.Dense(2, name="top")]
    model = Layered(parts, name="recurrent")
    report = tfdp_rec.validate(model, IDS)
    assert report.ok and not report.refusals
    assert str(report).splitlines() == [
        "Model 'recurrent' can be trained privately.",
        "",
        "How its layers are clipped:",
        "  ids (Embedding): by row, table of 1,000 rows of 4",
        "  rnn (SimpleRNN): one formed gradient an example, 24 weights",
        "  top (Dense): closed form, 8 weights",
        "",
        "On batches of 2 and 300 examples, which repeat 6 distinct examples of this",
        "  batch, each example's loss, its layers' inputs and their output gradients were",
        "  compared with those of the example alone.",
    ]
    model.compile(private())
    model.train_on_batch(IDS)


FAULTY = {
    "a layer": ([layers.BatchNormalization(name="bn"), layers.Dense(1)], None, X, "'bn'"),
    "dropout within": ([layers.GRU(2, dropout=0.5, name="gru"), layers.Dense(1)], None, SEQUENCES, "'gru' has dropout"),
    "a rule": (
        [layers.Conv1D(3, 2, data_format="channels_first", name="c"), layers.Flatten()], None, SEQUENCES,
        "'c'.*channels_last",
    ),
    "a regularizer": ([layers.Dense(1, activity_regularizer="l2", name="r")], None, X, "'r'.*activity_regularizer"),
    "negatives": ([layers.Dense(2)], in_batch_negatives, X, r"MatMul in .*\(in_batch_negatives\)"),
    "a mean": ([layers.Dense(2)], over_the_batch, X, r"Mean in .*\(over_the_batch\)"),
    "one loss": ([layers.Dense(2)], tf.reduce_mean, X, "one loss an example"),
    "one name": ([layers.Dense(2, name="d"), layers.Dense(2, name="d")], None, X, "distinct names"),
    "uncovered": ([layers.Dense(2, activation=layers.PReLU(), name="d")], None, X, "'d' gives no gradient for.*alpha"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTY)
def test_one_fault_is_told_as_training_tells_it(name):
    parts, loss, x, match = FAULTY[name]
    model = Layered([keras.layers.deserialize(keras.layers.serialize(part)) for part in parts], loss)
    report = tfdp_rec.validate(model, x)
    said = said_in_training(model, x)
    assert not report.ok and len(report.refusals) == 1, report
    assert report.refusals[0].split(" (found in ")[0] in said
    assert max(map(len, str(report).splitlines())) <= 80
    assert re.search(match, report.refusals[0], re.S)


@pytest.mark.slow
def test_all_faults_are_told_at_once():
    parts = [
        layers.Embedding(9, 3, embeddings_regularizer="l1", name="table"),
        layers.GRU(3, recurrent_dropout=0.5, return_sequences=True, name="gru"),
        layers.Conv1D(3, 2, data_format="channels_first", name="conv"),
        layers.Flatten(),
        layers.BatchNormalization(name="norm"),
        layers.Dense(2, name="top"),
    ]
    report = tfdp_rec.validate(Layered(parts, two_faults, name="faulty"), IDS)
    saids = "'gru' has dropout", "'norm'", "'conv'", "'table/embeddings'", "(in_batch_negatives)", "(over_the_batch)"
    for said in saids:
        assert sum(said in refusal for refusal in report.refusals) == 1, (said, str(report))
    assert len(report.refusals) == 6, str(report)
    assert [layer.layer for layer in report.layers] == ["table", "top"]
    assert "for 6 reasons:" in str(report)
    for refusal in report.refusals:
        assert refusal.endswith(".") and len(refusal) < 500


def test_mended_one_by_one_none_was_left_out():
    """What is found at once is what runs into a refusal again and again find."""
    found = set(tfdp_rec.validate(Layered([layers.Dense(2)], two_faults), X).refusals)
    assert {said.split(" in ")[0] for said in found} == {"MatMul", "Mean"}
    assert "MatMul" in said_in_training(Layered([layers.Dense(2)], in_batch_negatives), X)
    assert "Mean" in said_in_training(Layered([layers.Dense(2)], over_the_batch), X)


def test_nothing_is_trained_and_nothing_left_behind():
    model = Layered([layers.Dense(2), layers.Dropout(0.5), layers.BatchNormalization()])
    model.per_example_loss(X)
    before = [np.array(w) for w in model.weights]
    tfdp_rec.validate(model, X)
    assert all("call" not in vars(part) for part in model.parts)
    for old, new in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_functional_model_with_a_keras_loss():
    inputs = keras.Input([3])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1)(inputs))
    assert "compile(loss=...)" in tfdp_rec.validate(model, (X, Y)).refusals[0]
    model.compile(loss="mse")
    assert tfdp_rec.validate(model, (X, Y)).ok
    model.compile(private(), loss="hinge")  # which asks whether all labels of the batch are 0 or 1
    assert not tfdp_rec.validate(model, (X, Y)).ok


def test_a_compute_loss_that_is_no_mean_is_told_of_beside_layers():
    class OfABatch(tfdp_rec.PrivateModel):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_max(y_pred)

    inputs = keras.Input([3])
    model = OfABatch(inputs, layers.Dense(1)(layers.BatchNormalization(name="bn")(inputs)))
    first, second = tfdp_rec.validate(model, (X, Y)).refusals
    assert "'bn'" in first and "ends in Max" in second


def test_a_model_of_keras_alone_is_looked_at_too():
    model = keras.Sequential([keras.Input([3]), layers.BatchNormalization(name="bn"), layers.Dense(1)])
    report = tfdp_rec.validate(model, (X, Y))
    assert "give compile(loss=...)" in report.refusals[0] and "'bn'" in report.refusals[1]
    assert "validate again" in str(report)
    model.compile("adam", "mse")
    assert [*map(str, tfdp_rec.validate(model, (X, Y)).refusals)] == [report.refusals[1]]

    class Own(keras.Model):
        pass

    assert "class Own(tfdp_rec.PrivateTraining, keras.Model)" in tfdp_rec.validate(Own(), (X, Y)).refusals[0]


@pytest.mark.parametrize("ids", [tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[1, 0], [0, 2]])])
def test_a_batch_without_fixed_shapes(ids):
    report = tfdp_rec.validate(Layered([layers.Embedding(4, 2)]), ids)
    assert len(report.refusals) == 1 and type(ids).__name__ in report.refusals[0]


def test_what_gradients_alone_show():
    """A row looked up for all examples has a part for each; behind a layer that bends it, nothing tells them apart."""

    class Bends(Layered):
        def per_example_loss(self, data, training=True):
            table, bend = self.parts
            return tf.reduce_sum(tf.matmul(data["x"], bend(table(tf.range(9))), transpose_b=True), axis=-1)

    tables = [layers.Embedding(9, 3, name=f"table_{n}") for n in range(2)]
    assert tfdp_rec.validate(Bends([tables[0], layers.Activation("linear")]), {"x": X}).ok
    bent = Bends([tables[1], layers.Activation("tanh")])
    (refusal,) = tfdp_rec.validate(bent, {"x": X}).refusals
    for said in (refusal, said_in_training(bent, {"x": X})):
        assert said.startswith("TanhGrad") and "each example's part in it is unknown" in said


def test_shared_inputs_are_the_same_for_all():
    class Towers(tfdp_rec.PrivateTraining, keras.Model):
        shared_inputs = ("negatives",)

        def __init__(self):
            super().__init__()
            self.users, self.scores = layers.Embedding(9, 4), tfdp_rec.CandidateScores(9, 4)

        def per_example_loss(self, data, training=True):
            logits = self.scores(self.users(data["user"]), data["item"], data["negatives"])
            return tf.reduce_logsumexp(logits, axis=1) - logits[:, 0]

    batch = {"user": IDS[:, 0], "item": IDS[:, 1], "negatives": np.array([1, 2, 3])}
    report = tfdp_rec.validate(Towers(), batch)
    assert report.ok, str(report)
    assert [layer.way.split(", table")[0] for layer in report.layers] == [
        "by row", "by row, shared candidates in closed form",
    ]  # fmt: skip


# Examples alone and among others, which knows no rule of the reading.


@pytest.fixture
def a_false_rule():
    """Has the reading take a choice, and a sum along an axis, for each example's own."""
    kinds = ("SelectV2", "Cumsum")
    rules = dict(reading._RULES)
    rule(*kinds, sizes=True)(lambda at: ByExample(0))
    yield
    reading._RULES.clear()
    reading._RULES.update(rules)


def summed_over_the_batch(h):
    return tf.reduce_sum(tf.cumsum(h, axis=0), axis=-1)


def summed_in_long_batches(h):
    return tf.reduce_sum(tf.where(tf.shape(h)[0] > 256, tf.cumsum(h, axis=0), h), axis=-1)


@pytest.mark.parametrize("loss, size", [(summed_over_the_batch, 2), (summed_in_long_batches, 300)])
def test_a_model_that_a_false_rule_lets_pass_is_refused_by_its_examples_alone(loss, size, a_false_rule):
    report = tfdp_rec.validate(Layered([layers.Dense(2, name="top")], loss), X)
    (refusal,) = report.refusals
    assert refusal.startswith(f"In a batch of {size} made of this one's examples, the loss of the example at place ")
    assert len(refusal) < 500 and not report.ok


def test_examples_that_are_alike_are_said_to_be_one():
    report = tfdp_rec.validate(Layered([layers.Dense(2)]), np.ones([6, 3], "float32"))
    assert report.ok and "which repeat 1 distinct" in report.compared


class Counted(Layered):
    """Updates a metric, and drops out."""

    def __init__(self, parts):
        super().__init__([*parts, layers.Dropout(0.5, seed=3)])
        self.seen = keras.metrics.Sum(name="seen")

    def per_example_loss(self, data, training=True):
        self.seen.update_state(tf.ones_like(data[:, 0]))
        return super().per_example_loss(data, training)


def test_a_comparison_changes_neither_metrics_nor_seeds():
    model = Counted([layers.Dense(2)])
    report = tfdp_rec.validate(model, X)
    assert report.ok and "repeat 6 distinct" in report.compared
    assert float(model.seen.result()) == 0.0
    assert model.parts[-1].seed_generator.state.numpy().tolist() == [3, 0]


def test_what_all_examples_share_is_named():
    class Positions(Layered):
        def per_example_loss(self, data, training=True):
            table, top = self.parts
            return tf.reduce_sum(tf.square(top(data + tf.squeeze(table(tf.range(3)), 1))), axis=-1)

    report = tfdp_rec.validate(Positions([layers.Embedding(3, 1, name="places"), layers.Dense(2)]), X)
    assert report.ok and "Not compared: an input of layer 'places', an output gradient of layer 'places'" in (
        report.compared
    )


class Noisy(Layered):
    """Draws numbers in its loss, in evaluation too."""

    def __init__(self, parts):
        super().__init__(parts)
        self.seeds = keras.random.SeedGenerator(3)

    def per_example_loss(self, data, training=True):
        noise = keras.random.normal(tf.shape(data), seed=self.seeds)
        return super().per_example_loss(data + noise, training)


def test_a_loss_that_draws_numbers_of_its_own_is_said_not_to_be_compared():
    report = tfdp_rec.validate(Noisy([layers.Dense(2)]), X)
    assert report.ok and "draws random numbers" in report.compared


@pytest.mark.slow
@pytest.mark.parametrize("settled", [True, False])
def test_a_model_that_was_trained_is_compared_too_and_its_tables_are_read_as_ever(settled):
    """Its rows are where only a step reads them, and may owe noise."""
    model = Layered([layers.Embedding(9, 2), layers.Flatten(), layers.Dense(1)])
    model.compile(private())
    model.train_on_batch(IDS)
    if settled:
        model.settle()
    report = tfdp_rec.validate(model, IDS)
    assert report.ok and "repeat 6 distinct" in report.compared
    tf.function(model.parts[0])(IDS)
    assert model.optimizer.releasable
