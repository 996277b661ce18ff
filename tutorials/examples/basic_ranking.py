"""Basic ranking: what would this user give this movie?

Public original: keras-rs, examples/basic_ranking.py (a subclassed model, two tables, three dense layers, squared
error).
Lines changed besides the data: -2 +3.
"""

import keras
import numpy as np

import tfdp_rec  # new

# Ratings between 0 and 1, of users and movies that have a taste and a quality.
USERS, MOVIES, ROWS = 300, 60, 4_000
rng = np.random.default_rng(0)
taste, quality = rng.normal(size=USERS), rng.normal(size=MOVIES)
user, movie = rng.integers(USERS, size=ROWS), rng.integers(MOVIES, size=ROWS)
rating = 1 / (1 + np.exp(-taste[user] - quality[movie]))
x, y = {"user_id": user.astype("int32"), "movie_id": movie.astype("int32")}, rating.astype("float32")[:, None]
test_x, test_y = {name: column[:500] for name, column in x.items()}, y[:500]


# was: class RankingModel(keras.Model):
class RankingModel(tfdp_rec.PrivateModel):
    """A rating from the rows of a user and of a movie, put side by side."""

    def __init__(self, num_users, num_movies, width=16, **kwargs):
        super().__init__(**kwargs)
        self.num_users, self.num_movies, self.width = num_users, num_movies, width
        self.users = keras.layers.Embedding(num_users, width)
        self.movies = keras.layers.Embedding(num_movies, width)
        self.ratings = keras.Sequential(
            [
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(1),
            ]
        )

    def call(self, inputs):
        pair = [self.users(inputs["user_id"]), self.movies(inputs["movie_id"])]
        return self.ratings(keras.ops.concatenate(pair, axis=1))

    def get_config(self):
        return {"num_users": self.num_users, "num_movies": self.num_movies, "width": self.width}


model = RankingModel(USERS, MOVIES)
model.compile(
    loss=keras.losses.MeanSquaredError(),
    metrics=[keras.metrics.RootMeanSquaredError()],
    optimizer=keras.optimizers.Adagrad(learning_rate=0.1),
)
# was: model.fit(x, y, batch_size=200, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=200, epochs=5).fit()

# Who would like the first three movies, and how good is all of it? The model is saved and served as any other.
predictions = model.predict({"user_id": np.array([42] * 3), "movie_id": np.arange(3)})
scores = model.evaluate(test_x, test_y, return_dict=True)
model.save("model.keras")
loaded = keras.models.load_model("model.keras", custom_objects={"RankingModel": RankingModel})
model.export("servable")
