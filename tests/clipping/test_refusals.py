"""What is not private is refused, in one sentence that names the layer or option and the way out."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored
from keras import layers

import tfdp_rec
from tfdp_rec.clipping import clipped_sum

X = np.random.default_rng(0).normal(size=[4, 3]).astype("float32")
SEQUENCES = np.random.default_rng(1).normal(size=[4, 5, 3]).astype("float32")
IDS = np.array([[1, 2, 2], [3, 1, 0], [0, 0, 0], [2, 1, 3]])


LINE = r"[^ ]*test_refusals.py:\d+ \(call\)"
ONE_STEP = {"epsilon": 8.0, "batch_size": 2, "epochs": 1, "accountant": "rdp", "learning_rate": 0.1}


def refused(parts, forward, x, match):
    model = Scored(parts, lambda p, b: forward(p, b["x"]))
    batch = {"x": x, "weight": np.ones([len(x)], "float32")}
    tf.function(model.per_example_loss).get_concrete_function(batch)  # not run: a processor may lack a kernel
    with pytest.raises(tfdp_rec.NotPrivate, match=match) as caught:
        clipped_sum(model, batch, 1.0)
    assert len(str(caught.value)) < 500


def chain(parts, x):
    for part in parts:
        x = part(x)
    return x


class WithDropout(layers.Layer):
    def __init__(self, drop, **options):
        super().__init__(**options)
        self.drop = drop

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")

    def call(self, x, training=False):
        return self.drop(x, training=training) * self.scale


@pytest.mark.parametrize(
    "parts, x, match",
    [
        ([layers.BatchNormalization(name="bn"), layers.Dense(1)], X, "'bn'.*LayerNormalization"),
        ([layers.TimeDistributed(layers.BatchNormalization(name="in"))], SEQUENCES, "'in'"),
        ([layers.SpectralNormalization(layers.Dense(2), name="sn")], X, "'sn'"),
        ([layers.LayerNormalization(axis=[0, 1], name="ln")], X, "'ln'.*axis 0"),
        ([layers.UnitNormalization(axis=0, name="un"), layers.Dense(1)], X, "'un'.*axis 0"),
        ([layers.Dense(1, dtype="mixed_float16", name="half")], X, "'half'.*mixed_bfloat16"),
        ([layers.Dense(2), layers.Softmax(axis=0, name="soft")], X, "'soft'.*axis 0"),
        ([layers.Dense(2, activity_regularizer="l2", name="reg")], X, "'reg'.*activity_regularizer"),
        ([layers.GRU(2, stateful=True, name="gru")], SEQUENCES, "'gru' keeps state"),
        ([layers.GRU(2, dropout=0.5, name="gru")], SEQUENCES, "'gru' has dropout inside"),
        ([layers.LSTM(2, recurrent_dropout=0.5, name="lstm")], SEQUENCES, "'lstm' has dropout inside"),
        ([layers.Bidirectional(layers.GRU(2, dropout=0.1), name="b")], SEQUENCES, "has dropout inside"),
        ([layers.TimeDistributed(WithDropout(layers.Dropout(0.1)), name="t")], SEQUENCES, "'t' has dropout inside"),
        ([WithDropout(layers.GaussianDropout(0.1), name="w")], X, "'w' has dropout inside"),
        ([WithDropout(layers.Dropout(0.1, noise_shape=(1, None)), name="w")], X, "'w' has dropout inside"),
        ([layers.Dense(2, activation=layers.PReLU(), name="d")], X, "'d' gives no gradient for.*alpha"),
        ([layers.Conv1D(3, 2, data_format="channels_first", name="c")], SEQUENCES, "'c'"),
        ([layers.Conv1D(3, 2, dilation_rate=2, name="c")], SEQUENCES, "SpaceToBatchND|'c'"),
        ([layers.EinsumDense("ab,bc->ca", output_shape=(4,), name="e")], X, "'e'|place of an example"),
        ([layers.ReversibleEmbedding(4, 2, tie_weights=False)], IDS, "reverse_embeddings"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_layers(parts, x, match):
    refused(parts, chain, x, match)


def test_lora_and_quantisation():
    for layer, x in [(layers.Dense(3), X), (layers.EinsumDense("ab,bc->ac", 2), X), (layers.Embedding(4, 3), IDS)]:
        layer(x)
        layer.enable_lora(2)
        refused([layer], chain, x, "LoRA")
    quantised = layers.Dense(3)
    quantised(X)
    quantised.quantize("int8")
    refused([quantised], chain, X, "quantisation")


def test_add_loss():
    class Adds(layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_sum(x))
            return x

    refused([Adds(name="adds"), layers.Dense(1)], chain, X, f"'adds' .*add_loss in {LINE}.*per_example_loss.*L2")


def test_what_would_draw_another_mask_is_refused_with_the_way():
    inner = layers.TimeDistributed(WithDropout(layers.Dropout(0.1), name="title"), name="titles")
    refused([inner], chain, SEQUENCES, r"^Layer 'titles' .*call 'title' on all steps at once: .*ops.reshape")
    refused([layers.GRU(2, dropout=0.5, name="gru")], chain, SEQUENCES, "'gru' .*keras.layers.Dropout before or after")


class InOneAxis(layers.Layer):
    """Dropout over batch times length, in the manner of HSTU."""

    def __init__(self, **options):
        super().__init__(**options)
        self.drop, self.dense = layers.Dropout(0.5), layers.Dense(3)

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")

    def call(self, x):
        rows = self.drop(tf.reshape(x, [-1, 3]) * self.scale, training=True)
        return tf.reshape(rows, [-1, 5, 3])


def test_a_mask_over_batch_times_length_is_refused_with_its_line():
    match = rf"'long' draws a dropout mask in {LINE}.*not the batch.*Call Dropout on \[batch, T, n\]"
    refused([InOneAxis(name="long")], chain, SEQUENCES, match)


class Sampled(tfdp_rec.PrivateModel):
    """A softmax over negatives that TensorFlow draws, in the manner of RecLearn's YoutubeDNN."""

    def __init__(self, table, way):
        super().__init__()
        self.users, self.way = layers.Embedding(4, 3), way
        self.items = layers.Embedding(9, 3, name="items") if table == "layer" else self.add_weight((9, 3), name="items")

    def call(self, inputs, training=False):
        user, item = tf.unstack(inputs, axis=1)
        if not isinstance(self.items, keras.Variable) and not self.items.built:
            self.items.build([])
        table = getattr(self.items, "embeddings", self.items)
        weights, label = tf.convert_to_tensor(table), tf.cast(item, tf.int64)[:, None]
        loss = tf.nn.sampled_softmax_loss(weights, tf.zeros([9]), label, self.users(user), 4, 9)
        if self.way == "add_loss":
            self.add_loss(tf.reduce_mean(loss))
        return loss


