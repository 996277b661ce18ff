"""Basic retrieval: two towers that are two tables, and the ten movies with the highest scores.

Public original: keras-rs, examples/basic_retrieval.py (a subclassed model with a `compute_loss` of its own, Adagrad).
Lines changed besides the data: -2 +3.
"""

import keras
import keras_rs
import numpy as np

import tfdp_rec  # new

# Ratings between 0 and 1; the labels are a movie and its rating.
USERS, MOVIES, ROWS = 300, 60, 4_000
rng = np.random.default_rng(0)
taste, kind = rng.choice([-1.0, 1.0], USERS), rng.choice([-1.0, 1.0], MOVIES)
x, movie = rng.integers(USERS, size=ROWS).astype("int32"), rng.integers(MOVIES, size=ROWS).astype("int32")
y = {"movie_id": movie, "rating": (0.5 + 0.4 * taste[x] * kind[movie]).astype("float32")}
test_x, test_y = x[:500], {name: column[:500] for name, column in y.items()}


# was: class RetrievalModel(keras.Model):
class RetrievalModel(tfdp_rec.PrivateModel):
    """The product of a user's row and a movie's row is the rating; the best movies by it are the prediction."""

    def __init__(self, num_users, num_movies, width=16, **kwargs):
        super().__init__(**kwargs)
        self.num_users, self.num_movies, self.width = num_users, num_movies, width
        self.users = keras.layers.Embedding(num_users, width)
        self.movies = keras.layers.Embedding(num_movies, width)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=10, return_scores=False)
        self.loss_fn = keras.losses.MeanSquaredError()

    def build(self, input_shape):
        self.users.build(input_shape)
        self.movies.build(input_shape)
        self.retrieval.candidate_embeddings = self.movies.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs, training=False):
        rows = self.users(inputs)
        return {"rows": rows} if training else {"rows": rows, "predictions": self.retrieval(rows)}

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        scores = keras.ops.sum(y_pred["rows"] * self.movies(y["movie_id"]), axis=1, keepdims=True)
        return self.loss_fn(keras.ops.expand_dims(y["rating"], -1), scores, sample_weight)

    def get_config(self):
        return {"num_users": self.num_users, "num_movies": self.num_movies, "width": self.width}


model = RetrievalModel(USERS, MOVIES)
model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.1))
# was: model.fit(x, y, batch_size=200, epochs=10)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=200, epochs=10).fit()

predictions = model.predict(np.array([42]))["predictions"]
scores = model.evaluate(test_x, test_y, return_dict=True)
model.save("model.keras")
loaded = keras.models.load_model("model.keras", custom_objects={"RetrievalModel": RetrievalModel})
model.export("servable", input_signature=[keras.InputSpec(shape=(None,), dtype="int32")])
