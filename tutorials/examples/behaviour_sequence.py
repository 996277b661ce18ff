"""Behaviour sequence transformer: what was watched and how it was rated, in order, says how the next movie will be.

Public original: keras.io, structured_data/movielens_recommendations_transformers.py (a functional model of strings:
lookups, tables, fixed genres, positions, attention, batch normalisation, Adagrad).
Lines changed besides the data: -3 +4: batch normalisation mixes the examples of a batch and is refused; layer
normalisation, in its place, does not.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdp_rec  # new

# Histories of three movies and their ratings, then the movie that is to be rated.
USERS, MOVIES, GENRES, ROWS, LENGTH = 200, 40, 6, 4_000, 4
rng = np.random.default_rng(0)
movie_names = np.array([f"movie_{n}" for n in range(MOVIES)])
user_names = np.array([f"user_{n}" for n in range(USERS)])
genres = (rng.random([MOVIES, GENRES]) < 0.3).astype("float32")
watched, user = rng.integers(MOVIES, size=[ROWS, LENGTH]), rng.integers(USERS, size=ROWS)
ratings = 1 + 4 / (1 + np.exp(-(genres @ rng.normal(size=GENRES))[watched] - rng.normal(size=USERS)[user][:, None]))
x = {
    "user_id": user_names[user][:, None],
    "sequence_movie_ids": movie_names[watched[:, :-1]],
    "target_movie_id": movie_names[watched[:, -1:]],
    "sequence_ratings": ratings[:, :-1].astype("float32"),
    "sex": rng.choice(["F", "M"], [ROWS, 1]),
}
y = ratings[:, -1:].astype("float32")
train = tf.data.Dataset.from_tensor_slices((x, y)).batch(265)
test = train.take(2)


def indexed(vocabulary, name):
    return layers.StringLookup(vocabulary=list(vocabulary), mask_token=None, num_oov_indices=0, name=name)


def create_model(width=8, heads=2, hidden=(32,), dropout=0.1):
    inputs = {
        "user_id": layers.Input([1], dtype="string", name="user_id"),
        "sequence_movie_ids": layers.Input([LENGTH - 1], dtype="string", name="sequence_movie_ids"),
        "target_movie_id": layers.Input([1], dtype="string", name="target_movie_id"),
        "sequence_ratings": layers.Input([LENGTH - 1], dtype="float32", name="sequence_ratings"),
        "sex": layers.Input([1], dtype="string", name="sex"),
    }
    others = [
        layers.Embedding(USERS, width, name="user_embedding")(indexed(user_names, "users")(inputs["user_id"])),
        layers.Embedding(2, 2, name="sex_embedding")(indexed(["F", "M"], "sexes")(inputs["sex"])),
    ]
    lookup, table = indexed(movie_names, "movies"), layers.Embedding(MOVIES, width, name="movie_embedding")
    constant = keras.initializers.Constant(genres)
    fixed = layers.Embedding(MOVIES, GENRES, embeddings_initializer=constant, trainable=False, name="genres")
    process = layers.Dense(width, activation="relu", name="movie_with_genres")

    def encoded(names):
        index = lookup(names)
        return process(layers.Concatenate()([table(index), fixed(index)]))

    positions = layers.Embedding(LENGTH, width, name="position_embedding")(np.arange(LENGTH - 1)[None])
    rated = layers.Reshape([LENGTH - 1, 1])(inputs["sequence_ratings"])
    sequence = (encoded(inputs["sequence_movie_ids"]) + positions) * rated
    sequence = layers.Concatenate(axis=1)([sequence, encoded(inputs["target_movie_id"])])

    attended = layers.Dropout(dropout)(layers.MultiHeadAttention(heads, width, dropout=dropout)(sequence, sequence))
    first = layers.LayerNormalization()(layers.Add()([sequence, attended]))
    fed = layers.Dropout(dropout)(layers.Dense(width)(layers.LeakyReLU()(first)))
    transformed = layers.Flatten()(layers.LayerNormalization()(layers.Add()([first, fed])))

    features = layers.Concatenate()([transformed, layers.Reshape([width + 2])(layers.Concatenate()(others))])
    for units in hidden:
        features = layers.Dense(units)(features)
        # was: features = layers.BatchNormalization()(features)
        features = layers.LayerNormalization()(features)
        features = layers.Dropout(dropout)(layers.LeakyReLU()(features))
    # was: return keras.Model(inputs=inputs, outputs=layers.Dense(1)(features))
    return tfdp_rec.PrivateModel(inputs=inputs, outputs=layers.Dense(1)(features))


model = create_model()
model.compile(
    optimizer=keras.optimizers.Adagrad(learning_rate=0.01),
    loss=keras.losses.MeanSquaredError(),
    metrics=[keras.metrics.MeanAbsoluteError()],
)
# was: model.fit(train, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=265, epochs=5).fit()

predictions = model.predict({name: tf.constant(column[:3]) for name, column in x.items()})
scores = model.evaluate(test, return_dict=True)
model.save("model.keras")
loaded = keras.models.load_model("model.keras")
model.export("servable")
