"""keras-rs' layers and losses: clipped as one example after the other would be, or refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored, assert_matches_oracle, dense_gradients
from keras import layers

import tfdp_rec
from tfdp_rec.clipping import EmbedReduceRule, clipped_sum
from tfdp_rec.core.sensitivity.engine import SLACK

keras_rs = pytest.importorskip("keras_rs")

SIZE, ROWS, WIDTH = 5, 9, 3
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, ROWS, [SIZE, 4])
IDS[0] = 2  # one row, four times
WEIGHTS = RNG.uniform(-1.0, 2.0, [SIZE, 4]).astype("float32")
WEIGHTS[1] = 0.0  # a bag of nothing
SIZES = RNG.uniform(0.2, 3.0, [SIZE]).astype("float32")


def bag(combiner, name="bag"):
    return keras_rs.layers.EmbedReduce(ROWS, WIDTH, combiner=combiner, embeddings_initializer="normal", name=name)


def scored(parts, forward, batch):
    model = Scored(parts, forward)
    batch = {**batch, "weight": SIZES}
    model.per_example_loss(batch)
    return model, batch


GIVEN = {
    "no weights": (IDS, None),
    "weights by place": (IDS, WEIGHTS),
    "weights by example": (IDS, WEIGHTS[:, 0]),
    "whole weights": (IDS, RNG.integers(0, 3, [SIZE, 4])),
    "one id": (IDS[:, 0], None),
    "one id with a weight": (IDS[:, 0], WEIGHTS[:, 0]),
}


@pytest.mark.slow
@pytest.mark.fast_cases("sum")
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags_are_clipped_as_by_the_oracle(combiner):
    """Every kind of bag, each in a table of its own; recorded, the layers' own calls do not run."""
    batch = {f"ids{n}": ids for n, (ids, _) in enumerate(GIVEN.values())}
    batch |= {f"by{n}": by for n, (_, by) in enumerate(GIVEN.values()) if by is not None}
    bags = [bag(combiner, f"bag{n}") for n in range(len(GIVEN))]

    def forward(p, b):
        *tables, named, dense = p
        found = [table(b[f"ids{n}"], b.get(f"by{n}")) for n, table in enumerate(tables)]
        return [dense(rows) for rows in (*found, named(weights=b["by1"], inputs=b["ids1"]))]

    model, batch = scored([*bags, bag(combiner, "named"), layers.Dense(2)], forward, batch)
    found = assert_matches_oracle(model, batch, rtol=1e-5)
    np.testing.assert_allclose(found.losses, model.per_example_loss(batch), rtol=1e-5, atol=1e-6)
    assert all(isinstance(found.gradients[layer.embeddings.path], tf.IndexedSlices) for layer in bags)
    assert np.isfinite(found.norms).all()


def test_bags_of_bags_are_refused():
    model, batch = scored([bag("sum")], lambda p, b: p[0](b["ids"]), {"ids": IDS[:, :, None]})
    with pytest.raises(tfdp_rec.NotPrivate, match=r"bags of ids \[batch\] or \[batch, T\], got \(.*4, 1\)"):
        clipped_sum(model, batch, 1.0)


def test_weights_may_be_learned():
    """Then they have a gradient of their own, through the bag."""
    layer, attention = bag("mean"), layers.Dense(1, activation="sigmoid")
    forward = lambda p, b: p[0](b["ids"], weights=p[1](b["x"][..., None])[..., 0])  # noqa: E731
    model, batch = scored([layer, attention], forward, {"ids": IDS, "x": WEIGHTS})
    assert_matches_oracle(model, batch, rtol=1e-5)


