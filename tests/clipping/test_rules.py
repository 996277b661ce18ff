"""Every layer rule against the per-example oracle, in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored, assert_matches_oracle, dense_gradients, double_precision
from keras import layers

import tfdp_rec
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.core.sensitivity import rules


@pytest.fixture(autouse=True, scope="module")
def float64():
    with double_precision():
        yield


def agrees(parts, forward, batch, seed=0, shared=(), **options):
    """Random weights (zeros would hide biases), then clipped sum = oracle."""
    rng = np.random.default_rng(seed)
    model = Scored(parts, forward, shared)
    size = len(next(v for k, v in batch.items() if k not in shared))
    batch = {**batch, "weight": rng.uniform(0.1, 2.0, size=[size])}
    model.per_example_loss(batch)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape) * 0.5)
    return assert_matches_oracle(model, batch, **options)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def ids(seed, below, *shape):
    return np.random.default_rng(seed).integers(0, below, size=shape)


def plain(parts, batch):
    output = batch["x"]
    for layer in parts:
        output = layer(output)
    return output


def together(cases, size=3, seed=0):
    """Layers, each on inputs of its own, in one model, which is traced once: (layer, input) pairs."""
    parts, batch = [layer for layer, _ in cases], {f"x{n}": x for n, (_, x) in enumerate(cases)}
    assert all(len(x) == size for x in batch.values())
    agrees(parts, lambda p, b: [layer(b[f"x{n}"]) for n, layer in enumerate(p)], batch, seed)


# Embedding.


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_embedding_of_any_rank_and_type_with_repeated_ids(size):
    shapes = [(1, []), (6, []), (1, [4]), (6, [1]), (3, [5]), (4, [2, 3]), (2, [3, 1])]
    cases = [(layers.Embedding(rows, 3), ids(n, rows, size, *shape)) for n, (rows, shape) in enumerate(shapes)]
    floats, bytes_ = np.array([[0.0, 4.0], [2.0, 2.0], [1.0, 1.0]]), np.array([[0, 4], [2, 2], [3, 1]], np.uint8)
    together([*cases, (layers.Embedding(5, 3), floats[:size]), (layers.Embedding(5, 3), bytes_[:size])], size)


def test_embedding_with_a_mask_that_a_later_layer_heeds():
    parts = [layers.Embedding(5, 3, mask_zero=True), layers.GlobalAveragePooling1D(), layers.Dense(2)]
    inputs = np.array([[1, 0, 0, 2], [3, 3, 0, 0], [1, 2, 4, 4]])  # the mean over nothing is undefined
    agrees(parts, plain, {"x": inputs})


def test_embedding_bag_of_ten_thousand_ids():
    parts = [layers.Embedding(40, 2), layers.GlobalAveragePooling1D()]
    agrees(parts, plain, {"x": ids(1, 40, 2, 10_000)})


# Dense and its kin.


@pytest.mark.fast_cases("3")
@pytest.mark.parametrize("size", [1, 3])
def test_dense_of_any_rank_by_products_of_inputs_and_by_formed_gradients(size):
    shapes = [([3], 4, True), ([1], 1, False), ([2, 9], 8, True), ([9, 2], 3, True), ([4, 1, 2], 3, False)]
    cases = [(layers.Dense(units, activation="tanh", use_bias=bias), normal(n, size, *shape))
             for n, (shape, units, bias) in enumerate(shapes)]  # fmt: skip
    together(cases, size)


EQUATIONS = [
    ("ab,bc->ac", [3], (4,), "c"),
    ("abc,cd->abd", [2, 3], (None, 4), "d"),
    ("abc,cde->abde", [2, 3], (None, 4, 5), "de"),
    ("abcd,cde->abe", [2, 3, 4], (None, 5), "e"),
    ("...x,xy->...y", [2, 3], 4, "y"),
    ("abc,bcd->ad", [2, 3], (4,), "d"),
    ("abc,bcd->abd", [2, 3], (2, 4), "d"),  # b in all three
    ("abc,bc->abc", [2, 3], (2, 3), None),  # nothing summed
    ("abc,cd->ad", [2, 3], (4,), "d"),  # b summed over in the input alone
    ("abc,bd->adc", [2, 3], (4, 3), "d"),
    *(("abc,cde->abde", [2, 3], (2, 4, 5), bias) for bias in ("d", "e", "be", "bde")),
]


@pytest.mark.slow
def test_einsum_dense():
    made = [layers.EinsumDense(equation, output_shape=output, bias_axes=bias, activation="tanh")
            for equation, _, output, bias in EQUATIONS]  # fmt: skip
    together([(layer, normal(n, 3, *shape)) for n, (layer, (_, shape, _, _)) in enumerate(zip(made, EQUATIONS))])


@pytest.mark.slow
def test_multi_head_attention_self_and_cross_with_masks():
    keep = np.random.default_rng(0).uniform(size=[3, 4, 2]) < 0.7
    keep[:, :, 0] = True
    inputs = {"x": normal(0, 3, 4, 3), "y": normal(1, 3, 2, 2), "keep": keep}

    def forward(parts, b):
        return parts[0](b["x"], b["x"], use_causal_mask=True), parts[1](b["x"], b["y"], attention_mask=b["keep"])

    agrees([layers.MultiHeadAttention(2, 3), layers.MultiHeadAttention(2, 2, value_dim=3)], forward, inputs)


def test_grouped_query_attention():
    layer = layers.GroupQueryAttention(head_dim=2, num_query_heads=4, num_key_value_heads=2)
    agrees([layer], lambda parts, b: parts[0](b["x"], b["x"]), {"x": normal(0, 3, 4, 3)})


# Normalisation and convolution.


@pytest.mark.filterwarnings("ignore:You passed `rms_scaling")
def test_layer_normalization():
    options = [{}, {"axis": [1, 2]}, {"axis": [1]}, {"center": False}, {"scale": False}, {"axis": [-1, -2]},
               {"axis": (1, -1)}, {"rms_scaling": True}, {"axis": [1, 2], "rms_scaling": True}]  # fmt: skip
    cases = [(layers.LayerNormalization(**each), normal(n, 3, 4, 4)) for n, each in enumerate(options)]
    flat = [{}, {"center": False}, {"scale": False}]
    together([*cases, *((layers.LayerNormalization(**each), normal(9 + n, 3, 5)) for n, each in enumerate(flat))])


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["valid", "same", "causal"])
def test_conv1d(padding):
    cases = []
    for n, (size, stride, groups) in enumerate([(2, 1, 1), (3, 2, 1), (1, 3, 2), (3, 1, 1), (3, 2, 4)]):
        layer = layers.Conv1D(3 * groups, size, strides=stride, groups=groups, padding=padding, activation="tanh")
        cases.append((layer, normal(n, 3, 5 + n, 2 if groups == 1 else 4)))
    together(cases)


# The universal rule.


class Bilinear(layers.Layer):
    """A layer nobody has a rule for."""

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], shape[-1]), name="matrix")

    def call(self, x):
        return tf.einsum("bi,ij,bj->b", x, self.matrix, x)[:, None]


UNIVERSAL = {
    "own": lambda: Bilinear(),
    "prelu": lambda: layers.PReLU(),
    "rms": lambda: layers.RMSNormalization(),
    "group": lambda: layers.GroupNormalization(groups=2),
    "time": lambda: layers.TimeDistributed(layers.Dense(3)),
}


def test_layers_without_a_rule():
    shapes = {"own": [4]}
    together([(make(), normal(n, 3, *shapes.get(kind, [5, 4]))) for n, (kind, make) in enumerate(UNIVERSAL.items())])


class Saturated(layers.Conv1D):
    """Keras' own hook, which its `call` runs."""

    def convolution_op(self, inputs, kernel):
        return super().convolution_op(inputs, tf.tanh(3.0 * kernel))