class SampledByItself(Sampled):
    """The same losses, returned."""

    def per_example_loss(self, data, training=True):
        return self(data, training=training)


@pytest.mark.slow_cases("per_example_loss-layer")
@pytest.mark.parametrize("table", ["layer", "weight"])
@pytest.mark.parametrize("way", ["per_example_loss", "add_loss"])
def test_a_sampled_softmax_is_told_its_line_here(table, way):
    model = (Sampled if way == "add_loss" else SampledByItself)(table, way)
    model.compile("adam")
    way_out = rf"in {LINE}.*CandidateScores\(.*cross_entropy\(queries, item_ids\)"
    with pytest.raises(tfdp_rec.NotPrivate, match=way_out) as caught:
        tfdp_rec.make_private(model, IDS[:, :2], **ONE_STEP).fit(verbose=0)
    assert max(map(len, str(caught.value).splitlines())) < 500


def test_a_layer_that_mixes_positions_called_without_the_batch_axis():
    """Of the same positions for all, each example's share is known for a lookup or a dense layer; not for any layer."""
    table, attention = layers.Embedding(9, 3), layers.GRU(3, name="positions", return_sequences=True)
    square = SEQUENCES[:, :4]

    def forward(p, x):
        return x + p[1](p[0](tf.range(4))[None])

    refused(
        [table, attention], forward, square, "the place of an example|each example's part.*position embedding")


def test_a_table_read_past_its_layer():
    """Its gradient through the matmul would be lost: the rows read by the layer would be all that is clipped."""
    table = layers.Embedding(4, 3, name="table")
    model = Scored([table], lambda p, b: tf.matmul(p[0](b["x"]), p[0].embeddings, transpose_b=True))
    batch = {"x": IDS, "weight": np.ones([4], "float32")}
    model.per_example_loss(batch)
    with pytest.raises(tfdp_rec.NotPrivate, match="table/embeddings.*ReversibleEmbedding"):
        clipped_sum(model, batch, 1.0)


