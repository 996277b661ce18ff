"""The inequality privacy stands on: one example more or less moves the clipped sum by at most the clip.

And what would break it is caught: coupled models, and a rule that someone registered and got wrong.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored, dense_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers
from zoo import SIZE, built, examples

import tfdp_rec
from tfdp_rec.clipping import Clipping, check, clipped_sum
from tfdp_rec.core.ground.keras_internals import random_states
from tfdp_rec.core.sensitivity.engine import Graph
from tfdp_rec.core.sensitivity.independence import ByExample, reading


def distance(model, a, b):
    a, b = dense_gradients(model, a), dense_gradients(model, b)
    return np.sqrt(sum(np.sum((a[path] - b[path]) ** 2) for path in a))


@functools.cache
def traced(name):
    """A model of the zoo, its batch, and its clipped sum of a batch by a clip, traced once."""
    model, batch = built(name)
    loss = lambda data: model.per_example_loss(data, training=False)  # noqa: E731
    once = Graph(lambda data, clip: (Clipping(model, loss, clip).sum(data), None), model.shared_inputs)
    return model, batch, lambda data, clip: once(tf.nest.map_structure(tf.convert_to_tensor, data), clip)[0]


@pytest.mark.fast_cases("mlp")
@pytest.mark.parametrize("name", ["mlp", "two_tower", "dlrm", pytest.param("transformer", marks=pytest.mark.slow)])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    left_out=st.integers(0, SIZE - 1),
    size=st.integers(1, SIZE),
    clip=st.sampled_from([0.01, 1.0, 100.0]),
)
def test_neighbouring_batches(name, seed, left_out, size, clip):
    """Also: leaving out one example changes no other example's norm, loss or contribution."""
    model, batch, clipped = traced(name)
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape) * 0.5)
    left_out = left_out % size
    rest = [i for i in range(size) if i != left_out]
    batch = examples(batch, list(range(size)), model.shared_inputs)
    summed = lambda data: clipped(data, tf.constant(clip))  # noqa: E731
    fewer = examples(batch, rest, model.shared_inputs)
    whole, without = summed(batch), summed(fewer)
    assert distance(model, whole, without) <= clip * (1 + 1e-5)
    np.testing.assert_allclose(np.asarray(whole.norms)[rest], without.norms, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(whole.losses)[rest], without.losses, rtol=1e-5, atol=1e-6)
    alone = summed(examples(batch, [left_out], model.shared_inputs))
    together = dense_gradients(model, whole)
    for path, own in dense_gradients(model, alone).items():
        others = dense_gradients(model, without)[path]
        np.testing.assert_allclose(together[path], others + own, rtol=1e-4, atol=1e-5 * clip)


@pytest.mark.fast_cases("mlp")
@pytest.mark.parametrize("name", ["mlp", "two_tower", "dlrm"])
def test_check_passes_sound_models(name):
    model, batch = built(name)
    assert check(model, batch) is None, "a model that mixes its examples would be refused"


@pytest.mark.slow
def test_check_passes_dropout_and_leaves_it_where_it_was():
    model = functional(layers.Dense(4), layers.Dropout(0.5, seed=1))
    model.compile(mechanism(), "mse")
    state = [tf.identity(v.value) for v in model.non_trainable_variables]
    check(model, numbers())
    assert state and all(np.array_equal(v, before) for v, before in zip(model.non_trainable_variables, state))


class Remembering(layers.Layer):
    """Keeps the mean of what it was last called with."""

    def build(self, shape):
        self.kept = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="kept")

    def call(self, x):
        self.kept.assign(tf.reduce_mean(x, axis=0))
        return x


class DroppingWithin(layers.Layer):
    """Weights of its own, and Dropout that it calls itself."""

    def __init__(self):
        super().__init__()
        self.drop, self.kernel = layers.Dropout(0.5), self.add_weight((4, 3), name="kernel")

    def call(self, x, training=False):
        return self.drop(tf.matmul(x, self.kernel), training=training)


@pytest.mark.slow
def test_check_passes_dropout_within_a_layer_with_weights():
    """Its masks depend on an example's place in the batch, so that leaving one out changes those of the others."""
    inputs = keras.Input([4])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1)(DroppingWithin()(inputs)))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "mse")
    rng = np.random.default_rng(0)
    data = rng.normal(size=[6, 4]).astype("float32"), rng.normal(size=[6, 1]).astype("float32")
    one, other = (clipped_sum(model, data, 1.0).norms.numpy() for _ in range(2))
    assert not np.array_equal(one, other)  # masks are drawn
    check(model, data)
    again = clipped_sum(model, data, 1.0).norms.numpy()
    assert model.layers[1].drop.rate == 0.5 and not np.array_equal(again, other)  # as before


def test_check_refuses_a_layer_that_writes_state_as_fit_does():
    model = functional(Remembering(), layers.Dense(1))
    model.compile(mechanism(), "mse")
    for refused in (check, lambda model, batch: model.train_on_batch(*batch)):
        with pytest.raises(tfdp_rec.clipping.NotPrivate, match="kept"):
            refused(model, numbers())


