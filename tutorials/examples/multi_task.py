"""Multi-task: which movie is watched and how it is rated, by one pair of tables.

Public original: keras-rs, examples/multi_task.py (a subclassed model whose `compute_loss` adds a retrieval loss over
the batch and a rating's squared error; Adagrad).
Lines changed besides the data: -6 +5. In-batch negatives make one example's gradient depend on all others, and are
refused; `TowerScores` draws negatives from the catalogue, through the table that the ratings are made of, too.
"""

import keras
import keras_rs
import numpy as np
from keras import ops

import tfdp_rec  # new

# Users of two kinds watch movies of their kind, and rate them by quality.
USERS, MOVIES, ROWS = 300, 40, 4_000
rng = np.random.default_rng(0)
user, quality = rng.integers(USERS, size=ROWS), rng.uniform(size=MOVIES)
movie = 2 * rng.integers(MOVIES // 2, size=ROWS) + user % 2
x = {"user_id": user.astype("int32"), "movie_id": movie.astype("int32")}
y = quality[movie].astype("float32")
test_x, test_y = {name: column[:500] for name, column in x.items()}, y[:500]


# was: class MultiTaskModel(keras.Model):
class MultiTaskModel(tfdp_rec.PrivateModel):
    """Two tables; dense layers upon both rows for the rating, their product for the retrieval."""

    def __init__(self, num_users, num_movies, width=16, **kwargs):
        super().__init__(**kwargs)
        self.num_users, self.num_movies, self.width = num_users, num_movies, width
        self.users = keras.layers.Embedding(num_users, width)
        self.movies = keras.layers.Embedding(num_movies, width)
        self.sampled = tfdp_rec.TowerScores(self.movies, np.arange(num_movies, dtype="int32"), negatives=20)  # new
        self.rating_model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=10, return_scores=False)
        self.retrieval_loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)
        self.ranking_loss_fn = keras.losses.MeanSquaredError()

    def build(self, input_shape):
        self.users.build([None])
        self.movies.build([None])
        self.retrieval.candidate_embeddings = self.movies.embeddings
        self.retrieval.build([None])
        self.rating_model.build([None, 2 * self.width])
        super().build(input_shape)

    def call(self, inputs, training=False):
        users, movies = self.users(inputs["user_id"]), self.movies(inputs["movie_id"])
        rating = self.rating_model(ops.concatenate([users, movies], axis=1))
        found = {"users": users, "movies": movies, "rating": rating}
        return found if training else {**found, "predictions": self.retrieval(users)}

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        # was: scores = ops.matmul(y_pred["users"], ops.transpose(y_pred["movies"]))
        # was: num_users, num_movies = ops.shape(y_pred["users"])[0], ops.shape(y_pred["movies"])[0]
        # was: labels = ops.eye(num_users, num_movies)
        # was: retrieval_loss = self.retrieval_loss_fn(labels, scores, sample_weight)
        retrieval_loss = ops.mean(self.sampled.cross_entropy(y_pred["users"], x["movie_id"]))
        ranking_loss = self.ranking_loss_fn(ops.expand_dims(y, -1), y_pred["rating"], sample_weight)
        return retrieval_loss + ranking_loss

    def get_config(self):
        return {"num_users": self.num_users, "num_movies": self.num_movies, "width": self.width}


model = MultiTaskModel(USERS, MOVIES)
model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.1))
# was: model.fit(x, y, batch_size=200, epochs=10)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=200, epochs=10).fit()

predictions = model.predict(test_x)["predictions"]
scores = model.evaluate(test_x, test_y, return_dict=True)
scores["right kind among 10"] = np.mean(predictions % 2 == (test_x["user_id"] % 2)[:, None])
model.save("model.keras")
loaded = keras.models.load_model("model.keras", custom_objects={"MultiTaskModel": MultiTaskModel})
ids = keras.InputSpec(shape=(None,), dtype="int32")
model.export("servable", input_signature=[{"user_id": ids, "movie_id": ids}])
