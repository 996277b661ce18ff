"""Every layer rule against the per-example oracle, in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored, assert_matches_oracle, double_precision
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import tfdp_rec

few = settings(max_examples=3, deadline=None, derandomize=True)
sizes, seeds = st.integers(1, 4), st.integers(0, 2**31)


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


# Embedding.


@few
@given(batch=sizes, rank=st.integers(1, 3), vocabulary=st.integers(1, 6), seed=seeds)
def test_embedding_of_any_rank_with_repeated_ids(batch, rank, vocabulary, seed):
    shape = [batch, *np.random.default_rng(seed).integers(1, 5, size=[rank - 1])]
    agrees([layers.Embedding(vocabulary, 3)], plain, {"x": ids(seed, vocabulary, *shape)}, seed)


@few
@given(batch=sizes, length=sizes, seed=seeds)
def test_embedding_with_a_mask_that_a_later_layer_heeds(batch, length, seed):
    parts = [layers.Embedding(5, 3, mask_zero=True), layers.GlobalAveragePooling1D(), layers.Dense(2)]
    inputs = ids(seed, 5, batch, length)
    inputs[:, 0] = 1  # the mean over nothing is undefined
    agrees(parts, plain, {"x": inputs}, seed)


def test_embedding_bag_of_ten_thousand_ids():
    parts = [layers.Embedding(40, 2), layers.GlobalAveragePooling1D()]
    agrees(parts, plain, {"x": ids(1, 40, 2, 10_000)})


def test_float_and_small_integer_ids():
    agrees([layers.Embedding(5, 3)], plain, {"x": np.array([[0.0, 4.0], [2.0, 2.0]])})
    agrees([layers.Embedding(5, 3)], plain, {"x": np.array([[0, 4], [2, 2]], np.uint8)})


# Dense and its kin.


@few
@given(batch=sizes, rank=st.integers(2, 4), width=sizes, units=sizes, bias=st.booleans(), seed=seeds)
def test_dense_of_any_rank(batch, rank, width, units, bias, seed):
    middle = np.random.default_rng(seed).integers(1, 5, size=[rank - 2])
    layer = layers.Dense(units, activation="tanh", use_bias=bias)
    agrees([layer], plain, {"x": normal(seed, batch, *middle, width)}, seed)


@pytest.mark.parametrize("length, width, units", [(2, 9, 8), (9, 2, 3)])
def test_dense_by_products_of_inputs_and_by_formed_gradients(length, width, units):
    agrees([layers.Dense(units)], plain, {"x": normal(0, 3, length, width)})


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
]


@pytest.mark.parametrize("equation, shape, output, bias", EQUATIONS)
def test_einsum_dense(equation, shape, output, bias):
    layer = layers.EinsumDense(equation, output_shape=output, bias_axes=bias, activation="tanh")
    agrees([layer], plain, {"x": normal(1, 3, *shape)})


def test_einsum_dense_with_biases_on_some_axes():
    for bias in ("d", "e", "be", "bde"):
        layer = layers.EinsumDense("abc,cde->abde", output_shape=(2, 4, 5), bias_axes=bias)
        agrees([layer], plain, {"x": normal(1, 3, 2, 3)})


@few
@given(batch=sizes, length=sizes, other=sizes, seed=seeds)
def test_multi_head_attention_self_and_cross_with_masks(batch, length, other, seed):
    keep = np.random.default_rng(seed).uniform(size=[batch, length, other]) < 0.7
    keep[:, :, 0] = True
    inputs = {"x": normal(seed, batch, length, 3), "y": normal(seed + 1, batch, other, 2), "keep": keep}

    def forward(parts, b):
        return parts[0](b["x"], b["x"], use_causal_mask=True), parts[1](b["x"], b["y"], attention_mask=b["keep"])

    agrees([layers.MultiHeadAttention(2, 3), layers.MultiHeadAttention(2, 2, value_dim=3)], forward, inputs, seed)


def test_grouped_query_attention():
    layer = layers.GroupQueryAttention(head_dim=2, num_query_heads=4, num_key_value_heads=2)
    agrees([layer], lambda parts, b: parts[0](b["x"], b["x"]), {"x": normal(0, 3, 4, 3)})


# Normalisation and convolution.


@pytest.mark.parametrize(
    "options",
    [{}, {"axis": [1, 2]}, {"axis": [1]}, {"center": False}, {"scale": False}, {"axis": [-1, -2]}, {"axis": (1, -1)}],
    ids=str,
)
def test_layer_normalization(options):
    agrees([layers.LayerNormalization(**options)], plain, {"x": normal(0, 3, 4, 4)})
    if "axis" not in options:
        agrees([layers.LayerNormalization(**options)], plain, {"x": normal(0, 3, 5)})


@pytest.mark.filterwarnings("ignore:You passed `rms_scaling")
@pytest.mark.parametrize("axis", [-1, [1, 2]], ids=str)
def test_layer_normalization_with_rms_scaling(axis):
    agrees([layers.LayerNormalization(axis=axis, rms_scaling=True)], plain, {"x": normal(0, 3, 4, 5)})


@few
@given(
    batch=sizes,
    length=st.integers(5, 9),
    size=st.integers(1, 3),
    step=st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2)]),
    padding=st.sampled_from(["valid", "same", "causal"]),
    groups=st.sampled_from([1, 1, 2, 4]),
    seed=seeds,
)
def test_conv1d(batch, length, size, step, padding, groups, seed):
    (stride, dilation), channels = step, 2 if groups == 1 else 4
    filters, more = 3 * groups, {"strides": stride, "dilation_rate": dilation, "padding": padding}
    layer = layers.Conv1D(filters, size, groups=groups, activation="tanh", **more)
    agrees([layer], plain, {"x": normal(seed, batch, length, channels)}, seed)


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
    "separable": lambda: layers.SeparableConv1D(3, 2),
    "time": lambda: layers.TimeDistributed(layers.Dense(3)),
}


@pytest.mark.parametrize("kind", UNIVERSAL)
def test_layers_without_a_rule(kind):
    agrees([UNIVERSAL[kind]()], plain, {"x": normal(0, 3, 4) if kind == "own" else normal(0, 3, 5, 4)})


def test_attention_with_a_scale_takes_a_list_of_inputs():
    def forward(parts, b):
        return parts[0]([b["x"], b["y"]]), parts[1]([b["x"], b["y"]])

    batch = {"x": normal(0, 3, 4, 2), "y": normal(1, 3, 5, 2)}
    agrees([layers.Attention(use_scale=True), layers.AdditiveAttention()], forward, batch)


slow = pytest.mark.slow


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


@few
@given(batch=sizes, candidates=sizes, hits=st.booleans(), seed=seeds)
def test_candidate_scores_with_duplicates_and_hits(batch, candidates, hits, seed):
    layer = tfdp_rec.CandidateScores(5, 3, remove_accidental_hits=hits)
    inputs = {"x": normal(seed, batch, 3), "own": ids(seed, 5, batch), "all": ids(seed + 1, 5, candidates)}

    def forward(parts, b):
        return tf.nn.log_softmax(parts[0](b["x"], b["own"], b["all"]))

    agrees([layer], forward, inputs, seed, shared=("all",))


def test_candidate_scores_twice_on_one_table():
    def forward(parts, b):
        return parts[0](b["x"], b["own"], b["all"]), parts[0](b["x"] ** 2, b["other"], negatives=b["more"])

    inputs = {"x": normal(0, 3, 2), "own": ids(0, 6, 3), "other": ids(1, 6, 3), "all": [1, 1, 2], "more": [2, 5]}
    layer = tfdp_rec.CandidateScores(6, 2)
    agrees([layer], forward, {k: np.array(v) for k, v in inputs.items()}, shared=("all", "more"))


@few
@given(batch=sizes, length=sizes, vocabulary=st.integers(2, 5), seed=seeds)
def test_tied_output_table(batch, length, vocabulary, seed):
    parts = [layers.ReversibleEmbedding(vocabulary, 3), layers.Dense(3, activation="tanh")]

    def forward(parts, b):
        return tf.nn.log_softmax(parts[0](parts[1](parts[0](b["x"])), reverse=True))

    agrees(parts, forward, {"x": ids(seed, vocabulary, batch, length)}, seed)


# Reuse.


@few
@given(batch=sizes, first=sizes, second=sizes, seed=seeds)
def test_one_layer_called_several_times(batch, first, second, seed):
    def forward(parts, b):
        table, dense, norm, conv = parts
        a, c = table(b["a"]), table(b["c"])
        return conv(norm(dense(a))), conv(norm(dense(dense(c))))

    parts = [layers.Embedding(4, 3), layers.Dense(3, activation="tanh"), layers.LayerNormalization()]
    parts.append(layers.Conv1D(2, 2, padding="same"))
    agrees(parts, forward, {"a": ids(seed, 4, batch, first), "c": ids(seed + 1, 4, batch, second)}, seed)


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


def test_inputs_passed_by_name():
    agrees([layers.Dense(2)], lambda p, b: p[0](inputs=b["x"]), {"x": normal(0, 3, 2)})
