"""Mult-VAE: a user's clicks, through a distribution of few numbers, tell which other clicks are likely.

Public original: recommenders-team, recommenders/models/vae/multinomial_vae.py (a functional model whose loss has a
multinomial likelihood and, read from the layers inside, a divergence; Adam). Mended for Keras 3: `Lambda` layers of the
backend are layers of their own, random numbers have a seed generator and are drawn in training alone, and the
divergence is an output with a loss.
Lines changed besides the data: -3 +4: the likelihood is averaged over the batch; private training needs each example's.
"""

import keras
import numpy as np
import tensorflow as tf
from keras.layers import Dense, Dropout, Input, Layer, UnitNormalization

import tfdp_rec  # new

# Clicks of users on items of six kinds, the popular ones more often; of a test user the last click is to be found.
KINDS, ITEMS, ROWS, TESTS, CLICKS = 6, 120, 22_000, 2_000, 12
rng = np.random.default_rng(0)
likes = np.argsort(rng.random([ROWS, KINDS]))[:, :2]
kind = np.take_along_axis(likes, rng.integers(2, size=[ROWS, CLICKS]), axis=1)
clicks = kind + KINDS * (ITEMS // KINDS * rng.random([ROWS, CLICKS]) ** 1.5).astype("int64")
matrix, last, told = np.zeros([ROWS, ITEMS], "float32"), clicks[:, -1], np.arange(ROWS)[:, None]
matrix[told, clicks] = 1
test_x, x = matrix[:TESTS].copy(), matrix[TESTS:]
test_x[np.arange(TESTS), last[:TESTS]] = 0
y = {"x_bar": x, "kl": np.zeros([len(x), 1], "float32")}


class TakeSample(Layer):
    """Normal numbers of a mean and the logarithm of a variance."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator()

    def call(self, mean, log_var, training=False):
        if not training:
            return mean
        epsilon = keras.random.normal(tf.shape(mean), seed=self.seed_generator)
        return mean + tf.exp(log_var / 2) * epsilon


class Divergence(Layer):
    """How far such a distribution is from the standard one."""

    def call(self, mean, log_var):
        return 0.5 * tf.reduce_sum(-1 - log_var + tf.square(mean) + tf.exp(log_var), axis=-1, keepdims=True)


def create_model(original_dim, intermediate_dim=200, latent_dim=70, drop_encoder=0.5, drop_decoder=0.5):
    small = keras.initializers.TruncatedNormal(stddev=0.001)
    inputs = Input([original_dim])
    h = Dropout(drop_encoder)(UnitNormalization(axis=1)(inputs))
    h = Dense(intermediate_dim, "tanh", bias_initializer=small)(h)
    z_mean, z_log_var = Dense(latent_dim)(h), Dense(latent_dim)(h)
    z = TakeSample()(z_mean, z_log_var)
    h_decoded = Dropout(drop_decoder)(Dense(intermediate_dim, "tanh", bias_initializer=small)(z))
    outputs = {"x_bar": Dense(original_dim, name="x_bar")(h_decoded), "kl": Divergence(name="kl")(z_mean, z_log_var)}
    # was: return keras.Model(inputs, outputs)
    return tfdp_rec.PrivateModel(inputs, outputs)


def neg_ll(x, x_bar):
    # was: return -tf.reduce_mean(tf.reduce_sum(tf.nn.log_softmax(x_bar) * x, axis=-1))
    return -tf.reduce_sum(tf.nn.log_softmax(x_bar) * x, axis=-1)


def kl_loss(_, kl):
    return tf.squeeze(kl, axis=-1)


model = create_model(ITEMS)
model.compile(
    optimizer=keras.optimizers.Adam(0.001),
    loss={"x_bar": neg_ll, "kl": kl_loss},
    loss_weights={"x_bar": 1.0, "kl": 1.0},  # the published beta
)
# was: model.fit(x, y, epochs=10, batch_size=500)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=500, epochs=10).fit()

predictions = model.predict(test_x)["x_bar"]
popular = np.broadcast_to(x.sum(0), test_x.shape)


def recall_at_10(score):
    """Whether the last click is among the ten best that the user has not clicked."""
    best = np.argsort(np.where(test_x, -np.inf, score))[:, -10:]
    return np.mean((best == last[:TESTS, None]).any(1))


scores = {"recall@10": recall_at_10(predictions), "trivial": recall_at_10(popular)}
model.save_weights("model.weights.h5")
model.export("servable")
