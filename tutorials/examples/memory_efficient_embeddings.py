"""Memory-efficient embeddings: quotient and remainder tables for users, blocks of mixed widths for movies.

Public original: keras.io, keras_recipes/memory_efficient_embeddings.py (a functional model with two layers of its own
over tables, a product, a sigmoid; squared error, Adam).
Lines changed besides the data: -2 +3. Mended for Keras 3: operations on inputs of a functional model are Keras' own.
The order of popularity that makes the blocks is taken as public.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdp_rec  # new

# Ratings from 1 to 5: a movie's quality, and whether the user likes its kind. Few movies have most of the ratings.
USERS, MOVIES, ROWS, TEST, WIDTH = 400, 100, 12_000, 2_000, 16
rng = np.random.default_rng(0)
user_vocabulary, movie_vocabulary = [f"user_{n}" for n in range(USERS)], [f"movie_{n}" for n in range(MOVIES)]
user = rng.integers(USERS, size=ROWS + TEST)
movie = rng.choice(MOVIES, ROWS + TEST, p=1 / np.arange(5, MOVIES + 5) / (1 / np.arange(5, MOVIES + 5)).sum())
quality, kind, taste = rng.normal(size=MOVIES), rng.choice([-0.5, 0.5], MOVIES), rng.choice([-1.0, 1.0], USERS)
x = {"user_id": np.array(user_vocabulary)[user], "movie_id": np.array(movie_vocabulary)[movie]}
y = (3 + 2 * np.tanh(quality[movie] + taste[user] * kind[movie])).astype("float32")[:, None]
test_x, test_y = {name: column[ROWS:] for name, column in x.items()}, y[ROWS:]
x, y = {name: column[:ROWS] for name, column in x.items()}, y[:ROWS]
train = tf.data.Dataset.from_tensor_slices((x, y)).batch(400)
blocks = [movie_vocabulary[:15], movie_vocabulary[15:50], movie_vocabulary[50:]]  # popular, usual, and rare


def embedding_encoder(vocabulary, embedding_dim, num_oov_indices=0, name=None):
    return keras.Sequential(
        [
            layers.StringLookup(vocabulary=vocabulary, mask_token=None, num_oov_indices=num_oov_indices),
            layers.Embedding(len(vocabulary) + num_oov_indices, embedding_dim),
        ],
        name=name,
    )


class QREmbedding(layers.Layer):
    """The product of the rows of a number's quotient and of its remainder."""

    def __init__(self, vocabulary, embedding_dim, num_buckets, name=None):
        super().__init__(name=name)
        self.num_buckets = num_buckets
        self.index_lookup = layers.StringLookup(vocabulary=vocabulary, mask_token=None, num_oov_indices=0)
        self.q_embeddings = layers.Embedding(num_buckets, embedding_dim)
        self.r_embeddings = layers.Embedding(num_buckets, embedding_dim)

    def call(self, inputs):
        index = self.index_lookup(inputs)
        quotient_index = tf.math.floordiv(index, self.num_buckets)
        remainder_index = tf.math.floormod(index, self.num_buckets)
        return self.q_embeddings(quotient_index) * self.r_embeddings(remainder_index)


class MDEmbedding(layers.Layer):
    """Rows of a table a block, narrower for rarer movies, brought to one width."""

    def __init__(self, blocks_vocabulary, blocks_embedding_dims, base_embedding_dim, name=None):
        super().__init__(name=name)
        self.base_embedding_dim = base_embedding_dim
        keys = [movie for vocabulary in blocks_vocabulary for movie in vocabulary]
        values = [n for n, vocabulary in enumerate(blocks_vocabulary) for _ in vocabulary]
        initializer = tf.lookup.KeyValueTensorInitializer(keys, values)
        self.vocab_to_block = tf.lookup.StaticHashTable(initializer, default_value=-1)
        self.block_embedding_encoders, self.block_embedding_projectors = [], []
        for vocabulary, embedding_dim in zip(blocks_vocabulary, blocks_embedding_dims):
            self.block_embedding_encoders.append(embedding_encoder(vocabulary, embedding_dim, num_oov_indices=1))
            same = embedding_dim == base_embedding_dim
            self.block_embedding_projectors.append(
                layers.Lambda(lambda x: x) if same else layers.Dense(base_embedding_dim)
            )

    def call(self, inputs):
        block_indices = self.vocab_to_block.lookup(inputs)
        embeddings = tf.zeros([tf.shape(inputs)[0], self.base_embedding_dim])
        for idx, encoder in enumerate(self.block_embedding_encoders):
            block_embeddings = self.block_embedding_projectors[idx](encoder(inputs))
            mask = tf.expand_dims(tf.cast(block_indices == idx, tf.float32), 1)
            embeddings += block_embeddings * mask
        return embeddings


def create_memory_efficient_model():
    user_input = layers.Input(name="user_id", shape=(), dtype="string")
    user_embedding = QREmbedding(user_vocabulary, WIDTH, num_buckets=USERS // 16, name="user_embedding")(user_input)
    movie_input = layers.Input(name="movie_id", shape=(), dtype="string")
    dims = [WIDTH, WIDTH // 2, WIDTH // 4]
    movie_embedding = MDEmbedding(blocks, dims, WIDTH, name="movie_embedding")(movie_input)
    logits = layers.Dot(axes=1, name="dot_similarity")([user_embedding, movie_embedding])
    prediction = keras.activations.sigmoid(logits) * 5
    # was: return keras.Model(inputs=[user_input, movie_input], outputs=prediction)
    return tfdp_rec.PrivateModel(inputs=[user_input, movie_input], outputs=prediction)


model = create_memory_efficient_model()
model.compile(
    optimizer=keras.optimizers.Adam(0.001),
    loss=keras.losses.MeanSquaredError(),
    metrics=[keras.metrics.MeanAbsoluteError(name="mae")],
)
# was: model.fit(train, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=400, epochs=5).fit()

predictions = model.predict({name: tf.constant(column[:3]) for name, column in test_x.items()})
scores = model.evaluate({name: tf.constant(column) for name, column in test_x.items()}, test_y, return_dict=True)
scores["trivial MAE"] = np.mean(np.abs(test_y - np.median(y)))
model.save_weights("model.weights.h5")
model.export("servable")