def test_a_kernel_read_past_its_layer_inside_a_function():
    dense = layers.Dense(3, name="dense")
    penalty = tf.function(lambda: tf.reduce_sum(dense.kernel.value), autograph=False)
    dense(X)
    refused([dense], lambda p, x: p[0](x) + penalty(), X, "dense/kernel")


def test_a_layer_left_out_of_the_loss():
    unused = layers.Dense(2, name="unused")
    unused(X)
    refused([layers.Dense(1), unused], lambda p, x: p[0](x), X, "unused/kernel.*trainable=False")


def test_two_layers_of_one_name():
    refused([layers.Dense(1, name="d"), layers.Dense(1, name="d")], lambda p, x: p[0](x) + p[1](x), X, "distinct names")


def test_a_layer_inside_a_loop():
    dense = layers.Dense(3, name="looped")

    def forward(parts, x):
        return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, parts[0](y)), (0, x))[1]

    refused([dense], forward, X, "'looped' is called inside a loop")


def test_shared_input_of_a_layer_without_a_rule():
    class Weighted(layers.Layer):
        def build(self, shapes):
            self.scale = self.add_weight(shape=[3], name="scale")

        def call(self, inputs):
            return inputs[0] * inputs[1] * self.scale

    refused([Weighted(name="w")], lambda p, x: p[0]([x, tf.ones([1, 3])]), X, "'w' takes an input")


def test_tfrs_retrieval_by_name():
    class Retrieval(layers.Layer):
        __module__ = "tensorflow_recommenders.tasks.retrieval"

        def call(self, x):
            return x

    refused([Retrieval(name="task"), layers.Dense(1)], chain, X, "'task'.*CandidateScores")


def test_the_real_tfrs_retrieval():
    tfrs = pytest.importorskip("tensorflow_recommenders")
    task = tfrs.tasks.Retrieval(loss=keras.losses.CategoricalCrossentropy(from_logits=True), name="task")
    refused([layers.Dense(2), task], lambda p, x: p[0](x), X, "'task'.*CandidateScores")


def test_a_loss_that_is_not_one_an_example():
    class Mean(tfdp_rec.PrivateTraining, keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def per_example_loss(self, data, training=True):
            return tf.reduce_mean(self.dense(data))

    model = Mean()
    model.per_example_loss(X)
    with pytest.raises(ValueError, match="one loss an example"):
        clipped_sum(model, X, 1.0)


# Options of compile and of the optimizer.


def mechanism(**options):
    return tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4, **options)


def model(**options):
    inputs = keras.Input([3])
    return tfdp_rec.PrivateModel(inputs, layers.Dense(1, **options)(inputs))


def test_xla():
    with pytest.raises(tfdp_rec.NotPrivate, match="jit_compile"):
        model().compile(mechanism(), "mse", jit_compile=True)
    private = model()
    private.compile(mechanism(), "mse")
    assert private.jit_compile is False


def test_loss_scaling():
    with pytest.raises((tfdp_rec.NotPrivate, ValueError), match="LossScaleOptimizer|loss_scale"):
        model().compile(keras.optimizers.LossScaleOptimizer(mechanism()), "mse")


def test_float16():
    private = model()
    private.dtype_policy = keras.DTypePolicy("mixed_float16")
    with pytest.raises(tfdp_rec.NotPrivate, match="float16.*mixed_bfloat16"):
        private.compile(mechanism(), "mse")


@pytest.mark.parametrize("option", ["gradient_accumulation_steps", "use_ema", "clipnorm", "loss_scale_factor"])
def test_optimizer_options(option):
    with pytest.raises(ValueError, match=option):
        mechanism(**{option: 2})


@pytest.mark.parametrize("where", ["of the mechanism", "of dense_optimizer"])
def test_accumulated_gradients_are_refused_with_what_does_the_same(where):
    steps = {"gradient_accumulation_steps": 2}
    options = steps if where == "of the mechanism" else {"dense_optimizer": keras.optimizers.Adam(**steps)}
    with pytest.raises(ValueError, match="gradient_accumulation_steps: .*microbatch_size=") as refusal:
        mechanism(**options)
    assert len(str(refusal.value)) < 500 and str(refusal.value).endswith(".")


