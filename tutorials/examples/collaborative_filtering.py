"""Collaborative filtering: the product of two rows, a bias each, and a sigmoid.

Public original: keras.io, structured_data/collaborative_filtering_movielens.py (a subclassed model whose tables have
an l2 regularizer, binary cross-entropy, Adam).
Lines changed besides the data: -2 +3. The tables' regularizer stays: it is a decay, which rows get when it falls due.
Older copies multiply by `tensordot(users, movies, 2)`, which sums over the batch, so that all examples are in every
score. That is refused; `Dot(axes=1)` is not.
"""

import keras
import numpy as np
from keras import layers

import tfdp_rec  # new

# Ratings from 0 to 1; an example is a pair of numbers.
USERS, MOVIES, ROWS = 300, 60, 4_000
rng = np.random.default_rng(0)
taste, kind = rng.choice([-1.0, 1.0], USERS), rng.choice([-1.0, 1.0], MOVIES)
x = np.stack([rng.integers(USERS, size=ROWS), rng.integers(MOVIES, size=ROWS)], axis=1).astype("int32")
y = (0.5 + 0.4 * taste[x[:, 0]] * kind[x[:, 1]]).astype("float32")[:, None]
test_x, test_y = x[:500], y[:500]


# was: class RecommenderNet(keras.Model):
class RecommenderNet(tfdp_rec.PrivateModel):
    """Rows and biases of users and movies."""

    def __init__(self, num_users, num_movies, embedding_size, **kwargs):
        super().__init__(**kwargs)
        self.num_users, self.num_movies, self.embedding_size = num_users, num_movies, embedding_size
        self.users = layers.Embedding(num_users, embedding_size, "he_normal", keras.regularizers.L2(1e-6))
        self.user_bias = layers.Embedding(num_users, 1)
        self.movies = layers.Embedding(num_movies, embedding_size, "he_normal", keras.regularizers.L2(1e-6))
        self.movie_bias = layers.Embedding(num_movies, 1)
        self.dot = layers.Dot(axes=1)

    def call(self, inputs):
        user, movie = inputs[:, 0], inputs[:, 1]
        product = self.dot([self.users(user), self.movies(movie)])
        return keras.ops.sigmoid(product + self.user_bias(user) + self.movie_bias(movie))

    def get_config(self):
        return {"num_users": self.num_users, "num_movies": self.num_movies, "embedding_size": self.embedding_size}


model = RecommenderNet(USERS, MOVIES, 16)
model.compile(loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam(learning_rate=0.001))
# was: model.fit(x, y, batch_size=128, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=128, epochs=5).fit()

predictions = model.predict(np.stack([np.full(MOVIES, 42), np.arange(MOVIES)], axis=1)).flatten()
best = predictions.argsort()[-10:][::-1]
scores = model.evaluate(test_x, test_y, return_dict=True)
model.save("model.keras")
loaded = keras.models.load_model("model.keras", custom_objects={"RecommenderNet": RecommenderNet})
model.export("servable", input_signature=[keras.InputSpec(shape=(None, 2), dtype="int32")])
