"""Multi-task with TensorFlow Recommenders: which movie is watched and how it is rated, by one pair of tables.

Public original: TensorFlow Recommenders, docs/examples/multitask.ipynb (`tfrs.Model`, a rating by `tfrs.tasks.Ranking`
and a watch by `tfrs.tasks.Retrieval`, each with a weight; Adagrad).
Lines changed besides the data: -4 +5. `tfrs.tasks.Retrieval` scores against the batch, and is refused; `TowerScores`
draws negatives from the catalogue, through the same tower. Mended for Keras 3: the metric `FactorizedTopK` does not run
(the top ten are counted below), the retrieval's loss is named, and `evaluate` refuses a loss that pops its labels.
"""

import keras
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

import tfdp_rec  # new

# Users of four kinds watch movies of their kind, and rate them from 1 to 5 by quality.
USERS, MOVIES, ROWS, TEST = 300, 60, 8_000, 1_000
rng = np.random.default_rng(0)
user, quality = rng.integers(USERS, size=ROWS + TEST), rng.normal(size=MOVIES)
movie = 4 * rng.integers(MOVIES // 4, size=ROWS + TEST) + user % 4
unique_user_ids, unique_movie_titles = [f"{n}" for n in range(USERS)], [f"Movie {n}" for n in range(MOVIES)]
ratings = {
    "user_id": np.array(unique_user_ids)[user],
    "movie_title": np.array(unique_movie_titles)[movie],
    "user_rating": (3 + 2 * np.tanh(quality[movie])).astype("float32"),
}
held_out, ratings = ({name: column[rows] for name, column in ratings.items()} for rows in (np.s_[ROWS:], np.s_[:ROWS]))
train, test = (tf.data.Dataset.from_tensor_slices(each).batch(400) for each in (ratings, held_out))


# was: class MovielensModel(tfrs.models.Model):
class MovielensModel(tfdp_rec.PrivateTraining, tfrs.models.Model):
    """Two towers; dense layers upon both for the rating, their product for the retrieval."""

    def __init__(self, rating_weight, retrieval_weight, embedding_dimension=32):
        super().__init__()
        self.movie_model = keras.Sequential(
            [
                keras.layers.StringLookup(vocabulary=unique_movie_titles, mask_token=None),
                keras.layers.Embedding(len(unique_movie_titles) + 1, embedding_dimension),
            ]
        )
        self.user_model = keras.Sequential(
            [
                keras.layers.StringLookup(vocabulary=unique_user_ids, mask_token=None),
                keras.layers.Embedding(len(unique_user_ids) + 1, embedding_dimension),
            ]
        )
        self.rating_model = keras.Sequential(
            [
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        self.rating_task = tfrs.tasks.Ranking(
            loss=keras.losses.MeanSquaredError(), metrics=[keras.metrics.RootMeanSquaredError()]
        )
        # was: self.retrieval_task = tfrs.tasks.Retrieval(keras.losses.CategoricalCrossentropy(True, reduction="sum"))
        self.retrieval_task = tfdp_rec.TowerScores(self.movie_model, np.array(unique_movie_titles), negatives=20)
        self.rating_weight, self.retrieval_weight = rating_weight, retrieval_weight

    def call(self, features):
        users, movies = self.user_model(features["user_id"]), self.movie_model(features["movie_title"])
        return users, movies, self.rating_model(tf.concat([users, movies], axis=1))

    def compute_loss(self, features, training=False):
        users, movies, rating_predictions = self(features)
        rating_loss = self.rating_task(labels=features["user_rating"], predictions=rating_predictions)
        # was: retrieval_loss = self.retrieval_task(users, movies)
        retrieval_loss = tf.reduce_mean(self.retrieval_task.cross_entropy(users, features["movie_title"]))
        return self.rating_weight * rating_loss + self.retrieval_weight * retrieval_loss


model = MovielensModel(rating_weight=1.0, retrieval_weight=1.0)
model.compile(optimizer=keras.optimizers.Adagrad(0.1))
# was: model.fit(train, epochs=8)
tfdp_rec.make_private(model, ratings, epsilon=8.0, batch_size=400, epochs=8).fit()

features = {name: tf.constant(held_out[name]) for name in ("user_id", "movie_title")}
predictions = model.predict(features)
scores = model.evaluate(test, return_dict=True)
products = predictions[0] @ model.movie_model(tf.constant(unique_movie_titles)).numpy().T
top = np.argsort(-products, axis=1)[:, :10]
scores["recall@10"] = np.mean((top == movie[ROWS:, None]).any(axis=1))
popular = np.argsort(-np.bincount(movie[:ROWS]))[:10]
scores["trivial recall@10"] = np.mean(np.isin(movie[ROWS:], popular))
scores["trivial RMSE"] = np.sqrt(np.mean((held_out["user_rating"] - ratings["user_rating"].mean()) ** 2))
model.save_weights("model.weights.h5")
model.export("servable", input_signature=[{name: keras.InputSpec("string", [None], name=name) for name in features}])
