"""List-wise ranking: five movies of one user in the right order.

Public original: keras-rs, examples/listwise_ranking.py (a subclassed model, a pairwise hinge loss, nDCG). An example
is one user's list, and a list is what is protected.
Lines changed besides the data: -2 +3.
"""

import keras
import keras_rs
import numpy as np

import tfdp_rec  # new

# Lists of five movies, and what their user gave them.
USERS, MOVIES, LISTS, LENGTH = 200, 50, 3_000, 5
rng = np.random.default_rng(0)
quality = rng.normal(size=MOVIES)
movies = np.stack([rng.choice(MOVIES, LENGTH, replace=False) for _ in range(LISTS)]).astype("int32")
x = {"user_id": rng.integers(USERS, size=LISTS).astype("int32"), "movie_id": movies}
y = np.round(2 * np.tanh(quality[movies]) + 2).astype("float32")
test_x, test_y = {name: column[:500] for name, column in x.items()}, y[:500]


# was: class RankingModel(keras.Model):
class RankingModel(tfdp_rec.PrivateModel):
    """Scores of a list of movies, each beside its user."""

    def __init__(self, num_users, num_movies, width=16, **kwargs):
        super().__init__(**kwargs)
        self.num_users, self.num_movies, self.width = num_users, num_movies, width
        self.users = keras.layers.Embedding(num_users, width)
        self.movies = keras.layers.Embedding(num_movies, width)
        self.ratings = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])

    def call(self, inputs):
        user, movies = self.users(inputs["user_id"]), self.movies(inputs["movie_id"])
        user = keras.ops.repeat(keras.ops.expand_dims(user, axis=1), keras.ops.shape(movies)[1], axis=1)
        return keras.ops.squeeze(self.ratings(keras.ops.concatenate([user, movies], axis=-1)), axis=-1)

    def get_config(self):
        return {"num_users": self.num_users, "num_movies": self.num_movies, "width": self.width}


model = RankingModel(USERS, MOVIES)
model.compile(
    loss=keras_rs.losses.PairwiseHingeLoss(),
    metrics=[keras_rs.metrics.NDCG(k=LENGTH, name="ndcg")],
    optimizer=keras.optimizers.Adagrad(learning_rate=0.1),
)
# was: model.fit(x, y, batch_size=200, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=200, epochs=5).fit()

predictions = model.predict({"user_id": np.array([42]), "movie_id": np.arange(LENGTH)[None]})
scores = model.evaluate(test_x, test_y, return_dict=True)
model.save("model.keras")
loaded = keras.models.load_model("model.keras", custom_objects={"RankingModel": RankingModel})
model.export("servable")
