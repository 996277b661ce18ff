"""List-wise ranking with TensorFlow Recommenders: five movies of one user in the right order.

Public original: TensorFlow Recommenders, docs/examples/listwise_ranking.ipynb (`tfrs.Model`, `tfrs.tasks.Ranking` with
a list's loss, nDCG, Adagrad). An example is one user's list, and a list is what is protected.
Lines changed besides the data: -2 +3. Mended for Keras 3: TensorFlow Ranking does not import, so that ListMLE and nDCG
are those of keras-rs; `StringLookup` and `Embedding` take a user as one row, which is repeated along the list; and
`evaluate` refuses a loss that pops the labels out of its features.
"""

import keras
import keras_rs
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

import tfdp_rec  # new

# Lists of five movies, and what their user gave them, from 1 to 5: by quality, and by whether the kind is liked.
USERS, MOVIES, LISTS, TEST, LENGTH = 300, 60, 6_000, 1_000, 5
rng = np.random.default_rng(0)
unique_user_ids, unique_movie_titles = [f"{n}" for n in range(USERS)], [f"Movie {n}" for n in range(MOVIES)]
quality, kind, taste = rng.normal(size=MOVIES), rng.choice([-1.0, 1.0], MOVIES), rng.choice([-1.0, 1.0], USERS)
user = rng.integers(USERS, size=LISTS + TEST)
movies = np.stack([rng.choice(MOVIES, LENGTH, replace=False) for _ in user])
lists = {
    "user_id": np.array(unique_user_ids)[user],
    "movie_title": np.array(unique_movie_titles)[movies],
    "user_rating": np.round(3 + 2 * np.tanh(quality[movies] + taste[user][:, None] * kind[movies])).astype("float32"),
}
held_out, lists = ({name: column[rows] for name, column in lists.items()} for rows in (np.s_[LISTS:], np.s_[:LISTS]))
train, test = (tf.data.Dataset.from_tensor_slices(each).batch(300) for each in (lists, held_out))


# was: class RankingModel(tfrs.Model):
class RankingModel(tfdp_rec.PrivateTraining, tfrs.Model):
    """Scores of a list of movies, each beside its user."""

    def __init__(self, loss, embedding_dimension=32):
        super().__init__()
        self.user_embeddings = keras.Sequential(
            [
                keras.layers.StringLookup(vocabulary=unique_user_ids),
                keras.layers.Embedding(len(unique_user_ids) + 2, embedding_dimension),
            ]
        )
        self.movie_embeddings = keras.Sequential(
            [
                keras.layers.StringLookup(vocabulary=unique_movie_titles),
                keras.layers.Embedding(len(unique_movie_titles) + 2, embedding_dimension),
            ]
        )
        self.score_model = keras.Sequential(
            [
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        metrics = [keras_rs.metrics.NDCG(name="ndcg_metric"), keras.metrics.RootMeanSquaredError()]
        self.task = tfrs.tasks.Ranking(loss=loss, metrics=metrics)

    def call(self, features):
        user = self.user_embeddings(features["user_id"])
        movies = self.movie_embeddings(features["movie_title"])
        user = tf.repeat(tf.expand_dims(user, axis=1), movies.shape[1], axis=1)
        return self.score_model(tf.concat([user, movies], axis=2))

    def compute_loss(self, features, training=False):
        return self.task(labels=features["user_rating"], predictions=tf.squeeze(self(features), axis=-1))


model = RankingModel(keras_rs.losses.ListMLELoss())
model.compile(optimizer=keras.optimizers.Adagrad(0.1))
# was: model.fit(train, epochs=8)
tfdp_rec.make_private(model, lists, epsilon=8.0, batch_size=300, epochs=8).fit()

predictions = model.predict({name: tf.constant(held_out[name][:3]) for name in ("user_id", "movie_title")})
scores = model.evaluate(test, return_dict=True)
mean = {title: lists["user_rating"][lists["movie_title"] == title].mean() for title in unique_movie_titles}
trivial = np.vectorize(mean.get)(held_out["movie_title"]).astype("float32")  # every user's order is that of all
scores["trivial nDCG"] = float(keras_rs.metrics.NDCG()(held_out["user_rating"], trivial))
model.save_weights("model.weights.h5")
names = {"user_id": [None], "movie_title": [None, LENGTH]}
model.export("servable", input_signature=[{n: keras.InputSpec("string", shape, name=n) for n, shape in names.items()}])