@pytest.mark.slow
def test_check_passes_lookups_that_the_batch_shares():
    """Each example's part of them is told by the graph."""

    def forward(p, b):
        return p[3](p[2](p[0](b["ids"]) + p[1](tf.range(3)), training=True))

    parts = [layers.Embedding(5, 2), layers.Embedding(3, 2), layers.Dropout(0.5), layers.Dense(2)]
    model = Scored(parts, forward)
    batch = {"ids": np.random.default_rng(0).integers(0, 5, [4, 3]), "weight": np.ones([4], "float32")}
    model.per_example_loss(batch)
    check(model, batch, examples=1)
    parts[3].activation = lambda h: h - tf.reduce_mean(h, axis=0)
    with pytest.raises(tfdp_rec.NotPrivate, match="Mean"):
        check(model, batch, examples=1)


def test_check_looks_at_what_is_trained():
    """In evaluation this one reads its whole table, as those do that recommend by it."""

    class Best(layers.Layer):
        def call(self, rows):
            return tf.matmul(rows, self.candidates, transpose_b=True)

    class Retrieval(tfdp_rec.PrivateModel):
        def __init__(self):
            super().__init__()
            self.table, self.best = layers.Embedding(5, 2), Best()
            self.table.build(None)
            self.best.candidates = self.table.embeddings

        def call(self, ids, training=False):
            return self.table(ids) if training else self.best(self.table(ids))

        def per_example_loss(self, data, training=True):
            asked.add(training)
            return tf.reduce_sum(tf.square(self(data, training=training)), axis=1)

    asked = set()
    check(Retrieval(), np.arange(4), examples=1)
    assert asked == {True}


class Forgetful(tfdp_rec.clipping.DenseRule):
    """Takes each example's gradient for half of what it is."""

    def factors(self, call, gradients):
        for variable, factor in super().factors(call, gradients):
            factor.g = factor.g * 0.5 if hasattr(factor, "g") else None
            yield variable, factor


def test_check_catches_a_wrong_rule_by_the_variable_it_is_wrong_about():
    class Mine(layers.Dense):
        pass

    tfdp_rec.clipping.register(Mine, Forgetful())
    model = Scored([layers.Dense(3), Mine(2, use_bias=False, name="mine")], lambda p, b: p[1](p[0](b["x"])))
    batch = {"x": np.ones([3, 4], "float32"), "weight": np.ones([3], "float32")}
    model.per_example_loss(batch)
    with pytest.raises(tfdp_rec.NotPrivate, match="mine/kernel"):
        check(model, batch)


class Centred(layers.Layer):
    """Subtracts the batch's mean: coupling without a weight to its name."""

    def call(self, x):
        return x - tf.reduce_mean(x, axis=0)


class Accumulated(layers.Layer):
    """Running sums over the batch."""

    def call(self, x):
        return tf.cumsum(x, axis=0)


@pytest.mark.parametrize("coupled, match", [(Centred, "Mean in"), (Accumulated, "mixes the examples")])
def test_check_catches_coupled_models(coupled, match, monkeypatch):
    """By numbers alone where a rule of the reading is false."""
    false = reading._Registered(lambda at: ByExample(0), sizes=True)
    monkeypatch.setitem(reading._RULES, "Cumsum", false)
    model = Scored([layers.Dense(3), coupled()], lambda p, b: p[1](p[0](b["x"])))
    batch = {"x": np.random.default_rng(0).normal(size=[3, 4]).astype("float32"), "weight": np.ones([3], "float32")}
    model.per_example_loss(batch)
    with pytest.raises(tfdp_rec.NotPrivate, match=match):
        check(model, batch)
    with pytest.raises(ValueError, match="two examples"):
        check(model, {k: v[:1] for k, v in batch.items()})


# What fit refuses of itself, before the first step.


def mechanism():
    return tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)


class InBatch(tfdp_rec.PrivateTraining, keras.Model):
    """Two towers and the softmax over the other examples' items, as it is commonly written."""

    def __init__(self):
        super().__init__()
        self.users, self.items = layers.Embedding(9, 4), layers.Embedding(9, 4)

    def per_example_loss(self, data, training=True):
        scores = tf.matmul(self.users(data["user"]), self.items(data["item"]), transpose_b=True)
        return keras.losses.sparse_categorical_crossentropy(tf.range(tf.shape(scores)[0]), scores, from_logits=True)


PAIRS = {"user": np.arange(8) % 5, "item": np.arange(8)}


@pytest.mark.fast_cases("train_on_batch")
@pytest.mark.parametrize("how", ["dataset", "look-ahead", "train_on_batch"])
def test_a_softmax_over_the_batch_written_by_hand(how):
    model = InBatch()
    model.compile(mechanism())
    data = tf.data.Dataset.from_tensor_slices(PAIRS).batch(4)
    with pytest.raises(tfdp_rec.NotPrivate, match=r"MatMul in .*test_neighbours.py:\d+ \(per_example_loss\)"):
        if how == "train_on_batch":
            model.train_on_batch(PAIRS)
        else:
            model.fit(tfdp_rec.training.lookahead(data, model) if how == "look-ahead" else data, verbose=0)
    assert int(model.optimizer.iterations) == 0


