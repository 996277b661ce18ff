"""Deep and cross network with TensorFlow Recommenders: six features of a rating, crossed, and dense layers upon them.

Public original: TensorFlow Recommenders, docs/examples/dcn.ipynb (`tfrs.Model`, `tfrs.layers.dcn.Cross`,
`tfrs.tasks.Ranking`, Adam; the stacked model, with two layers of 64 for its 192).
Lines changed besides the data: -2 +3. Mended for Keras 3: `IntegerLookup` no longer has the argument `mask_value`, and
`evaluate` refuses a loss that pops the labels out of its features.
"""

import keras
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

import tfdp_rec  # new

# Ratings from 1 to 5: how good a movie is, and which occupation likes which kind of movie.
USERS, MOVIES, ZIP_CODES, OCCUPATIONS, AGES, ROWS, TEST = 500, 100, 40, 8, 7, 20_000, 2_000
rng = np.random.default_rng(0)
user, movie = rng.integers(USERS, size=ROWS + TEST), rng.integers(MOVIES, size=ROWS + TEST)
occupation, kind = rng.integers(OCCUPATIONS, size=USERS), rng.integers(4, size=MOVIES)
liking, quality = rng.normal(size=[OCCUPATIONS, 4]), rng.normal(size=MOVIES)
rating = 3 + 2 * np.tanh(0.7 * quality[movie] + liking[occupation[user], kind[movie]])
ratings = {
    "movie_id": movie.astype(str),
    "user_id": user.astype(str),
    "user_zip_code": rng.integers(ZIP_CODES, size=USERS)[user].astype(str),
    "user_occupation_text": np.char.add("occupation ", occupation[user].astype(str)),
    "user_gender": rng.integers(2, size=USERS)[user],
    "bucketized_user_age": rng.integers(AGES, size=USERS)[user],
    "user_rating": rating.astype("float32"),
}
vocabularies = {name: np.unique(column) for name, column in ratings.items() if name != "user_rating"}
held_out = {name: column[ROWS:] for name, column in ratings.items()}
ratings = {name: column[:ROWS] for name, column in ratings.items()}
train, test = (tf.data.Dataset.from_tensor_slices(each).batch(500) for each in (ratings, held_out))


# was: class DCN(tfrs.Model):
class DCN(tfdp_rec.PrivateTraining, tfrs.Model):
    """A row a feature, their cross, and layers upon it."""

    def __init__(self, deep_layer_sizes, embedding_dimension=32, projection_dim=None):
        super().__init__()
        str_features = ["movie_id", "user_id", "user_zip_code", "user_occupation_text"]
        int_features = ["user_gender", "bucketized_user_age"]
        self._all_features = str_features + int_features
        self._embeddings = {}
        for name in self._all_features:
            lookup = keras.layers.StringLookup if name in str_features else keras.layers.IntegerLookup
            self._embeddings[name] = keras.Sequential(
                [
                    lookup(vocabulary=vocabularies[name], mask_token=None),
                    keras.layers.Embedding(len(vocabularies[name]) + 1, embedding_dimension),
                ]
            )
        self._cross_layer = tfrs.layers.dcn.Cross(projection_dim, kernel_initializer="glorot_uniform")
        self._deep_layers = [keras.layers.Dense(size, activation="relu") for size in deep_layer_sizes]
        self._logit_layer = keras.layers.Dense(1)
        self.task = tfrs.tasks.Ranking(
            loss=keras.losses.MeanSquaredError(), metrics=[keras.metrics.RootMeanSquaredError("RMSE")]
        )

    def call(self, features):
        x = tf.concat([self._embeddings[name](features[name]) for name in self._all_features], axis=1)
        x = self._cross_layer(x)
        for deep_layer in self._deep_layers:
            x = deep_layer(x)
        return self._logit_layer(x)

    def compute_loss(self, features, training=False):
        return self.task(labels=features["user_rating"], predictions=self(features))


model = DCN(deep_layer_sizes=[64, 64])
model.compile(optimizer=keras.optimizers.Adam(0.01))
# was: model.fit(train, epochs=5)
tfdp_rec.make_private(model, ratings, epsilon=8.0, batch_size=500, epochs=5).fit()

predictions = model.predict({name: tf.constant(held_out[name][:3]) for name in vocabularies})
scores = model.evaluate(test, return_dict=True)
scores["trivial RMSE"] = np.sqrt(np.mean((held_out["user_rating"] - ratings["user_rating"].mean()) ** 2))
model.save_weights("model.weights.h5")
kinds = {name: "int64" if ratings[name].dtype.kind == "i" else "string" for name in vocabularies}
specs = {name: keras.InputSpec(kind, [None], name=name) for name, kind in kinds.items()}
model.export("servable", input_signature=[specs])