@pytest.mark.slow
def test_a_bag_is_a_table_that_lazy_training_knows():
    ids = keras.Input([4], dtype="int32")
    model = tfdp_rec.PrivateModel(ids, layers.Dense(1)(bag("mean")(ids)))
    optimizer = tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=SIZE)
    model.compile(optimizer, loss="mse")
    model.fit(IDS, SIZES[:, None], batch_size=SIZE, verbose=0)
    assert [path.endswith("bag/embeddings") for path in optimizer.tables] == [True]
    assert "bag (EmbedReduce): by row, put together by example, table of 9 rows of 3" in str(
        tfdp_rec.validate(model, (IDS, SIZES[:, None]))
    )
    tfdp_rec.clipping.check(model, (IDS, SIZES[:, None]))


@pytest.mark.parametrize("kind", ["SparseTensor", "RaggedTensor"])
def test_bags_of_no_fixed_length_are_refused(kind):
    make = tf.sparse.from_dense if kind == "SparseTensor" else tf.RaggedTensor.from_tensor
    model, batch = scored([bag("sum")], lambda p, b: p[0](make(b["ids"])), {"ids": IDS})
    with pytest.raises(tfdp_rec.NotPrivate, match=f"'bag' is given a {kind}.*fixed length.*data.padded") as refused:
        clipped_sum(model, batch, 1.0)
    assert len(str(refused.value)) < 500


BAGS = [[7, 5], [], [1, 2, 3, 8], [2, 2, 8], [4]]