class Positive(layers.Dense):
    @property
    def kernel(self):
        return tf.math.softplus(layers.Dense.kernel.fget(self))


class Cosine(tfdp_rec.CandidateScores):
    def products(self, query, positives, negatives, table, offsets):
        query, rows = tf.math.l2_normalize(query, -1), tf.math.l2_normalize(tf.convert_to_tensor(table), -1)
        own = tf.reduce_sum(query * tf.gather(rows, positives), axis=1, keepdims=True)
        return own, tf.matmul(query, tf.gather(rows, negatives), transpose_b=True)


class Larger(layers.Dense):
    """A subclass that adds, and overrides nothing of the computation."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.more = 1

    def get_config(self):
        return {**super().get_config(), "more": self.more}


@pytest.mark.parametrize("make", [lambda: Saturated(3, 2), lambda: Positive(3)])
def test_a_subclass_that_computes_otherwise_does_not_inherit_a_closed_form(make):
    together([(make(), normal(0, 3, 5, 4))])


def test_candidate_scores_with_products_of_their_own_have_no_rule():
    def forward(parts, b):
        return parts[0](b["x"], b["positives"], b["negatives"])

    batch = {"x": normal(0, 3, 4), "positives": ids(1, 7, 3), "negatives": ids(2, 7, 5)}
    with pytest.raises(tfdp_rec.NotPrivate, match="'cosine' takes an input whose first axis is not the batch"):
        agrees([Cosine(7, 4)], forward, batch, shared=("negatives",))


def test_a_function_in_the_place_of_a_layers_method_is_not_passed_over():
    layer = layers.Conv1D(3, 2)
    assert rules.rule_for(layer) is rules.rule_for(layers.Conv1D(3, 2)) is not None
    assert rules.rule_for(Larger(3)) is rules.rule_for(layers.Dense(3)) is not None
    layer.convolution_op = lambda inputs, kernel: layers.Conv1D.convolution_op(layer, inputs, tf.tanh(kernel))
    assert rules.rule_for(layer) is None


def test_a_call_that_is_replaced_on_a_layer_is_what_trains_and_stays():
    layer = layers.Dense(3)
    original = layer.call
    layer.call = lambda x, training=None: original(tf.tanh(2.0 * x))
    own = layer.call
    together([(layer, normal(0, 3, 4))])
    assert layer.call is own and rules.rule_for(layer) is None


class Dropped(layers.Layer):
    """A product that is linear in its matrix, of inputs with a part dropped, three times by one layer."""

    def __init__(self):
        super().__init__()
        self.drop, self.other = layers.Dropout(0.5), layers.Dropout(0.3)

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], 3), name="matrix")

    def call(self, x, training=False):
        x = self.drop(x, training=training) + self.drop(tf.square(x), training=training) + self.drop(x, training=False)
        return self.other(tf.matmul(x, self.matrix), training=training)


class Linear(Scored):
    def per_example_loss(self, data, training=True):
        return tf.reduce_sum(self.parts[0](data["x"], training=training), axis=[1, 2]) * data["weight"]


@pytest.mark.slow
def test_a_layer_with_weights_and_dropout_is_run_again_with_the_masks_that_it_drew():
    """Losses are linear in the matrix W: those of a step are ⟨gradient, W⟩, if and only if the masks are the same."""
    model, batch = Linear([Dropped()], plain), {"x": normal(1, 7, 5, 4), "weight": normal(2, 7)}
    model.per_example_loss(batch)
    matrix, found = model.parts[0].matrix, []
    matrix.assign(normal(3, 4, 3))
    for size in (7, 7, 1):
        clipped = clipped_sum(model, {name: each[:size] for name, each in batch.items()}, 1e9)
        (gradient,) = dense_gradients(model, clipped).values()
        found.append(float(tf.reduce_sum(clipped.losses)))
        np.testing.assert_allclose(np.sum(gradient * matrix.numpy()), found[-1], rtol=1e-10)
    assert found[0] != found[1]  # other masks at each step


def test_attention_with_a_scale_takes_a_list_of_inputs():
    def forward(parts, b):
        return parts[0]([b["x"], b["y"]]), parts[1]([b["x"], b["y"]])

    batch = {"x": normal(0, 3, 4, 2), "y": normal(1, 3, 5, 2)}
    agrees([layers.Attention(use_scale=True), layers.AdditiveAttention()], forward, batch)


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gru", *(pytest.param(k, marks=slow) for k in ("lstm_masked", "bidirectional"))])
def test_recurrent_layers(kind):
    parts = {
        "gru": lambda: [layers.GRU(3, return_sequences=True)],
        "lstm_masked": lambda: [layers.Masking(), layers.LSTM(2)],
        "bidirectional": lambda: [layers.Bidirectional(layers.SimpleRNN(3))],
    }[kind]()
    x = normal(0, 3, 4, 2)
    x[1, 2:] = 0.0
    agrees(parts, plain, {"x": x})


# Tables that give scores.


@pytest.mark.fast_cases("4-drawn1")
@pytest.mark.parametrize("size, drawn", [(1, [0]), (4, [2, 4, 2, 1, 2])])
def test_candidate_scores_with_duplicates_and_hits(size, drawn):
    parts = [tfdp_rec.CandidateScores(5, 3, remove_accidental_hits=hits) for hits in (True, False)]
    inputs = {"x": normal(0, size, 3), "own": ids(0, 5, size), "all": np.array(drawn)}

    def forward(parts, b):
        return [tf.nn.log_softmax(part(b["x"], b["own"], b["all"])) for part in parts]

    agrees(parts, forward, inputs, shared=("all",))


def test_candidate_scores_twice_on_one_table():
    def forward(parts, b):
        return parts[0](b["x"], b["own"], b["all"]), parts[0](b["x"] ** 2, b["other"], negatives=b["more"])

    inputs = {"x": normal(0, 3, 2), "own": ids(0, 6, 3), "other": ids(1, 6, 3), "all": [1, 1, 2], "more": [2, 5]}
    layer = tfdp_rec.CandidateScores(6, 2)
    agrees([layer], forward, {k: np.array(v) for k, v in inputs.items()}, shared=("all", "more"))


@pytest.mark.fast_cases("5")
@pytest.mark.parametrize("vocabulary", [2, 5])
def test_tied_output_table(vocabulary):
    parts = [layers.ReversibleEmbedding(vocabulary, 3), layers.Dense(3, activation="tanh")]

    def forward(parts, b):
        return tf.nn.log_softmax(parts[0](parts[1](parts[0](b["x"])), reverse=True))

    agrees(parts, forward, {"x": ids(0, vocabulary, 3, 4)})


# Reuse.


def test_one_layer_called_several_times():
    def forward(parts, b):
        table, dense, norm, conv = parts
        a, c = table(b["a"]), table(b["c"])
        return conv(norm(dense(a))), conv(norm(dense(dense(c))))

    parts = [layers.Embedding(4, 3), layers.Dense(3, activation="tanh"), layers.LayerNormalization()]
    parts.append(layers.Conv1D(2, 2, padding="same"))
    agrees(parts, forward, {"a": ids(0, 4, 3, 1), "c": ids(1, 4, 3, 4)})


def test_one_table_in_two_towers_and_in_a_model_inside_a_model():
    table = layers.Embedding(6, 3)
    left_ids, right_ids = keras.Input([4], dtype="int32"), keras.Input([2, 2], dtype="int32")
    pool = layers.GlobalAveragePooling1D()
    left = keras.Model(left_ids, layers.Dense(2, name="l")(pool(table(left_ids))))
    right = keras.Model(right_ids, layers.Dense(2, name="r")(layers.Flatten()(table(right_ids))))

    def forward(parts, b):
        return parts[0](b["x"]) * parts[1](b["y"])

    agrees([left, right], forward, {"x": ids(0, 6, 3, 4), "y": ids(1, 6, 3, 2, 2)})


def test_a_dense_layer_recorded_by_itself_and_inside_a_loop():
    dense = layers.Dense(2, activation="tanh")
    parts = [layers.TimeDistributed(dense), dense]
    agrees(parts, lambda p, b: p[0](b["x"]) + p[1](b["x"][:, 0])[:, None], {"x": normal(0, 3, 4, 2)})


def test_a_frozen_layer_gives_no_gradient_but_lets_one_pass():
    first, frozen = layers.Dense(3, activation="tanh"), layers.Dense(2)
    frozen.trainable = False
    found = agrees([first, frozen], plain, {"x": normal(0, 3, 2)})
    assert set(found.gradients) == {v.path for v in first.trainable_variables}


def test_preprocessing_layers_pass_through():
    names = layers.StringLookup(vocabulary=["a", "b", "c"])
    numbers = layers.IntegerLookup(vocabulary=[10, 20])
    buckets, hashed = layers.Discretization(bin_boundaries=[0.0, 1.0]), layers.Hashing(4)
    tables = [layers.Embedding(size, 2) for size in (4, 3, 3, 4)]

    def forward(parts, b):
        found = (names(b["name"]), numbers(b["number"]), buckets(b["value"]), hashed(b["name"]))
        return tf.concat([table(i) for table, i in zip(parts, found)], axis=-1)

    inputs = {"name": np.array(["a", "z", "c"]), "number": np.array([20, 7, 20]), "value": np.array([-1.0, 0.5, 2.0])}
    agrees(tables, forward, inputs)


@pytest.mark.slow
def test_inputs_passed_by_name():
    agrees([layers.Dense(2)], lambda p, b: p[0](inputs=b["x"]), {"x": normal(0, 3, 2)})


# What a layer finds beside its arguments, when it is run again for each example.


class Around(layers.Layer):
    """A weight of its own around another layer, which heeds masks or `training`."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.w = inner, self.add_weight(shape=(3, 2), name="w")

    def call(self, x):
        return keras.ops.matmul(self.inner(x), self.w)


