"""NCF (NeuMF): a product of rows and a perceptron upon other rows, together, tell what was watched from what was not.

Public original: RecLearn, reclearn/models/matching/ncf.py with layers/core.py, models/losses.py and
example/m_ncf_demo.py (a subclassed model with four tables that adds its loss by `add_loss`; Adam). Mended for Keras 3:
`input_length` is gone, and the table of items for the perceptron has as many rows as there are items, not users.
Lines changed besides the data: -3 +6: a loss given to `add_loss` is in no example's loss; as the
model's own `compute_loss` it is.
"""

import keras
import numpy as np
import tensorflow as tf
from keras.layers import BatchNormalization, Dense, Dropout, Embedding, Layer
from keras.regularizers import L2

import tfdp_rec  # new

# Users of four kinds watch items of their kind; of each 4 random others is said that they were not watched.
USERS, ITEMS, ROWS, TESTS, NEG = 400, 80, 24_000, 2_000, 4
rng = np.random.default_rng(0)
user = rng.integers(USERS, size=ROWS)
pos_item = 4 * (ITEMS // 4 * rng.random(ROWS) ** 1.5).astype("int64") + user % 4
x = {"user": user, "pos_item": pos_item, "neg_item": rng.integers(ITEMS, size=[ROWS, NEG])}
x = {name: column.astype("int32") for name, column in x.items()}
test, train = ({name: column[part] for name, column in x.items()} for part in (slice(TESTS), slice(TESTS, None)))
fea_cols = {"user_num": USERS, "item_num": ITEMS, "embed_dim": 16}


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


# was: class NCF(keras.Model):
class NCF(tfdp_rec.PrivateModel):
    """Rows of users and items for the product, and others for the perceptron."""

    def __init__(self, fea_cols, hidden_units=(64, 32, 16, 8), dnn_dropout=0.0, embed_reg=1e-6):
        super().__init__()
        users, items, width = fea_cols["user_num"], fea_cols["item_num"], fea_cols["embed_dim"]
        self.mf_user_embedding = Embedding(users, width, "random_normal", L2(embed_reg))
        self.mf_item_embedding = Embedding(items, width, "random_normal", L2(embed_reg))
        self.mlp_user_embedding = Embedding(users, width, "random_normal", L2(embed_reg))
        self.mlp_item_embedding = Embedding(items, width, "random_normal", L2(embed_reg))
        self.mlp = MLP(hidden_units, dnn_dropout=dnn_dropout)
        self.dense = Dense(1)

    def call(self, inputs):
        mf_user, mlp_user = self.mf_user_embedding(inputs["user"]), self.mlp_user_embedding(inputs["user"])
        mf_pos, mlp_pos = self.mf_item_embedding(inputs["pos_item"]), self.mlp_item_embedding(inputs["pos_item"])
        mf_neg, mlp_neg = self.mf_item_embedding(inputs["neg_item"]), self.mlp_item_embedding(inputs["neg_item"])
        mf_pos = tf.nn.sigmoid(mf_user * mf_pos)
        mf_neg = tf.nn.sigmoid(mf_user[:, None] * mf_neg)
        mlp_pos = self.mlp(tf.concat([mlp_user, mlp_pos], axis=-1))
        mlp_neg = self.mlp(tf.concat([tf.tile(mlp_user[:, None], [1, mlp_neg.shape[1], 1]), mlp_neg], axis=-1))
        pos_scores = tf.tile(self.dense(tf.concat([mf_pos, mlp_pos], axis=-1)), [1, mlp_neg.shape[1]])
        neg_scores = tf.squeeze(self.dense(tf.concat([mf_neg, mlp_neg], axis=-1)), axis=-1)
        # gone: self.add_loss(tf.reduce_mean(-tf.math.log(tf.nn.sigmoid(pos_scores - neg_scores))))
        return tf.concat([pos_scores, neg_scores], axis=-1)

    def compute_loss(self, x, y, y_pred, sample_weight):  # new
        pos_scores, neg_scores = tf.split(y_pred, 2, axis=-1)  # new
        return tf.reduce_mean(-tf.math.log(tf.nn.sigmoid(pos_scores - neg_scores)))  # new


model = NCF(fea_cols, hidden_units=[64, 32, 16], dnn_dropout=0.5)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001))
# was: model.fit(train, epochs=5, batch_size=256)
tfdp_rec.make_private(model, train, epsilon=8.0, batch_size=256, epochs=5).fit()

predictions = model.predict(test)
scores = model.evaluate(test, return_dict=True)
scores["positive above negative"] = np.mean(predictions[:, :NEG] > predictions[:, NEG:])
popular = np.bincount(train["pos_item"], minlength=ITEMS)
scores["trivial"] = np.mean(popular[test["pos_item"]][:, None] > popular[test["neg_item"]])
model.save_weights("model.weights.h5")
ids = {name: keras.InputSpec(shape=(None, *column.shape[1:]), dtype="int32", name=name) for name, column in x.items()}
model.export("servable", input_signature=[ids])
