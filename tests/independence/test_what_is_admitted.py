"""The layers, losses and models that people use are read through, in training, forward and backward.

That is the list to look at when TensorFlow or Keras make a layer of other operations: what has no rule is named.
"""

# ruff: noqa: E501 (a table reads better with a line a case)

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored
from keras import layers
from zoo import ZOO, built

import tfdp_rec
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.core.sensitivity.step_reading import StepReading

rng = np.random.default_rng(0)
X = rng.normal(size=[4, 3]).astype("float32")
S = rng.normal(size=[4, 5, 4]).astype("float32")
IDS = rng.integers(1, 4, size=[4, 5])
IMAGES = rng.normal(size=[4, 6, 6, 2]).astype("float32")
SOLID = rng.normal(size=[4, 4, 4, 4, 1]).astype("float32")
WORDS = np.array([["a", "b"], ["c", "a"], ["zz", ""], ["a", "a"]])


class Read(Exception):
    """The reading is done, and the rest of the step not wanted."""


@pytest.fixture
def readings(monkeypatch):
    """Readings of steps, which stop there."""
    done = []
    original = StepReading.read

    def reads(self, *args):
        original(self, *args)
        done.append(self)
        raise Read

    monkeypatch.setattr(StepReading, "read", reads)
    return done


def is_read(model, batch, readings):
    with pytest.raises(Read):
        clipped_sum(model, batch, 1.0, training=True)
    assert len(readings) == 1
    readings.clear()


def chain(parts, x):
    for part in parts:
        x = part(x)
    return x


def check(parts, x, readings, forward=None):
    def run(parts, batch):
        return chain(parts, batch["x"]) if forward is None else forward(parts, batch["x"])

    model = Scored(parts, run)
    batch = {"x": x, "weight": np.ones([len(x)], "float32")}
    model.per_example_loss(batch)
    is_read(model, batch, readings)


RECURRENT = {
    "gru": lambda: [layers.GRU(2)],
    "gru, reset before": lambda: [layers.GRU(2, reset_after=False, return_sequences=True)],
    "lstm": lambda: [layers.LSTM(2, return_sequences=True), layers.Dense(2)],
    "simple": lambda: [layers.SimpleRNN(3, go_backwards=True)],
    "both ways": lambda: [layers.Bidirectional(layers.LSTM(2))],
    "unrolled": lambda: [layers.GRU(2, unroll=True)],
    "stacked": lambda: [layers.LSTM(2, return_sequences=True), layers.GRU(3)],
    "masked": lambda: [layers.Masking(), layers.LSTM(2)],
    "distributed": lambda: [layers.TimeDistributed(layers.Dense(3))],
}
SEQUENCES = {
    "conv": lambda: [layers.Conv1D(3, 2, padding="causal", activation="relu"), layers.Dense(2)],
    "in strides": lambda: [layers.Dense(4), layers.Conv1D(2, 2, strides=2)],
    "transposed": lambda: [layers.Dense(4), layers.Conv1DTranspose(2, 2)],
    "greatest": lambda: [layers.Dense(4), layers.GlobalMaxPooling1D()],
    "average": lambda: [layers.Dense(4), layers.GlobalAveragePooling1D()],
    "norms": lambda: [
        layers.Dense(4), layers.LayerNormalization(), layers.GroupNormalization(2), layers.RMSNormalization(),
        layers.UnitNormalization(),
    ],
    "shapes": lambda: [
        layers.Dense(4), layers.Reshape([2, 10]), layers.Permute([2, 1]), layers.Flatten(), layers.RepeatVector(3),
        layers.ZeroPadding1D(1), layers.Cropping1D(1), layers.UpSampling1D(2),
    ],
    "prelu": lambda: [layers.Dense(4), layers.PReLU()],
    "discretised": lambda: [layers.Discretization(bin_boundaries=[0.0, 1.0]), layers.Reshape([20]), layers.Embedding(3, 2)],
    "normalised": lambda: [layers.Normalization(mean=0.5, variance=2.0), layers.Rescaling(2.0), layers.Dense(2)],
}  # fmt: skip
DROPOUT = {
    "dropout": lambda: [layers.Dropout(0.5), layers.Dense(2)],
    "spatial": lambda: [layers.Dense(4), layers.SpatialDropout1D(0.5)],
    "gaussian": lambda: [layers.Dense(4), layers.GaussianDropout(0.5), layers.GaussianNoise(1.0)],
    "alpha": lambda: [layers.Dense(4), layers.AlphaDropout(0.5)],
}
ATTENTION = {
    "multi-head": (lambda: [layers.MultiHeadAttention(2, 3, dropout=0.1)], lambda p, x: p[0](x, x, use_causal_mask=True)),
    "grouped": (
        lambda: [layers.GroupQueryAttention(head_dim=2, num_query_heads=4, num_key_value_heads=2)],
        lambda p, x: p[0](x, x),
    ),
    "dot product": (lambda: [layers.Dense(4), layers.Attention(use_scale=True)], lambda p, x: p[1]([p[0](x), x])),
    "additive": (lambda: [layers.Dense(4), layers.AdditiveAttention()], lambda p, x: p[1]([p[0](x), x])),
    "products": (
        lambda: [layers.Dense(4), layers.Dot(axes=(2, 2)), layers.Add(), layers.Concatenate(), layers.Maximum()],
        lambda p, x: (p[1]([p[0](x), x]), p[4]([p[2]([p[0](x), x]), x]), p[3]([p[0](x), x])),
    ),
}  # fmt: skip
ACTIVATIONS = """relu tanh sigmoid gelu silu softplus softsign elu selu exponential leaky_relu relu6 hard_sigmoid mish
    log_softmax softmax celu""".split()