class Thrice(layers.Layer):
    def call(self, x, training=None):
        return x * (3.0 if training else 1.0)


HEEDING = {
    "pooling": lambda: layers.GlobalAveragePooling1D(),
    "a loop": lambda: layers.GRU(3),
    "attention": lambda: keras.Sequential([Attending(), layers.GlobalAveragePooling1D()]),
}


class Attending(layers.Layer):
    def __init__(self):
        super().__init__()
        self.supports_masking, self.attention = True, layers.MultiHeadAttention(1, 3)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


@pytest.mark.slow
@pytest.mark.slow_cases("a loop")
@pytest.mark.parametrize("heeding", HEEDING)
def test_masks_on_arguments_are_there_when_a_layer_is_run_again(heeding):
    parts = [layers.Embedding(5, 3, mask_zero=True), Around(HEEDING[heeding]())]
    inputs = np.array([[1, 0, 0, 2], [3, 3, 0, 0], [1, 2, 4, 4]])
    agrees(parts, plain, {"x": inputs})


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_that_is_run_again_is_told_whether_it_trains(training):
    x, layer = keras.Input([3]), Around(Thrice())
    model = tfdp_rec.PrivateModel(x, layer(x))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=3), loss="mse")
    inputs, targets = normal(1, 3, 3), normal(2, 3, 2)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.reduce_mean(tf.square(model(inputs, training=training) - targets), axis=1))
    found = clipped_sum(model, (inputs, targets), 1e6, training=training).gradients[layer.w.path]
    np.testing.assert_allclose(found, tape.gradient(loss, layer.w.value), rtol=1e-12)


