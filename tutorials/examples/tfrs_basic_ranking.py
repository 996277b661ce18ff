"""Basic ranking with TensorFlow Recommenders: a rating from two tables by names, its loss a TFRS task.

Public original: TensorFlow Recommenders, docs/examples/basic_ranking.ipynb (`tfrs.Model`, `tfrs.tasks.Ranking`,
Adagrad).
Lines changed besides the data: -2 +3.
"""

import keras
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

import tfdp_rec  # new

# Ratings from 1 to 5, of users and movies known by name.
USERS, MOVIES, ROWS = 200, 50, 4_000
rng = np.random.default_rng(0)
user_ids, titles = [f"{n}" for n in range(USERS)], [f"Movie {n}" for n in range(MOVIES)]
user, movie = rng.integers(USERS, size=ROWS), rng.integers(MOVIES, size=ROWS)
rating = 3 + np.tanh(rng.normal(size=USERS)[user]) + np.tanh(rng.normal(size=MOVIES)[movie])
ratings = {
    "user_id": np.array(user_ids)[user],
    "movie_title": np.array(titles)[movie],
    "user_rating": rating.astype("float32")[:, None],
}
train = tf.data.Dataset.from_tensor_slices(ratings).batch(200)
test = train.take(3)


class RankingModel(keras.Model):
    """Rows by name, side by side, and dense layers upon them."""

    def __init__(self, width=16):
        super().__init__()
        self.users = keras.Sequential(
            [keras.layers.StringLookup(vocabulary=user_ids), keras.layers.Embedding(USERS + 1, width)]
        )
        self.movies = keras.Sequential(
            [keras.layers.StringLookup(vocabulary=titles), keras.layers.Embedding(MOVIES + 1, width)]
        )
        self.ratings = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])

    def call(self, inputs):
        user_id, movie_title = inputs
        return self.ratings(keras.ops.concatenate([self.users(user_id), self.movies(movie_title)], axis=1))


# was: class MovielensModel(tfrs.models.Model):
class MovielensModel(tfdp_rec.PrivateTraining, tfrs.models.Model):
    """The ranking model and its task."""

    def __init__(self):
        super().__init__()
        self.ranking_model = RankingModel()
        self.task = tfrs.tasks.Ranking(
            loss=keras.losses.MeanSquaredError(), metrics=[keras.metrics.RootMeanSquaredError()]
        )

    def call(self, features):
        return self.ranking_model((features["user_id"], features["movie_title"]))

    def compute_loss(self, features, training=False):
        return self.task(labels=features["user_rating"], predictions=self(features))


model = MovielensModel()
model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.1))
# was: model.fit(train, epochs=5)
tfdp_rec.make_private(model, ratings, epsilon=8.0, batch_size=200, epochs=5).fit()

predictions = model.predict({name: tf.constant(ratings[name][:3]) for name in ("user_id", "movie_title")})
scores = model.evaluate(test, return_dict=True)
model.save_weights("model.weights.h5")
by_name = {name: keras.InputSpec(shape=(None,), dtype="string", name=name) for name in ("user_id", "movie_title")}
model.export("servable", input_signature=[by_name])