@pytest.mark.slow_cases("stacked")
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers(kind, readings):
    check(RECURRENT[kind](), S, readings)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_layers_on_sequences(kind, readings):
    check(SEQUENCES[kind](), S, readings)


@pytest.mark.parametrize("kind", DROPOUT)
def test_random_layers_in_training(kind, readings):
    check(DROPOUT[kind](), S, readings, _in_training)


def _in_training(parts, x):
    for part in parts:
        x = part(x, training=True) if "Drop" in type(part).__name__ or "Noise" in type(part).__name__ else part(x)
    return x


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention(kind, readings):
    parts, forward = ATTENTION[kind]
    check(parts(), S, readings, forward)


def test_activations(readings):
    check([layers.Dense(3, activation=name) for name in ACTIVATIONS], X, readings)


def test_images(readings):
    parts = [layers.Conv2D(3, 2), layers.UpSampling2D(2), layers.GlobalAveragePooling2D(), layers.Dense(2)]
    check(parts, IMAGES, readings)
    check([layers.Conv2DTranspose(2, 2), layers.SpatialDropout2D(0.5), layers.Flatten(), layers.Dense(2)], IMAGES, readings)


def test_embeddings(readings):
    check([layers.Embedding(5, 3, mask_zero=True), layers.LSTM(2)], IDS, readings)
    check([layers.Embedding(5, 3, mask_zero=True), layers.GlobalAveragePooling1D(), layers.Dense(2)], IDS, readings)
    check([layers.ReversibleEmbedding(5, 3)], IDS, readings, lambda p, x: p[0](p[0](x), reverse=True))


def test_preprocessing(readings):
    names = layers.StringLookup(vocabulary=["a", "b"])
    hot = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    parts = [names, layers.Hashing(5), hot, layers.Embedding(9, 2), layers.Dense(2), layers.Dense(2)]

    def forward(p, x):
        category = layers.CategoryEncoding(9, output_mode="one_hot")
        return p[3](p[0](x)), p[3](p[1](x)), p[4](p[2](x[:, 0])), p[5](category(p[0](x[:, :1])))

    check(parts, WORDS, readings, forward)


LOSSES = """mse mae mape msle huber log_cosh binary_crossentropy categorical_crossentropy kl_divergence poisson
    cosine_similarity categorical_hinge binary_focal_crossentropy categorical_focal_crossentropy""".split()
LABELS = {
    "sparse": (keras.losses.SparseCategoricalCrossentropy(from_logits=True), np.array([0, 1, 2, 0])),
    "sparse, one ignored": (keras.losses.SparseCategoricalCrossentropy(ignore_class=1), np.array([0, 1, 2, 0])),
    "smoothed": (keras.losses.CategoricalCrossentropy(label_smoothing=0.1), np.eye(3, dtype="float32")[[0, 1, 2, 0]]),
    "smoothed, logits": (
        keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1), np.eye(3, dtype="float32")[[0, 1, 2, 0]]
    ),
}  # fmt: skip


@pytest.mark.parametrize("from_logits", [True, False])
def test_a_class_at_each_place_of_a_row(from_logits, readings):
    """TensorFlow asserts there that labels and logits have one shape; refused was the line of Keras that asked it."""
    inputs = keras.Input([5, 4])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(3, activation=None if from_logits else "softmax")(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), loss)
    is_read(model, (S, IDS % 3, np.ones([4, 5], "float32")), readings)


@pytest.mark.parametrize("loss", [*LOSSES, *LABELS])
def test_losses_with_sample_weights(loss, readings):
    inputs = keras.Input([3])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(3, activation="softmax")(inputs))
    kind, y = LABELS.get(loss, (loss, np.eye(3, dtype="float32")[[0, 1, 2, 0]]))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), kind)
    is_read(model, (X, y, np.ones([4], "float32")), readings)


@pytest.mark.slow_cases(
    "mlp-mixed_bfloat16", "two_tower-float32", "transformer-mixed_bfloat16", "text-float32", "gru-mixed_bfloat16",
)  # fmt: skip
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ZOO)
def test_models_of_the_zoo(name, policy, readings):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model, batch = built(name)
        is_read(model, batch, readings)
    finally:
        keras.config.set_dtype_policy(before)


def test_the_last_step_of_each_example(readings):
    def forward(parts, x):
        last = tf.cast(x[:, 0, 0] > 0, tf.int32) + 2
        return tf.reduce_sum(parts[0](x) * tf.one_hot(last, 5)[..., None], axis=1)

    check([layers.Dense(3)], S, readings, forward)


def test_a_frozen_batch_normalization(readings):
    """In inference mode it scales by statistics that are shared; it is its class that is refused, for now, not the graph."""
    scale = keras.Variable(np.ones([3], "float32"), trainable=False)

    def forward(parts, x):
        return tf.nn.batch_normalization(parts[0](x), scale.value, scale.value, None, None, 1e-3)

    check([layers.Dense(3)], X, readings, forward)
    assert tf.is_tensor(scale.value)
