"""What used to be refused for its looks and is private: each against the oracle of one example at a time."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored, assert_matches_oracle, double_precision, sums_of
from keras import layers

from tfdp_rec.clipping import clipped_sum
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.own_rows import own_rows

rng = np.random.default_rng(0)
SIZE = 4
IDS = rng.integers(0, 5, size=[SIZE, 3])
S = rng.normal(size=[SIZE, 3, 4])


@pytest.fixture(autouse=True, scope="module")
def float64():
    with double_precision():
        yield


def agrees(parts, forward, **batch):
    model = Scored(parts, forward)
    batch = {**batch, "weight": rng.uniform(0.1, 2.0, size=[SIZE])}
    model.per_example_loss(batch)
    for variable in model.trainable_variables:
        variable.assign(np.random.default_rng(1).normal(size=variable.shape) * 0.5)
    clipped = sums_of(model, np.float64(0.7), training=False)  # traced once, for the empty batch too
    found = assert_matches_oracle(model, batch, clip=0.7, take=lambda _, batch, clip: clipped(batch))
    assert clipped({k: v[:0] for k, v in batch.items()}).norms.shape == [0]
    return found


def test_ids_in_one_long_axis():
    """Repeated ids of one example meet across its positions: twice id 1 is one row's gradient."""

    def forward(p, b):
        rows = p[0](tf.reshape(b["ids"], [-1]))
        return tf.reshape(rows, [-1, 3, 2])

    ids = np.array([[1, 1, 2], [0, 0, 0], [3, 1, 3], [4, 4, 1]])
    found = agrees([layers.Embedding(5, 2)], forward, ids=ids)
    (reads,) = found.reads.values()
    assert list(zip(reads.example.numpy(), reads.ids.numpy())) == [(i, ids[i, j]) for i in range(4) for j in range(3)]


@pytest.mark.slow
def test_layers_on_rows_in_one_long_axis():
    def forward(p, b):
        h = p[1](p[0](tf.reshape(b["x"], [-1, 4])))
        h = p[3](p[2](h))
        return tf.reduce_sum(tf.reshape(h, [tf.shape(b["x"])[0], -1, 2]), axis=1)

    parts = [layers.Dense(3, activation="tanh"), layers.LayerNormalization(), layers.PReLU(), layers.Dense(2)]
    agrees(parts, forward, x=S)


def test_one_layer_on_one_axis_and_on_two():
    def forward(p, b):
        flat = tf.reshape(p[0](tf.reshape(b["x"], [-1, 4])), [-1, 3, 2])
        return flat * p[0](b["x"])

    agrees([layers.Dense(2, activation="tanh")], forward, x=S)


def test_a_convolution_on_merged_axes():
    def forward(p, b):
        windows = tf.reshape(b["x"], [-1, 4, 1])
        return tf.reshape(p[0](windows), [-1, 3, 3, 2])

    agrees([layers.Conv1D(2, 2)], forward, x=S)


def test_a_frozen_batch_normalization():
    normal = layers.BatchNormalization()
    normal(S[:, 0])
    normal.set_weights([rng.uniform(0.5, 2.0, size=[4]) for _ in range(4)])
    normal.trainable = False
    agrees([layers.Dense(4), normal, layers.Dense(2)], lambda p, b: p[2](p[1](p[0](b["x"]))), x=S[:, 0])


def test_frozen_in_training_it_keeps_its_statistics():
    inputs = keras.Input([4])
    normal = layers.BatchNormalization(trainable=False)
    model = keras.Sequential([inputs, normal, layers.Dense(1)])
    scored = Scored([model], lambda p, b: p[0](b["x"], training=True))
    before = [np.array(v) for v in normal.variables]
    clipped_sum(scored, {"x": S[:, 0], "weight": np.ones([SIZE])}, 1.0, training=True)
    for variable, value in zip(normal.variables, before):
        np.testing.assert_array_equal(variable, value)


def test_rows_that_each_example_looks_up_among_its_own():
    """Repeated ones, and one alone, of a tensor with weights behind it."""
    ids = np.concatenate([IDS, IDS], 1) % 3

    def forward(p, b):
        h = p[0](b["x"])
        return tf.gather(h, b["ids"], batch_dims=1) * tf.gather(h, b["ids"][:, 0], batch_dims=1)[:, None]

    agrees([layers.Dense(2, activation="tanh")], forward, x=S, ids=ids)


@pytest.mark.slow
def test_a_list_is_put_in_order_by_its_labels():
    """The likelihood of a ranking: the logits in the order of the labels, and what is left of them at each place."""

    def forward(p, b):
        logits = p[1](p[0](b["x"]))[..., 0]
        logits = tf.gather(logits, tf.argsort(b["labels"], direction="DESCENDING"), batch_dims=1)
        return tf.math.log(tf.cumsum(tf.exp(logits), axis=1, reverse=True)) - logits

    agrees([layers.Dense(3, activation="tanh"), layers.Dense(1)], forward, x=S, labels=rng.normal(size=[SIZE, 3]))


