"""NRMS: words attend to each other in a title, titles in a history, and a user's sum of them is near a title's.

Public original: recommenders-team, recommenders/models/newsrec/models/nrms.py with layers.py and base_model.py (a
functional model of `SelfAttention` and `AttLayer2`, whose weights are their own, over pretrained words; categorical
cross-entropy over one clicked title and four others, Adam). Mended for Keras 3: functions of the backend are
`keras.ops`.
Lines changed besides the data: -4 +8: dropout within `TimeDistributed` is refused; the encoder is called on all titles
in one axis.
"""

import keras
import numpy as np
from keras import layers, ops

import tfdp_rec  # new

# Titles of six words of one of eight topics; a user reads titles of one, and of five shown clicks the one of it.
TOPICS, WORDS, ROWS, TESTS, TITLE, HISTORY, NPRATIO = 8, 160, 12_000, 2_000, 6, 5, 4
rng = np.random.default_rng(0)
word2vec_embedding = rng.normal(size=[TOPICS, 16])[np.arange(WORDS) % TOPICS] + rng.normal(size=[WORDS, 16])


def titles(topic):
    """A title each of these topics, half of it of words of any topic."""
    topic = np.where(rng.random([*topic.shape, TITLE]) < 0.5, topic[..., None], rng.integers(TOPICS, size=TITLE))
    return (topic + TOPICS * rng.integers(WORDS // TOPICS, size=topic.shape)).astype("int32")


topic, place = rng.integers(TOPICS, size=ROWS), rng.integers(NPRATIO + 1, size=ROWS)
others = (topic[:, None] + rng.integers(1, TOPICS, [ROWS, NPRATIO + 1])) % TOPICS
labels = np.eye(NPRATIO + 1, dtype="float32")[place]
clicked = titles(np.repeat(topic[:, None], HISTORY, axis=1))
x, y = (clicked, titles(np.where(labels == 1, topic[:, None], others))), labels
test_x, test_y = tuple(column[:TESTS] for column in x), y[:TESTS]
x, y = tuple(column[TESTS:] for column in x), y[TESTS:]


class AttLayer2(layers.Layer):
    """A weighted sum of a sequence."""

    def __init__(self, dim=200, **kwargs):
        super().__init__(**kwargs)
        self.dim = dim

    def build(self, input_shape):
        self.W = self.add_weight((input_shape[-1], self.dim), "glorot_uniform", name="W")
        self.b = self.add_weight((self.dim,), "zeros", name="b")
        self.q = self.add_weight((self.dim, 1), "glorot_uniform", name="q")

    def call(self, inputs):
        attention = ops.tanh(ops.matmul(inputs, self.W) + self.b)
        attention = ops.exp(ops.squeeze(ops.matmul(attention, self.q), axis=2))
        weight = attention / (ops.sum(attention, axis=-1, keepdims=True) + keras.backend.epsilon())
        return ops.sum(inputs * ops.expand_dims(weight, -1), axis=1)


class SelfAttention(layers.Layer):
    """Attention of several heads of a sequence to itself."""

    def __init__(self, multiheads, head_dim, **kwargs):
        super().__init__(**kwargs)
        self.multiheads, self.head_dim = multiheads, head_dim

    def build(self, input_shape):
        shape = (input_shape[-1], self.multiheads * self.head_dim)
        self.WQ = self.add_weight(shape, "glorot_uniform", name="WQ")
        self.WK = self.add_weight(shape, "glorot_uniform", name="WK")
        self.WV = self.add_weight(shape, "glorot_uniform", name="WV")

    def call(self, inputs):
        length, heads = inputs.shape[1], [self.multiheads, self.head_dim]

        def split(weight):
            return ops.transpose(ops.reshape(ops.matmul(inputs, weight), [-1, length, *heads]), [0, 2, 1, 3])

        scores = ops.matmul(split(self.WQ), ops.transpose(split(self.WK), [0, 1, 3, 2])) / self.head_dim**0.5
        output = ops.transpose(ops.matmul(ops.softmax(scores), split(self.WV)), [0, 2, 1, 3])
        return ops.reshape(output, [-1, length, self.multiheads * self.head_dim])


def build_newsencoder(embedding_layer, heads=4, head_dim=8, hidden=32, dropout=0.2):
    sequences_input_title = keras.Input([TITLE], dtype="int32")
    y = layers.Dropout(dropout)(embedding_layer(sequences_input_title))
    y = layers.Dropout(dropout)(SelfAttention(heads, head_dim)(y))
    return keras.Model(sequences_input_title, AttLayer2(hidden)(y), name="news_encoder")


def each_title(titleencoder, titles):  # new
    present = titleencoder(ops.reshape(titles, [-1, TITLE]))  # new
    return ops.reshape(present, [-1, titles.shape[1], present.shape[-1]])  # new


def build_userencoder(titleencoder, heads=4, head_dim=8, hidden=32):
    his_input_title = keras.Input([HISTORY, TITLE], dtype="int32")
    # was: click_title_presents = layers.TimeDistributed(titleencoder)(his_input_title)
    click_title_presents = each_title(titleencoder, his_input_title)
    y = SelfAttention(heads, head_dim)(click_title_presents)
    return keras.Model(his_input_title, AttLayer2(hidden)(y), name="user_encoder")


def build_nrms():
    his_input_title = keras.Input([HISTORY, TITLE], dtype="int32")
    pred_input_title = keras.Input([NPRATIO + 1, TITLE], dtype="int32")
    embedding_layer = layers.Embedding(*word2vec_embedding.shape, weights=[word2vec_embedding], trainable=True)
    titleencoder = build_newsencoder(embedding_layer)
    user_present = build_userencoder(titleencoder)(his_input_title)
    # was: news_present = layers.TimeDistributed(titleencoder)(pred_input_title)
    news_present = each_title(titleencoder, pred_input_title)
    preds = layers.Activation("softmax")(layers.Dot(axes=-1)([news_present, user_present]))
    # was: return keras.Model((his_input_title, pred_input_title), preds)
    return tfdp_rec.PrivateModel((his_input_title, pred_input_title), preds)


model = build_nrms()
model.compile(loss=keras.losses.CategoricalCrossentropy(), optimizer=keras.optimizers.Adam(0.001))
# was: model.fit(x, y, epochs=5, batch_size=256)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=256, epochs=5).fit()

predictions = model.predict(test_x)
scores = {"clicked is first of 5": np.mean(predictions.argmax(1) == test_y.argmax(1)), "trivial": 1 / (NPRATIO + 1)}
model.save_weights("model.weights.h5")
model.export("servable")
