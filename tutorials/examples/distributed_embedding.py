"""Distributed embedding: the basic ranking model, its two tables in one layer that is made for accelerators.

Public original: keras-rs on keras.io, examples/keras_rs/distributed_embedding_tf.py (`DistributedEmbedding` of two
tables, three dense layers, squared error, Adagrad; the tables under Adam of their own, on a TPU).
Lines changed besides the data: -2 +3. Here without a TPU: the tables are placed by "auto", not "sparsecore". Keras'
`export` hands a model a dict of a kind of its own, which this layer takes for another: the dict is written anew.
"""

import keras
import keras_rs
import numpy as np

import tfdp_rec  # new

# Ratings between 0 and 1, of users and movies that have a taste and a quality.
USERS, MOVIES, ROWS, TEST, BATCH_SIZE, EMBEDDING_DIMENSION = 300, 60, 8_000, 1_000, 256, 32
rng = np.random.default_rng(0)
taste, quality = rng.normal(size=USERS + 1), rng.normal(size=MOVIES + 1)
user, movie = rng.integers(1, USERS + 1, size=ROWS + TEST), rng.integers(1, MOVIES + 1, size=ROWS + TEST)
x = {"user_id": user.astype("int32"), "movie_id": movie.astype("int32")}
y = (1 / (1 + np.exp(-taste[user] - quality[movie]))).astype("float32")[:, None]
test_x, test_y = {name: column[ROWS:] for name, column in x.items()}, y[ROWS:]
x, y = {name: column[:ROWS] for name, column in x.items()}, y[:ROWS]


def table(name, size):
    return keras_rs.layers.TableConfig(
        name=name, vocabulary_size=size, embedding_dim=EMBEDDING_DIMENSION, optimizer="adam", placement="auto"
    )


def feature(name, table):
    shapes = {"input_shape": (BATCH_SIZE,), "output_shape": (BATCH_SIZE, EMBEDDING_DIMENSION)}
    return keras_rs.layers.FeatureConfig(name=name, table=table, **shapes)


FEATURE_CONFIGS = {
    "movie_id": feature("movie", table("movie_table", MOVIES + 1)),
    "user_id": feature("user", table("user_table", USERS + 1)),
}


# was: class EmbeddingModel(keras.Model):
class EmbeddingModel(tfdp_rec.PrivateModel):
    """A rating from the rows of a user and of a movie, put side by side."""

    def __init__(self, feature_configs):
        super().__init__()
        self.embedding_layer = keras_rs.layers.DistributedEmbedding(feature_configs=feature_configs)
        self.ratings = keras.Sequential(
            [
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(1),
            ]
        )

    def call(self, features):
        embedding = self.embedding_layer({**features})
        return self.ratings(keras.ops.concatenate([embedding["user_id"], embedding["movie_id"]], axis=1))


model = EmbeddingModel(FEATURE_CONFIGS)
model.compile(
    loss=keras.losses.MeanSquaredError(),
    metrics=[keras.metrics.RootMeanSquaredError()],
    optimizer="adagrad",
)
# was: model.fit(x, y, batch_size=BATCH_SIZE, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=BATCH_SIZE, epochs=5).fit()

predictions = model.predict({name: column[:3] for name, column in test_x.items()})
scores = model.evaluate(test_x, test_y, return_dict=True)
scores["trivial RMSE"] = np.sqrt(np.mean((test_y - y.mean()) ** 2))
model.save_weights("model.weights.h5")
model.export("servable", input_signature=[{name: keras.InputSpec("int32", [None], name=name) for name in x}])
