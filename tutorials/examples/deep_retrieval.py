"""Deep retrieval: two towers of dense layers, of users' and of movies' features.

Public original: keras-rs on keras.io, examples/keras_rs/deep_recommender.py (tables of features and dense layers on
both sides; a squared error of the rating; Adagrad).
Lines changed besides the data: -2 +3.
"""

import keras
import numpy as np
from keras import layers, ops

import tfdp_rec  # new

# Ratings of users with an age, of movies with a genre and a title of three words.
USERS, MOVIES, AGES, GENRES, WORDS, ROWS = 200, 50, 6, 5, 30, 4_000
rng = np.random.default_rng(0)
ages, genres = rng.integers(AGES, size=USERS), rng.integers(GENRES, size=MOVIES)
titles = rng.integers(WORDS, size=[MOVIES, 3])
user, movie = rng.integers(USERS, size=ROWS), rng.integers(MOVIES, size=ROWS)
liking, quality = rng.normal(size=[AGES, GENRES]), rng.normal(size=MOVIES)
x = {"user_id": user, "age": ages[user], "movie_id": movie, "genre": genres[movie], "title": titles[movie]}
x = {name: column.astype("int32") for name, column in x.items()}
y = (1 / (1 + np.exp(-liking[ages[user], genres[movie]] - quality[movie]))).astype("float32")[:, None]
test_x, test_y = {name: column[:500] for name, column in x.items()}, y[:500]


class Tower(keras.layers.Layer):
    """Rows of single features, the mean of a list's, and dense layers upon them."""

    def __init__(self, sizes, width, hidden, **kwargs):
        super().__init__(**kwargs)
        self.names = list(sizes)
        self.tables = [layers.Embedding(size, width, name=name) for name, size in sizes.items()]
        self.dense = [layers.Dense(units, activation="relu") for units in hidden] + [layers.Dense(width)]

    def call(self, inputs):
        rows = [table(inputs[name]) for name, table in zip(self.names, self.tables)]
        h = ops.concatenate([ops.mean(row, axis=1) if len(row.shape) == 3 else row for row in rows], axis=1)
        for layer in self.dense:
            h = layer(h)
        return h


# was: class RetrievalModel(keras.Model):
class RetrievalModel(tfdp_rec.PrivateModel):
    """The product of both towers is the rating."""

    def __init__(self, width=8, hidden=(32,), **kwargs):
        super().__init__(**kwargs)
        self.width, self.hidden = width, tuple(hidden)
        self.query = Tower({"user_id": USERS, "age": AGES}, width, hidden, name="query")
        self.candidate = Tower({"movie_id": MOVIES, "genre": GENRES, "title": WORDS}, width, hidden, name="candidate")

    def call(self, inputs):
        return ops.sum(self.query(inputs) * self.candidate(inputs), axis=1, keepdims=True)

    def get_config(self):
        return {"width": self.width, "hidden": self.hidden}


model = RetrievalModel()
model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.05), loss="mse", metrics=["root_mean_squared_error"])
# was: model.fit(x, y, batch_size=200, epochs=10)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=200, epochs=10).fit()

predictions = model.predict({name: column[:3] for name, column in x.items()})
scores = model.evaluate(test_x, test_y, return_dict=True)
model.save("model.keras")
loaded = keras.models.load_model("model.keras", custom_objects={"RetrievalModel": RetrievalModel})
specs = {n: keras.InputSpec(shape=(None, *column.shape[1:]), dtype="int32", name=n) for n, column in x.items()}
model.export("servable", input_signature=[specs])
