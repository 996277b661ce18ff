"""Two stages of advertising: towers find ten ads for a user, and a ranking model upon them says which is clicked.

Public original: keras-rs on keras.io, examples/keras_rs/two_stage_rs_with_marketing_interaction.py (functional towers
of tables, numbers and dropout; a subclassed retrieval model under a pairwise loss of its own; it is frozen, and a dense
ranking model trains on its embeddings; Adam). Texts and numbers are the columns of a data set of clicks there.
Lines changed besides the data: -7 +7: there are two models, of two lines each; what `adapt` learns it learns without
noise; and the penalty 0.01, a decay of every row at every step, empties tables at the rates of plain SGD (one
training: 0.26 of the ten ads are liked, as by chance). The budget of the second model is that of both, since frozen
towers keep what they were trained at; its training ends when that is spent.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdp_rec  # new

# A user of a city clicks ads of topics that are liked there, the more so the longer the user stays.
USERS, ADS, TOPICS, CITIES, ROWS, TEST = 400, 60, 12, 20, 40_000, 2_000
rng = np.random.default_rng(0)
vocab_map = {
    "user_id": [f"user_{n}" for n in range(USERS)],
    "city": [f"city {n}" for n in range(CITIES)],
    "ad_id": [f"ad_{n}" for n in range(ADS)],
    "ad_topic": [f"topic {n}" for n in range(TOPICS)],
}
cont_feats = ["time_on_site", "age"]
user, ad, stay = rng.integers(USERS, size=ROWS), rng.integers(ADS, size=ROWS), rng.random(ROWS).astype("float32")
city_of, age_of = rng.integers(CITIES, size=USERS), rng.random(USERS).astype("float32")
liked = city_of[user] % 4 == ad % 4
clicked = (rng.random(ROWS) < np.where(liked, 0.3 + 0.6 * stay, 0.1)).astype("float32")


def columns(**numbers):
    """Columns [rows, 1]: text for what has a vocabulary."""
    found = {name: np.array(vocab_map[name])[of] if name in vocab_map else of for name, of in numbers.items()}
    return {name: column[:, None] for name, column in found.items()}


def ad_columns(ad):
    """The columns of ads."""
    return columns(ad_id=ad, ad_topic=ad % TOPICS)


def rows_of(data, rows):
    """Some rows of a nest of columns, as tensors."""
    return tf.nest.map_structure(lambda column: tf.constant(np.asarray(column)[rows]), data)


users = columns(user_id=user, city=city_of[user], time_on_site=stay, age=age_of[user])
pairs = {"user": users, "positive_ad": ad_columns(ad)}
triplets = pairs | {"negative_ad": ad_columns((ad + rng.integers(1, ADS, size=ROWS)) % ADS)}
x, y, test_x, test_y = rows_of(pairs, np.s_[TEST:]), clicked[TEST:], rows_of(pairs, np.s_[:TEST]), clicked[:TEST]
clicks = rows_of(triplets, TEST + np.flatnonzero(y))
always = np.ones([int(y.sum()), 1], "float32")

normalizers = {}
for feat in cont_feats:
    # was: normalizers[feat] = layers.Normalization(axis=None)
    normalizers[feat] = layers.Normalization(axis=None, mean=0.5, variance=1 / 12)
    # gone: normalizers[feat].adapt(x["user"][feat])


def build_tower(feature_names, continuous_names=(), embed_dim=16, name="tower"):
    inputs, embeddings = {}, []
    for feat in feature_names:
        inputs[feat] = keras.Input(shape=(1,), dtype="string", name=feat)
        rows = layers.StringLookup(vocabulary=vocab_map[feat])(inputs[feat])
        # was: rows = layers.Embedding(len(vocab_map[feat]) + 1, embed_dim, embeddings_regularizer="l2")(rows)
        rows = layers.Embedding(len(vocab_map[feat]) + 1, embed_dim)(rows)
        embeddings.append(layers.Flatten()(rows))
    for feat in continuous_names:
        inputs[feat] = keras.Input(shape=(1,), dtype="float32", name=feat)
        embeddings.append(normalizers[feat](inputs[feat]))
    x = layers.Dense(128, activation="relu")(layers.Concatenate()(embeddings))
    x = layers.Dense(64, activation="relu")(layers.Dropout(0.2)(x))
    return keras.Model(inputs, layers.Dense(embed_dim)(layers.Dropout(0.2)(x)), name=name)


def pairwise_logistic_loss(y_true, y_pred):
    return -tf.math.log(tf.nn.sigmoid(y_pred) + 1e-10)


# was: class RetrievalModel(keras.Model):
class RetrievalModel(tfdp_rec.PrivateModel):
    """A user is nearer to the ad that was clicked than to another."""

    def __init__(self, user_tower, ad_tower, **kwargs):
        super().__init__(**kwargs)
        self.user_tower, self.ad_tower = user_tower, ad_tower
        self.ln_user, self.ln_ad = layers.LayerNormalization(), layers.LayerNormalization()

    def call(self, inputs):
        u_emb, pos_emb, pos_score = self.get_embeddings(inputs)
        neg_emb = self.ln_ad(self.ad_tower(inputs["negative_ad"]))
        return pos_score - keras.ops.sum(u_emb * neg_emb, axis=1, keepdims=True)

    def get_embeddings(self, inputs):
        u_emb = self.ln_user(self.user_tower(inputs["user"]))
        ad_emb = self.ln_ad(self.ad_tower(inputs["positive_ad"]))
        return u_emb, ad_emb, keras.ops.sum(u_emb * ad_emb, axis=1, keepdims=True)


user_tower = build_tower(["user_id", "city"], cont_feats, name="user_tower")
retrieval_model = RetrievalModel(user_tower, build_tower(["ad_id", "ad_topic"], name="ad_tower"))
retrieval_model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-3), loss=pairwise_logistic_loss)
# was: retrieval_model.fit(clicks, always, batch_size=256, epochs=10)
tfdp_rec.make_private(retrieval_model, (clicks, always), epsilon=5.0, batch_size=256, epochs=10).fit()
retrieval_model.trainable = False


# was: class RankingModel(keras.Model):
class RankingModel(tfdp_rec.PrivateModel):
    """The chance of a click, from both embeddings and their product."""

    def __init__(self, retrieval_model, **kwargs):
        super().__init__(**kwargs)
        self.retrieval = retrieval_model
        hidden = [layers.Dense(256, "relu"), layers.Dropout(0.2), layers.Dense(128, "relu"), layers.Dropout(0.2)]
        self.mlp = keras.Sequential([*hidden, layers.Dense(64, "relu"), layers.Dense(1, "sigmoid")])

    def call(self, inputs):
        return self.mlp(keras.ops.concatenate(self.retrieval.get_embeddings(inputs), axis=-1))


model = RankingModel(retrieval_model)
model.compile(optimizer=keras.optimizers.Adam(1e-4), loss="binary_crossentropy", metrics=["AUC", "accuracy"])
# was: model.fit(x, y, batch_size=256, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=256, epochs=5).fit()

ad_embs = retrieval_model.ln_ad(retrieval_model.ad_tower(rows_of(ad_columns(np.arange(ADS)), np.s_[:])))
u_embs = retrieval_model.ln_user(user_tower(test_x["user"]))
top_ads = tf.math.top_k(tf.linalg.matmul(u_embs, ad_embs, transpose_b=True), k=10).indices.numpy()
ten_times = rows_of(test_x["user"], np.repeat(np.arange(TEST), 10))
retrieved = rows_of(ad_columns(top_ads.ravel()), np.s_[:])
predictions = model.predict({"user": ten_times, "positive_ad": retrieved}).reshape(-1, 10)
first = np.take_along_axis(top_ads, predictions.argmax(axis=1)[:, None], axis=1)[:, 0]
scores = model.evaluate(test_x, test_y, return_dict=True)
scores["right topics among 10"] = np.mean(top_ads % 4 == city_of[user[:TEST], None] % 4)
scores["right topic is first"] = np.mean(first % 4 == city_of[user[:TEST]] % 4)
model.save_weights("model.weights.h5")
specs = {
    part: {name: keras.InputSpec(column.dtype.name, [None, 1], name=name) for name, column in inputs.items()}
    for part, inputs in test_x.items()
}
model.export("servable", input_signature=[specs])