def functional(*hidden):
    inputs = keras.Input([3])
    output = inputs
    for layer in hidden:
        output = layer(output)
    return tfdp_rec.PrivateModel(inputs, layers.Dense(1)(output))


def numbers(rows=8):
    rng = np.random.default_rng(0)
    return rng.normal(size=[rows, 3]).astype("float32"), rng.normal(size=[rows, 1]).astype("float32")


@pytest.mark.parametrize("loss", ["own", "coupled layer", "divided by the batch size"])
def test_coupling_in_a_compiled_model(loss):
    model = functional(*([Centred()] if loss == "coupled layer" else []))
    shared = lambda y, p: tf.square(y - p)[:, 0] / tf.cast(tf.shape(y)[0], tf.float32)  # noqa: E731
    model.compile(mechanism(), shared if loss == "divided by the batch size" else "mse")
    if loss == "own":
        model.fit(*numbers(), verbose=0)
        assert int(model.optimizer.iterations) == 1
    else:
        match = r"Mean in .*\(call\)" if loss == "coupled layer" else "number of examples"
        with pytest.raises(tfdp_rec.NotPrivate, match=match):
            model.fit(*numbers(), verbose=0)


class MixUp(layers.Layer):
    """In training only, each example is averaged with its neighbour in the batch."""

    def call(self, x, training=False):
        return (x + tf.roll(x, 1, axis=0)) / 2 if training else x


def test_coupling_in_training_alone():
    model = functional(MixUp())
    model.compile(mechanism(), "mse")
    with pytest.raises(tfdp_rec.NotPrivate, match=r"\(call\).*puts several examples"):
        model.fit(*numbers(), verbose=0)


def test_a_batch_of_one_or_none_trains():
    model = functional()
    model.compile(mechanism(), "mse")
    x, y = numbers(1)
    model.train_on_batch(x, y)
    model.train_on_batch(x[:0], y[:0])
    assert int(model.optimizer.iterations) == 2


@pytest.mark.slow
def test_positions_as_many_as_examples_are_no_accident():
    """With T = batch size a position embedding looks like one row an example; the graph tells the difference."""

    class Positions(tfdp_rec.PrivateTraining, keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(8, 1)

        def per_example_loss(self, data, training=True):
            positions = self.table(tf.range(tf.shape(data)[1]))
            return tf.reduce_sum(data * tf.squeeze(positions, 1), axis=1)

    model = Positions()
    model.compile(mechanism())
    model.train_on_batch(tf.ones([4, 4]))
    found = clipped_sum(model, tf.ones([4, 4]), 10.0)
    np.testing.assert_allclose(found.norms, [2.0] * 4, rtol=1e-5)  # of four positions, each with gradient one
    dataset = tf.data.Dataset.from_tensors(np.ones([4, 4], "float32"))
    anyhow = dataset.map(lambda x: tf.ensure_shape(tf.py_function(lambda t: t, [x], tf.float32), [None, None]))
    with pytest.raises(tfdp_rec.NotPrivate, match="padded to their longest"):
        model.fit(anyhow, verbose=0)


def trained_on_rough_data(seed):
    """A model with everything that differs in training, and a batch of magnitudes from tiny to huge."""
    ids, numbers = keras.Input([2], dtype="int32"), keras.Input([6])
    rows = layers.Flatten()(layers.Embedding(50, 4)(ids))
    hidden = layers.Dropout(0.5)(layers.Dense(16, activation="relu")(layers.Concatenate()([rows, numbers])))
    hidden = layers.LayerNormalization()(layers.GaussianNoise(0.1)(hidden))
    model = tfdp_rec.PrivateModel([ids, numbers], layers.Dense(1)(hidden))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "mse")
    return model, np.random.default_rng(seed)


@pytest.mark.fast_cases("mixed_bfloat16")
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_removal_in_training_by_size(policy):
    """The last example's removal leaves everybody else's masks: what they are is then no matter."""
    keras.config.set_dtype_policy(policy)
    try:
        model, rng = trained_on_rough_data(0)
        clipping = Clipping(model, lambda data: model.per_example_loss(data, training=True), tf.constant(1.0))
        summed = Graph(lambda batch: (clipping.read_sum(batch), None))
        for size in (1, 2, 3, 129, 1024, 4096):
            scale = 10.0 ** rng.uniform(-8, 8, [size, 1])
            x = (rng.integers(0, 50, [size, 2]), (scale * rng.normal(size=[size, 6])).astype("float32"))
            y = (scale * rng.normal(size=[size, 1])).astype("float32")
            sums = []
            for count in (size, size - 1):
                for state in random_states(model):
                    state.assign([size, 5])
                batch = tf.nest.map_structure(tf.constant, ((x[0][:count], x[1][:count]), y[:count]))
                sums.append(summed(batch)[0])
            moved = distance(model, *sums)
            assert 0 < moved <= 1, (size, moved)
    finally:
        keras.config.set_dtype_policy("float32")
