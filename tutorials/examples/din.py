"""DIN: what was watched before counts by how it goes with what is shown now, and both say whether it is clicked.

Public original: RecLearn, DIN/model.py, DIN/modules.py and DIN/train.py (TF 2: a subclassed model of tables with an l2
regularizer, an attention of dense layers, batch normalisation and PReLU; binary cross-entropy, Adam). Mended for Keras
3: `input_length` is gone.
Lines changed besides the data: -4 +5: batch normalisation mixes the examples of a batch and is refused; weights of an
activation that is within a `Dense` are refused, and are not in a layer of their own.
"""

import keras
import numpy as np
import tensorflow as tf
from keras.layers import Dense, Dropout, Embedding, Layer, PReLU
from keras.regularizers import L2

import tfdp_rec  # new

# Histories of items 1 to 60 of two of ten categories, 0 pads; an item is clicked if its category is among them.
ITEMS, CATEGORIES, ROWS, TESTS, LENGTH = 60, 10, 24_000, 4_000, 8
rng = np.random.default_rng(0)
likes = np.argsort(rng.random([ROWS, CATEGORIES]))[:, :2]
category = np.take_along_axis(likes, rng.integers(2, size=[ROWS, LENGTH]), axis=1)
shown = np.where(rng.random(ROWS) < 0.5, likes[:, 0], rng.integers(CATEGORIES, size=ROWS))


def with_category(kind):
    """Items of these categories, and the categories, from 1."""
    item = 1 + kind + CATEGORIES * (ITEMS // CATEGORIES * rng.random(kind.shape) ** 1.5).astype("int64")
    return np.stack([item, 1 + kind], axis=-1).astype("int32")


seq_inputs = with_category(category) * (np.arange(LENGTH) < rng.integers(3, LENGTH + 1, [ROWS, 1]))[..., None]
sparse_inputs, dense_inputs = rng.integers(5, size=[ROWS, 1]).astype("int32"), rng.random([ROWS, 1], "float32")
x = (dense_inputs, sparse_inputs, seq_inputs.astype("int32"), with_category(shown))
clicked = 3 * (seq_inputs[:, :, 1] == 1 + shown[:, None]).any(1) - 1.5
y = (rng.random(ROWS) < 1 / (1 + np.exp(-clicked))).astype("float32")[:, None]
test_x, test_y = tuple(column[:TESTS] for column in x), y[:TESTS]
x, y = tuple(column[TESTS:] for column in x), y[TESTS:]


class Attention_Layer(Layer):
    """The sum of what was watched, weighted by dense layers upon it and what is shown."""

    def __init__(self, att_hidden_units, activation):
        super().__init__()
        self.att_dense = [Dense(unit, activation=activation) for unit in att_hidden_units]
        self.att_final_dense = Dense(1)

    def call(self, inputs):
        q, k, v, mask = inputs
        q = tf.reshape(tf.tile(q, [1, k.shape[1]]), [-1, k.shape[1], k.shape[2]])
        info = tf.concat([q, k, q - k, q * k], axis=-1)
        for dense in self.att_dense:
            info = dense(info)
        outputs = tf.squeeze(self.att_final_dense(info), axis=-1)
        paddings = tf.ones_like(outputs) * (-(2**32) + 1)
        outputs = tf.nn.softmax(tf.where(tf.equal(mask, 0), paddings, outputs))
        return tf.squeeze(tf.matmul(outputs[:, None], v), axis=1)


# was: class DIN(keras.Model):
class DIN(tfdp_rec.PrivateModel):
    """Tables, the attention, and dense layers upon all."""

    def __init__(self, others, behaviors, embed_dim, att_hidden_units, ffn_hidden_units, dnn_dropout, embed_reg=1e-4):
        super().__init__()
        uniform, l2 = "random_uniform", L2(embed_reg)
        self.embed_sparse_layers = [Embedding(number, embed_dim, uniform, l2) for number in others]
        self.embed_seq_layers = [Embedding(number, embed_dim, uniform, l2) for number in behaviors]
        self.attention_layer = Attention_Layer(att_hidden_units, "sigmoid")
        # was: self.bn = keras.layers.BatchNormalization(trainable=True)
        self.bn = keras.layers.LayerNormalization(trainable=True)
        # was: self.ffn = [Dense(unit, activation=PReLU()) for unit in ffn_hidden_units]
        self.ffn = [keras.Sequential([Dense(unit), PReLU()]) for unit in ffn_hidden_units]
        self.dropout = Dropout(dnn_dropout)
        self.dense_final = Dense(1)

    def call(self, inputs):
        dense_inputs, sparse_inputs, seq_inputs, item_inputs = inputs
        mask = tf.cast(tf.not_equal(seq_inputs[:, :, 0], 0), tf.float32)
        others = [table(sparse_inputs[:, i]) for i, table in enumerate(self.embed_sparse_layers)]
        seq_embed = tf.concat([table(seq_inputs[:, :, i]) for i, table in enumerate(self.embed_seq_layers)], axis=-1)
        item_embed = tf.concat([table(item_inputs[:, i]) for i, table in enumerate(self.embed_seq_layers)], axis=-1)
        user_info = self.attention_layer([item_embed, seq_embed, seq_embed, mask])
        info_all = self.bn(tf.concat([user_info, item_embed, dense_inputs, *others], axis=-1))
        for dense in self.ffn:
            info_all = dense(info_all)
        return tf.nn.sigmoid(self.dense_final(self.dropout(info_all)))


model = DIN([5], [ITEMS + 1, CATEGORIES + 1], 8, att_hidden_units=[80, 40], ffn_hidden_units=[80, 40], dnn_dropout=0.5)
model.compile(
    loss=keras.losses.BinaryCrossentropy(),
    optimizer=keras.optimizers.Adam(learning_rate=0.001),
    metrics=[keras.metrics.AUC(name="auc")],
)
# was: model.fit(x, y, epochs=5, batch_size=256)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=256, epochs=5).fit()

predictions = model.predict(tuple(column[:3] for column in test_x))
scores = model.evaluate(test_x, test_y, return_dict=True)
scores["trivial"] = 0.5
model.save_weights("model.weights.h5")
inputs = tuple(keras.InputSpec(shape=(None, *column.shape[1:]), dtype=str(column.dtype)) for column in x)
model.export("servable", input_signature=[inputs])
