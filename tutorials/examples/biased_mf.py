"""Biased matrix factorization: a rating is the mean, a bias of the user and of the item, and a product of rows.

Public original: RecLearn, MF/model.py and MF/train.py (a subclassed model upon a layer that holds two tables and two
biases as weights of its own, each with an l2 regularizer; squared error, Adam). Mended for Keras 3: two weights were of
one name.
Lines changed besides the data: -2 +3. The layer's weights, which are looked up, are trained as they stand.
"""

import keras
import numpy as np
import tensorflow as tf
from keras.layers import Layer
from keras.regularizers import L2

import tfdp_rec  # new

# Ratings around 3.5, of users and items of which some are popular: both have a bias and three factors.
USERS, ITEMS, ROWS, TESTS = 300, 100, 24_000, 4_000
rng = np.random.default_rng(0)
pairs = np.stack([size * rng.random(ROWS) ** 1.5 for size in (USERS, ITEMS)], axis=1).astype("int32")
user, item = [(0.5 * rng.normal(size=size), 0.6 * rng.normal(size=[size, 3])) for size in (USERS, ITEMS)]
products = (user[1][pairs[:, 0]] * item[1][pairs[:, 1]]).sum(1)
ratings = 3.5 + user[0][pairs[:, 0]] + item[0][pairs[:, 1]] + products + 0.2 * rng.normal(size=ROWS)
x, y = (np.full([ROWS, 1], 3.5, "float32"), pairs), ratings.astype("float32")[:, None]
test_x, test_y = tuple(column[:TESTS] for column in x), y[:TESTS]
x, y = tuple(column[TESTS:] for column in x), y[TESTS:]


class MF_layer(Layer):
    """Two tables, and two biases."""

    def __init__(self, user_num, item_num, latent_dim, use_bias=False, reg=1e-4):
        super().__init__()
        self.user_num, self.item_num, self.latent_dim = user_num, item_num, latent_dim
        self.use_bias, self.reg = use_bias, reg

    def build(self, input_shape):
        def table(name, rows, width, trainable=True):
            l2 = L2(self.reg)
            return self.add_weight((rows, width), "random_normal", trainable=trainable, regularizer=l2, name=name)

        self.p = table("user_latent_matrix", self.user_num, self.latent_dim)
        self.q = table("item_latent_matrix", self.item_num, self.latent_dim)
        self.user_bias = table("user_bias", self.user_num, 1, self.use_bias)
        self.item_bias = table("item_bias", self.item_num, 1, self.use_bias)

    def call(self, inputs):
        user_id, item_id, avg_score = inputs
        latent_user = tf.nn.embedding_lookup(self.p, user_id)
        latent_item = tf.nn.embedding_lookup(self.q, item_id)
        outputs = tf.reduce_sum(latent_user * latent_item, axis=1, keepdims=True)
        user_bias = tf.nn.embedding_lookup(self.user_bias, user_id)
        item_bias = tf.nn.embedding_lookup(self.item_bias, item_id)
        return avg_score + user_bias + item_bias + outputs if self.use_bias else outputs


# was: class MF(keras.Model):
class MF(tfdp_rec.PrivateModel):
    """The layer upon a mean and a pair of ids."""

    def __init__(self, user_num, item_num, latent_dim, use_bias=False):
        super().__init__()
        self.mf_layer = MF_layer(user_num, item_num, latent_dim, use_bias)

    def call(self, inputs):
        dense_inputs, sparse_inputs = inputs
        return self.mf_layer([sparse_inputs[:, 0], sparse_inputs[:, 1], dense_inputs])


model = MF(USERS, ITEMS, 32, use_bias=True)
model.compile(loss="mse", optimizer=keras.optimizers.Adam(0.001), metrics=[keras.metrics.RootMeanSquaredError("rmse")])
# was: model.fit(x, y, epochs=10, batch_size=512)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=512, epochs=10).fit()

predictions = model.predict(tuple(column[:3] for column in test_x))
scores = model.evaluate(test_x, test_y, return_dict=True)
scores["trivial"] = np.std(test_y)
model.save_weights("model.weights.h5")
mean, ids = keras.InputSpec(shape=(None, 1), dtype="float32"), keras.InputSpec(shape=(None, 2), dtype="int32")
model.export("servable", input_signature=[(mean, ids)])