@pytest.mark.slow
def test_the_last_item_of_each_history_by_keras():
    def forward(p, b):
        return p[1](keras.ops.take_along_axis(p[0](b["x"]), b["ids"][:, :1, None] % 3, axis=1)[:, 0])

    agrees([layers.Dense(3, activation="tanh"), layers.Dense(1)], forward, x=S, ids=IDS)


@pytest.mark.parametrize("shape", [(4, 5, 3), (4, 5), (4, 5, 2, 3), (0, 5, 3)])
@pytest.mark.parametrize("several", [(), (2,), (3, 2)])
def test_own_rows_have_the_gradient_that_tensorflow_has(shape, several):
    rows, ids = tf.constant(rng.normal(size=shape)), tf.constant(rng.integers(0, 5, [shape[0], *several]))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(rows)
        found = tf.gather(rows, ids, batch_dims=1)
    with own_rows():
        own = tape.gradient(found, rows, tf.cos(found))
    np.testing.assert_allclose(own, tape.gradient(found, rows, tf.cos(found)), rtol=1e-12, atol=1e-12)
    assert own.shape == rows.shape


@pytest.mark.fast_cases("as they are")
@pytest.mark.parametrize("way", ["as they are", "one more axis"])
def test_positions_looked_up_once_for_the_batch(way):
    def forward(p, b):
        positions = p[1](tf.range(3))
        return p[2](p[0](b["ids"]) + (tf.expand_dims(positions, 0) if way == "one more axis" else positions))

    found = agrees([layers.Embedding(5, 2), layers.Embedding(3, 2), layers.Dense(2)], forward, ids=IDS)
    reads = [r for path, r in found.reads.items() if "embedding" in path]
    assert sorted(len(r.ids) for r in reads) == [12, 12]


@pytest.mark.parametrize("way", ["through a dense layer", "scaled", "sliced", "one more axis"])
def test_positions_that_no_model_needs_are_refused(way):
    def forward(p, b):
        positions = p[0](tf.range(5))[1:4] if way == "sliced" else p[0](tf.range(3))
        positions = positions[None] if way == "one more axis" else positions
        positions = p[1](positions) if way == "through a dense layer" else positions
        return b["x"] * (positions * tf.constant([1.0, 2.0, 0.5, 3.0], b["x"].dtype) if way == "scaled" else positions)

    model = Scored([layers.Embedding(5, 4), *([layers.Dense(4)] if way == "through a dense layer" else [])], forward)
    batch = {"x": S, "weight": np.ones([SIZE])}
    model.per_example_loss(batch)
    way_out = r"rows\[None\]" if way in ("sliced", "one more axis") else "one row an example"
    with pytest.raises(NotPrivate, match=f"that all examples share.*{way_out}"):
        clipped_sum(model, batch, 1.0)


class Own(Scored):
    """Weights of its own: a scale, a bias and a kernel."""

    def __init__(self, parts, forward):
        super().__init__(parts, forward)
        self.scale = self.add_weight(shape=[4], name="scale")
        self.shift = self.add_weight(shape=[3, 4], name="shift")
        self.matrix = self.add_weight(shape=[4, 2], name="matrix")


@pytest.mark.parametrize("dense", [False, True])
def test_weights_of_the_models_own(dense):
    def forward(parts, b):
        h = b["x"] * model.scale + model.shift + model.shift
        h = parts[0](h) if dense else h
        return tf.reduce_sum(h[..., None] * model.matrix, axis=[1, 2])

    model = Own([layers.Dense(4, activation="tanh")] if dense else [], forward)
    batch = {"x": S, "weight": rng.uniform(0.1, 2.0, size=[SIZE])}
    model.per_example_loss(batch)
    for variable in model.trainable_variables:
        variable.assign(np.random.default_rng(1).normal(size=variable.shape) * 0.5)
    assert_matches_oracle(model, batch)


def test_a_kernel_of_the_models_own_belongs_into_a_layer():
    model = Own([], lambda parts, b: b["x"] * model.scale + model.shift @ model.matrix.value @ tf.ones([2, 4], S.dtype))
    with pytest.raises(NotPrivate, match="into a layer"):
        clipped_sum(model, {"x": S, "weight": np.ones([SIZE])}, 1.0)


def test_shared_only_by_mixing():
    """A bias that meets the examples in their mean has no shares."""
    model = Own([], lambda parts, b: tf.reduce_mean(b["x"], 0) * model.scale + b["x"])
    with pytest.raises(NotPrivate, match="Mean in .*test_newly_allowed.py"):
        clipped_sum(model, {"x": S, "weight": np.ones([SIZE])}, 1.0)
