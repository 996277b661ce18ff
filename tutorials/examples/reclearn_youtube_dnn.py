"""YouTubeDNN: the mean of what was watched, through dense layers, is near what is watched next.

Public original: RecLearn, reclearn/models/matching/youtubednn.py with layers/core.py and example/m_youtubednn_demo.py
(a subclassed model that holds one table as a weight of its own, looked up for the history and by
`tf.nn.sampled_softmax_loss`, which it adds by `add_loss`; Adam). Nothing was mended for Keras 3.
Lines changed besides the data: -11 +10: a table that is a weight of the model's own, and TensorFlow's sampler of
negatives, are refused; in their place an `Embedding`, and `TowerScores` upon it, which draws from the catalogue.
"""

import keras
import numpy as np
import tensorflow as tf
from keras.layers import BatchNormalization, Dense, Dropout, Embedding, Layer

import tfdp_rec  # new

# Users of four kinds watched items of their kind, the popular ones more often; the next one is among 20 others.
ITEMS, ROWS, TESTS, LENGTH, NEG = 401, 24_000, 2_000, 10, 20
rng = np.random.default_rng(0)
items = 1 + 4 * ((ITEMS - 1) // 4 * rng.random([ROWS, LENGTH + 1]) ** 1.5).astype("int32")
items += rng.integers(4, size=ROWS)[:, None].astype("int32")
x = {"click_seq": items[:, :-1], "pos_item": items[:, -1], "neg_item": rng.integers(1, ITEMS, [ROWS, NEG], "int32")}
test, train = ({name: column[part] for name, column in x.items()} for part in (slice(TESTS), slice(TESTS, None)))


class MLP(Layer):
    """Dense layers, and dropout after the last."""

    def __init__(self, hidden_units, activation="relu", dnn_dropout=0.0, is_batch_norm=False):
        super().__init__()
        self.dnn_network = [Dense(units, activation=activation) for units in hidden_units]
        self.dropout = Dropout(dnn_dropout)
        self.is_batch_norm = is_batch_norm
        self.bt = BatchNormalization()

    def call(self, x):
        for dnn in self.dnn_network:
            x = dnn(x)
        if self.is_batch_norm:
            x = self.bt(x)
        return self.dropout(x)


# was: class YoutubeDNN(keras.Model):
class YoutubeDNN(tfdp_rec.PrivateModel):
    """One table for what was watched and what may be."""

    def __init__(self, item_num, embed_dim, user_mlp, neg_num=4, batch_size=512, embed_reg=0.0):
        super().__init__()
        # was: self.item_embedding_table = self.add_weight((item_num, embed_dim), "random_normal", name="items")
        self.item_embedding_table = Embedding(item_num, embed_dim, "random_normal")
        # was: self.embedding_bias = self.add_weight((item_num,), "zeros", trainable=False, name="bias")
        self.sampled = tfdp_rec.TowerScores(self.item_embedding_table, np.arange(item_num), neg_num * batch_size)
        self.user_mlp_layer = MLP(user_mlp)
        self.item_num, self.num_sampled = item_num, neg_num * batch_size

    def call(self, inputs, training=False):
        # was: user_info = tf.reduce_mean(tf.nn.embedding_lookup(self.item_embedding_table, inputs["click_seq"]), 1)
        user_info = tf.reduce_mean(self.item_embedding_table(inputs["click_seq"]), 1)
        user_info = self.user_mlp_layer(user_info)
        if training:
            # was: label, table, bias = inputs["pos_item"][:, None], self.item_embedding_table, self.embedding_bias
            # was: loss = tf.nn.sampled_softmax_loss(table, bias, label, user_info, self.num_sampled, self.item_num)
            # was: self.add_loss(tf.reduce_mean(loss))
            # was: return tf.reduce_mean(loss)
            return self.sampled.cross_entropy(user_info, inputs["pos_item"])
        # was: pos_info = tf.nn.embedding_lookup(self.item_embedding_table, inputs["pos_item"])
        # was: neg_info = tf.nn.embedding_lookup(self.item_embedding_table, inputs["neg_item"])
        pos_info, neg_info = map(self.item_embedding_table, (inputs["pos_item"], inputs["neg_item"]))
        pos_scores = tf.reduce_sum(user_info * pos_info, axis=-1, keepdims=True)
        neg_scores = tf.reduce_sum(user_info[:, None] * neg_info, axis=-1)
        return tf.concat([pos_scores, neg_scores], axis=-1)

    def per_example_loss(self, data, training=True):  # new
        return self(data, training=True)  # new


model = YoutubeDNN(ITEMS, 16, user_mlp=[64, 16], neg_num=1, batch_size=128)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001))
# was: model.fit(train, epochs=5, batch_size=256)
tfdp_rec.make_private(model, train, epsilon=8.0, batch_size=256, epochs=5).fit()

predictions = model.predict(test)
scores = {"recall@5": np.mean((predictions[:, 1:] > predictions[:, :1]).sum(1) < 5)}
popular = np.bincount(train["pos_item"], minlength=ITEMS)
scores["trivial"] = np.mean((popular[test["neg_item"]] > popular[test["pos_item"]][:, None]).sum(1) < 5)
model.save_weights("model.weights.h5")
ids = {name: keras.InputSpec(shape=(None, *column.shape[1:]), dtype="int32", name=name) for name, column in x.items()}
model.export("servable", input_signature=[ids])