# Weights of other layers within a call.


class Tied(layers.Layer):
    def __init__(self, other):
        super().__init__()
        vars(self)["other"], self.b = [other], self.add_weight(shape=(1,), name="b")

    def call(self, h, table=None):
        return h * keras.ops.sum((table or self.other[0]).embeddings) + self.b


@pytest.mark.parametrize("given", [True, False], ids=["as an argument", "hidden from Keras"])
def test_a_layer_that_reads_the_weights_of_another_is_refused(given):
    table = layers.Embedding(5, 3)
    forward = lambda p, b: p[1](p[0](b["x"]), table=table) if given else p[1](p[0](b["x"]))  # noqa: E731
    with pytest.raises(tfdp_rec.NotPrivate, match="reads weights of other layers .embedding.*/embeddings"):
        agrees([table, Tied(table)], forward, {"x": ids(0, 5, 4)})


def test_a_layer_may_read_weights_of_others_that_are_not_trained():
    table = layers.Embedding(5, 3, trainable=False)
    agrees([table, Tied(table)], lambda p, b: p[1](p[0](b["x"])), {"x": ids(0, 5, 4)})


def test_the_first_argument_may_be_named_last():
    layer, table = layers.Dense(2), layers.ReversibleEmbedding(5, 3)
    forward = lambda p, b: (p[0](training=True, inputs=b["x"]), p[1](reverse=True, inputs=b["x"]))  # noqa: E731
    agrees([layer, table], forward, {"x": normal(0, 4, 3)})
