"""DeepFM: a factorization machine and dense layers upon one set of tables, of records made of categories.

Public original: RecLearn, reclearn/models/ranking/deepfm.py with layers/core.py and example/r_deepfm_demo.py (a
subclassed model of the layers `New_FM` and `MLP`, whose BatchNormalization is made and not called; binary
cross-entropy, Adam). Mended for Keras 3: `input_length` is gone.
Lines changed besides the data: -2 +3. The weight of `New_FM`, which is looked up, is trained as it stands.
"""

import keras
import numpy as np
import tensorflow as tf
from keras.layers import BatchNormalization, Dense, Dropout, Embedding, Layer
from keras.regularizers import L2

import tfdp_rec  # new

# Clicks by six categories, some of them popular; each has a bias, and each pair of two fields goes together or not.
SIZES, ROWS, TESTS = [60, 50, 40, 30, 20, 10], 24_000, 4_000
rng = np.random.default_rng(0)
x = np.stack([size * rng.random(ROWS) ** 2 for size in SIZES], axis=1).astype("int32")
bias, latent = [rng.normal(size=size) for size in SIZES], [rng.normal(size=[size, 3]) for size in SIZES]
both = sum(table[x[:, n]] for n, table in enumerate(latent)) ** 2 - sum(
    table[x[:, n]] ** 2 for n, table in enumerate(latent)
)
logit = sum(table[x[:, n]] for n, table in enumerate(bias)) + 0.5 * both.sum(1)
y = (rng.random(ROWS) < 1 / (1 + np.exp(-logit))).astype("float32")[:, None]
test_x, test_y, x, y = x[:TESTS], y[:TESTS], x[TESTS:], y[TESTS:]
fea_cols = [{"feat_num": size, "embed_dim": 8} for size in SIZES]


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


class New_FM(Layer):
    """First and second order of a factorization machine."""

    def __init__(self, feature_length, w_reg=1e-6):
        super().__init__()
        self.feature_length, self.w_reg = feature_length, w_reg

    def build(self, input_shape):
        self.w = self.add_weight(
            name="w", shape=(self.feature_length, 1), initializer="random_normal", regularizer=L2(self.w_reg)
        )

    def call(self, inputs):
        sparse_inputs, embed_inputs = inputs["sparse_inputs"], inputs["embed_inputs"]
        first_order = tf.reduce_sum(tf.nn.embedding_lookup(self.w, sparse_inputs), axis=1)
        square_sum = tf.square(tf.reduce_sum(embed_inputs, axis=1, keepdims=True))
        sum_square = tf.reduce_sum(tf.square(embed_inputs), axis=1, keepdims=True)
        return first_order + 0.5 * tf.reduce_sum(square_sum - sum_square, axis=2)


# was: class DeepFM(keras.Model):
class DeepFM(tfdp_rec.PrivateModel):
    """A table for each field, for `New_FM` and for `MLP`."""

    def __init__(self, fea_cols, hidden_units, dnn_dropout=0.0, activation="relu", fm_w_reg=1e-6, embed_reg=1e-6):
        super().__init__()
        self.embed_layers = {
            f"embed_{i}": Embedding(feat["feat_num"], feat["embed_dim"], "random_normal", L2(embed_reg))
            for i, feat in enumerate(fea_cols)
        }
        lengths = [feat["feat_num"] for feat in fea_cols]
        self.index_mapping, self.feature_length = [sum(lengths[:i]) for i in range(len(lengths))], sum(lengths)
        self.embed_dim = fea_cols[0]["embed_dim"]
        self.fm = New_FM(self.feature_length, fm_w_reg)
        self.dnn = MLP(hidden_units, activation, dnn_dropout)
        self.dense = Dense(1)

    def call(self, inputs):
        fields = inputs.shape[1]
        sparse_embed = tf.concat([self.embed_layers[f"embed_{i}"](inputs[:, i]) for i in range(fields)], axis=-1)
        sparse_inputs = inputs + tf.constant(self.index_mapping)
        embed_inputs = tf.reshape(sparse_embed, [-1, fields, self.embed_dim])
        wide_outputs = self.fm({"sparse_inputs": sparse_inputs, "embed_inputs": embed_inputs})
        deep_outputs = self.dense(self.dnn(sparse_embed))
        return tf.nn.sigmoid(wide_outputs + deep_outputs)


model = DeepFM(fea_cols, hidden_units=[256, 128, 64], dnn_dropout=0.5)
model.compile(
    loss=keras.losses.BinaryCrossentropy(),
    optimizer=keras.optimizers.Adam(0.001),
    metrics=[keras.metrics.AUC(name="auc")],
)
# was: model.fit(x, y, epochs=5, batch_size=256)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=256, epochs=5).fit()

predictions = model.predict(test_x[:3])
scores = model.evaluate(test_x, test_y, return_dict=True)
scores["trivial"] = 0.5
model.save_weights("model.weights.h5")
model.export("servable", input_signature=[keras.InputSpec(shape=(None, len(SIZES)), dtype="int32")])
