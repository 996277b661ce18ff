"""Basic retrieval with TensorFlow Recommenders: a tower of users and one of movies, both by name.

Public original: TensorFlow Recommenders, docs/examples/basic_retrieval.ipynb (`tfrs.Model`, `tfrs.tasks.Retrieval`,
Adagrad).
Lines changed besides the data: -4 +5. `tfrs.tasks.Retrieval` scores against the batch, and is refused; its metric
over a dataset does not run on Keras 3. `TowerScores` has the same towers.
"""

import keras
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

import tfdp_rec  # new

# Users of two kinds watch movies of their kind.
USERS, MOVIES, ROWS = 200, 40, 4_000
rng = np.random.default_rng(0)
user_ids, titles = [f"{n}" for n in range(USERS)], [f"Movie {n}" for n in range(MOVIES)]
user = rng.integers(USERS, size=ROWS)
movie = 2 * rng.integers(MOVIES // 2, size=ROWS) + user % 2
ratings = {"user_id": np.array(user_ids)[user], "movie_title": np.array(titles)[movie]}
train = tf.data.Dataset.from_tensor_slices(ratings).batch(200)
test = train.take(3)

user_model = keras.Sequential(
    [keras.layers.StringLookup(vocabulary=user_ids), keras.layers.Embedding(USERS + 1, 16)]
)
movie_model = keras.Sequential(
    [keras.layers.StringLookup(vocabulary=titles), keras.layers.Embedding(MOVIES + 1, 16)]
)


# was: class MovielensModel(tfrs.Model):
class MovielensModel(tfdp_rec.PrivateTraining, tfrs.Model):
    """Towers and what is asked of them."""

    def __init__(self):
        super().__init__()
        self.user_model, self.movie_model = user_model, movie_model
        # was: self.task = tfrs.tasks.Retrieval(loss=keras.losses.CategoricalCrossentropy(True, reduction="sum"))
        self.task = tfdp_rec.TowerScores(movie_model, np.array(titles), negatives=20)

    def call(self, user_id):
        scores = tf.matmul(self.user_model(user_id), self.movie_model(tf.constant(titles)), transpose_b=True)
        return tf.gather(tf.constant(titles), tf.math.top_k(scores, 10).indices)

    def compute_loss(self, features, training=False):
        users = self.user_model(features["user_id"])
        # was: return self.task(users, self.movie_model(features["movie_title"]), compute_metrics=not training)
        return tf.reduce_mean(self.task.cross_entropy(users, features["movie_title"]))


model = MovielensModel()
model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.1))
# was: model.fit(train, epochs=5)
tfdp_rec.make_private(model, ratings, epsilon=8.0, batch_size=200, epochs=5).fit()

predictions = model.predict(tf.constant(ratings["user_id"][:500]))
scores = model.evaluate(test, return_dict=True)
numbers = np.vectorize(lambda title: int(title.split()[1]))(predictions.astype(str))
scores["right kind among 10"] = np.mean(numbers % 2 == (user[:500] % 2)[:, None])
model.save_weights("model.weights.h5")
model.export("servable", input_signature=[keras.InputSpec(shape=(None,), dtype="string")])