def test_wrong_arguments():
    private = model()
    private.compile(mechanism(), "mse")
    batch = (X, np.zeros([4, 1], "float32"))
    with pytest.raises(ValueError, match="l2_norm_clip.*-1"):
        clipped_sum(private, batch, -1.0)
    with pytest.raises(ValueError, match="strategy.*'fast'"):
        clipped_sum(private, batch, 1.0, strategy="fast")
    with pytest.raises(ValueError, match="microbatch_size.*0"):
        clipped_sum(private, batch, 1.0, microbatch_size=0)
    with pytest.raises(TypeError, match="layer_type"):
        tfdp_rec.clipping.register("Dense", tfdp_rec.clipping.DenseRule())
    with pytest.raises(TypeError, match="rule"):
        tfdp_rec.clipping.register(layers.Dense, tfdp_rec.clipping.DenseRule)


def test_a_layer_type_can_be_refused():
    class Odd(layers.Dense):
        pass

    tfdp_rec.clipping.refuse(Odd, "is odd; use Dense")
    refused([Odd(1, name="odd")], chain, X, "'odd' .Odd. is odd; use Dense")


GRAPH = rf"in {LINE} .*every score reads every user's edges.*No rewriting helps.*tfdp-rec train --data.*two-tower"


class LightGCN(tfdp_rec.PrivateModel):
    """After He et al., 2020: rows of all users and items, averaged along the edges of all users."""

    def __init__(self, edges, way="dense", layers_number=2):
        super().__init__()
        degree = np.maximum(edges.sum(1, keepdims=True), 1.0) ** -0.5
        self.norm_adj, self.layers_number = tf.constant(degree * edges * degree.T, tf.float32), layers_number
        self.sparse, self.number = tf.sparse.from_dense(self.norm_adj), len(edges)
        self.way, shape = way, (len(edges), 4)
        self.table = self.add_weight(shape, name="ego") if "own" in way else layers.Embedding(*shape, name="ego")
        if "read" in way:
            self.table.build([])

    def call(self, x):
        whole = self.table(tf.range(self.number)) if self.way in ("dense", "sparse") else None
        whole = getattr(self.table, "embeddings", self.table) if whole is None else whole
        found = [tf.convert_to_tensor(whole)]
        for _ in range(self.layers_number):
            sparse = "sparse" in self.way
            dot, edges = (tf.sparse.sparse_dense_matmul, self.sparse) if sparse else (tf.matmul, self.norm_adj)
            found.append(dot(edges, found[-1]))
        user, pos, neg = (tf.gather(tf.reduce_mean(tf.stack(found), axis=0), ids) for ids in tf.unstack(x, axis=1))
        return tf.reduce_sum(user * (pos - neg), axis=1)

    def compute_loss(self, x, y, y_pred, sample_weight):
        return tf.reduce_mean(tf.nn.softplus(-y_pred))


@pytest.mark.fast_cases("sparse read", "dense own", "sparse own")
@pytest.mark.parametrize("way", ["dense", "sparse", "dense read", "sparse read", "dense own", "sparse own"])
def test_a_graph_of_all_users_edges_is_refused(way):
    rng = np.random.default_rng(0)
    edges = np.block([[np.zeros([6, 6]), rng.integers(2, size=[6, 5])], [np.zeros([5, 11])]])
    model = LightGCN(edges + edges.T, way)
    model.compile("adam")
    triples = np.stack([rng.integers(6, size=60), *(6 + rng.integers(5, size=[2, 60]))], axis=1)
    with pytest.raises(tfdp_rec.NotPrivate, match=GRAPH) as caught:
        tfdp_rec.make_private(model, triples, **ONE_STEP).fit(verbose=0)
    assert max(map(len, str(caught.value).splitlines())) < 520


def test_a_graph_within_a_layer_is_refused_too():
    """Run again for each example, such a layer was trained, and its edges, which are private, were taken for public."""

    class Propagation(layers.Layer):
        def build(self, shape):
            self.rows = self.add_weight((4, 3), name="rows")

        def call(self, ids):
            return tf.gather(tf.sparse.sparse_dense_matmul(tf.sparse.eye(4), tf.convert_to_tensor(self.rows)), ids)

    refused([Propagation(), layers.Dense(1)], chain, IDS, GRAPH)