@pytest.mark.fast_cases("EmbedReduce-mean")
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("distributed", [False, True], ids=["EmbedReduce", "DistributedEmbedding"])
def test_padded_bags_are_clipped_as_the_bags_were(combiner, distributed):
    ids, by = tfdp_rec.data.padded(BAGS, 6)
    if distributed:
        table = keras_rs.layers.TableConfig("t", ROWS, WIDTH, initializer="normal", combiner=combiner)
        feature = keras_rs.layers.FeatureConfig("ids", table, (SIZE, 6), (SIZE, WIDTH))
        layer = keras_rs.layers.DistributedEmbedding({"ids": feature}, table_stacking=None)
        forward = lambda p, b: p[1](p[0]({"ids": b["ids"]}, {"ids": b["by"]})["ids"])  # noqa: E731
    else:
        layer, forward = bag(combiner), lambda p, b: p[1](p[0](b["ids"], b["by"]))
    model, batch = scored([layer, layers.Dense(2)], forward, {"ids": ids, "by": by})
    table = next(v for v in model.trainable_variables if v.shape == (ROWS, WIDTH))
    dense = [v for v in model.trainable_variables if v is not table]
    total = {v.path: np.zeros(v.shape) for v in model.trainable_variables}
    for number, own in enumerate(BAGS):  # no layer of keras-rs, and no padding
        divisor = {"sum": 1.0, "mean": len(own), "sqrtn": len(own) ** 0.5}[combiner] or 1.0
        with tf.GradientTape() as tape:
            values = [v.value for v in model.trainable_variables]
            tape.watch(values)
            z = tf.reduce_sum(tf.gather(table.value, tf.constant(own, tf.int64)), axis=0, keepdims=True) / divisor
            out = tf.matmul(z, dense[0].value) + dense[1].value
            loss = tf.reduce_sum(tf.sin(out) * [1.0, 2.0]) * SIZES[number]
        found = [np.asarray(tf.convert_to_tensor(g), np.float64) for g in tape.gradient(loss, values)]
        norm = np.sqrt(sum(np.sum(g**2) for g in found))
        for variable, g in zip(model.trainable_variables, found):
            total[variable.path] += g * min(1, 0.7 / (1 + SLACK) / norm)
    for path, gradient in dense_gradients(model, clipped_sum(model, batch, 0.7)).items():
        np.testing.assert_allclose(gradient, total[path], rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_padded_bags_train_privately_in_one_call():
    ids, by = tfdp_rec.data.padded(tf.ragged.constant(BAGS * 20), 3)
    inputs = keras.Input([3], dtype="int32"), keras.Input([3])
    model = keras.Model(inputs, layers.Dense(1)(bag("mean")(*inputs)))
    model.compile(loss="mse")
    settings = {"epsilon": 3.0, "batch_size": 25, "epochs": 1, "accountant": "rdp"}
    private = tfdp_rec.make_private(model, ((ids, by), np.ones([100, 1], "float32")), **settings)
    private.fit(verbose=0)
    assert [path.endswith("bag/embeddings") for path in private.model.optimizer.tables] == [True]


def test_a_subclass_that_does_something_else_has_not_its_rule():
    class Doubled(keras_rs.layers.EmbedReduce):
        def call(self, inputs, weights=None):
            return 2.0 * super().call(inputs, weights)

    doubled = Doubled(ROWS, WIDTH)
    assert not isinstance(tfdp_rec.core.sensitivity.rules.rule_for(doubled), EmbedReduceRule)
    model, batch = scored([doubled], lambda p, b: p[0](b["ids"]), {"ids": IDS})
    with pytest.raises(tfdp_rec.NotPrivate, match="owns weights"):
        clipped_sum(model, batch, 1.0)


@pytest.mark.fast_cases("options2")
@pytest.mark.parametrize("options", [{}, {"projection_dim": 2}, {"diag_scale": 0.5, "use_bias": False}])
def test_crosses_are_clipped_as_by_the_oracle(options):
    crosses = [keras_rs.layers.FeatureCross(name=f"cross_{n}", **options) for n in range(2)]
    model, batch = scored([*crosses, layers.Dense(2)], lambda p, b: p[2](p[1](b["x"], p[0](b["x"]))), {"x": WEIGHTS})
    assert_matches_oracle(model, batch, rtol=1e-5)


@pytest.mark.fast_cases("options1")
@pytest.mark.parametrize("options", [{}, {"self_interaction": True}])
def test_dot_interactions_are_clipped_as_by_the_oracle(options):
    model, batch = interactions(options)
    assert_matches_oracle(model, batch, rtol=1e-5)


def test_dot_interactions_that_choose_a_branch_in_the_graph_are_refused():
    model, batch = interactions({"skip_gather": True})
    with pytest.raises(tfdp_rec.NotPrivate, match="chooses a branch"):
        clipped_sum(model, batch, 1.0)


def interactions(options):
    tables = [layers.Embedding(ROWS, WIDTH, embeddings_initializer="normal", name=f"table_{n}") for n in range(3)]
    parts = [*tables, keras_rs.layers.DotInteraction(**options), layers.Dense(2)]
    forward = lambda p, b: p[4](p[3]([p[n](b["ids"][:, n]) for n in range(3)]))  # noqa: E731
    return scored(parts, forward, {"ids": IDS})


LOSSES = ["PairwiseHingeLoss", "PairwiseLogisticLoss", "PairwiseSoftZeroOneLoss", "PairwiseMeanSquaredError",
          "ListMLELoss"]  # fmt: skip


@pytest.mark.fast_cases("PairwiseHingeLoss")
@pytest.mark.parametrize("name", LOSSES)
def test_a_list_is_an_example_of_a_ranking_loss(name):
    """A row of scores and labels is one user's list: each list's loss is its own, and their mean is Keras'."""
    inputs = keras.Input([4])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(4)(inputs))
    labels = RNG.integers(0, 3, [SIZE, 4]).astype("float32")
    optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=SIZE)
    model.compile(optimizer, loss=getattr(keras_rs.losses, name)())
    rows = [(WEIGHTS[n : n + 1], labels[n : n + 1]) for n in range(SIZE)]
    alone = [float(model.per_example_loss(row, training=True)[0]) for row in rows]
    np.testing.assert_allclose(model.per_example_loss((WEIGHTS, labels), training=True), alone, rtol=1e-5)
    found = clipped_sum(model, (WEIGHTS, labels), 1.0)
    np.testing.assert_allclose(found.losses, alone, rtol=1e-5)
