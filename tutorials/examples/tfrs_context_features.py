"""Context features with TensorFlow Recommenders: a tower of users and times, and one of titles and their words.

Public original: TensorFlow Recommenders, docs/examples/context_features.ipynb (`tfrs.Model`, `tfrs.tasks.Retrieval`,
timestamps in buckets and normalised, words of titles by `TextVectorization`; Adagrad).
Lines changed besides the data: -7 +9. `tfrs.tasks.Retrieval` scores against the batch, and is refused; `TowerScores`
has the same towers. So is `TextVectorization` within a model: it is run on the public titles once, and an example looks
its title's words up. The times' mean and variance are those of a public period.
Mended for Keras 3: the metric `FactorizedTopK` does not run (the top ten are counted below), the task's loss is named,
a normalised time has no axis of its own, and a Sequential model that begins with a model is told that it takes text.
"""

import keras
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

import tfdp_rec  # new

# Movies are of four kinds, as a word of their title says. The user decides between two pairs, and the time in a pair.
USERS, MOVIES, ROWS, TEST, START, END = 300, 60, 8_000, 1_000, 880_000_000, 890_000_000
rng = np.random.default_rng(0)
user, timestamp = rng.integers(USERS, size=ROWS + TEST), rng.integers(START, END, size=ROWS + TEST)
movie = 4 * rng.integers(MOVIES // 4, size=ROWS + TEST) + 2 * (user % 2) + (timestamp > (START + END) / 2)
unique_user_ids = np.array([f"{n}" for n in range(USERS)])
unique_movie_titles = np.array([f"The {['old', 'new', 'big', 'small'][n % 4]} story {n}" for n in range(MOVIES)])
ratings = {
    "user_id": unique_user_ids[user],
    "timestamp": timestamp.astype("float32"),
    "movie_title": unique_movie_titles[movie],
}
held_out, ratings = ({name: column[rows] for name, column in ratings.items()} for rows in (np.s_[ROWS:], np.s_[:ROWS]))
train, test = (tf.data.Dataset.from_tensor_slices(each).batch(400) for each in (ratings, held_out))
timestamp_buckets = np.linspace(START, END, 20)


class UserModel(keras.Model):
    """Rows of a user and of a bucket of time, and the time itself."""

    def __init__(self):
        super().__init__()
        self.user_embedding = keras.Sequential(
            [
                keras.layers.StringLookup(vocabulary=unique_user_ids),
                keras.layers.Embedding(len(unique_user_ids) + 2, 32),
            ]
        )
        self.timestamp_embedding = keras.Sequential(
            [
                keras.layers.Discretization(timestamp_buckets.tolist()),
                keras.layers.Embedding(len(timestamp_buckets) + 2, 32),
            ]
        )
        self.normalized_timestamp = keras.layers.Normalization(axis=None)
        # was: self.normalized_timestamp.adapt(ratings["timestamp"])
        self.normalized_timestamp.adapt(timestamp_buckets)

    def call(self, inputs):
        return tf.concat(
            [
                self.user_embedding(inputs["user_id"]),
                self.timestamp_embedding(inputs["timestamp"]),
                tf.reshape(self.normalized_timestamp(inputs["timestamp"]), [-1, 1]),
            ],
            axis=1,
        )


class MovieModel(keras.Model):
    """Rows of a title, and the mean of its words' rows."""

    def __init__(self, max_tokens=100):
        super().__init__()
        self.title_embedding = keras.Sequential(
            [
                keras.layers.StringLookup(vocabulary=unique_movie_titles),
                keras.layers.Embedding(len(unique_movie_titles) + 2, 32),
            ]
        )
        self.title_vectorizer = keras.layers.TextVectorization(max_tokens=max_tokens)
        self.title_vectorizer.adapt(unique_movie_titles)
        words = self.title_vectorizer(["", *unique_movie_titles])  # new
        self.title_text_embedding = keras.Sequential(
            [
                # was: self.title_vectorizer,
                keras.layers.StringLookup(vocabulary=unique_movie_titles),
                keras.layers.Lambda(lambda number: tf.gather(words, number)),  # new
                keras.layers.Embedding(max_tokens, 32, mask_zero=True),
                keras.layers.GlobalAveragePooling1D(),
            ]
        )

    def call(self, titles):
        return tf.concat([self.title_embedding(titles), self.title_text_embedding(titles)], axis=1)


# was: class MovielensModel(tfrs.models.Model):
class MovielensModel(tfdp_rec.PrivateTraining, tfrs.models.Model):
    """Towers, and what is asked of them."""

    def __init__(self):
        super().__init__()
        self.query_model = keras.Sequential([UserModel(), keras.layers.Dense(32)])
        self.candidate_model = keras.Sequential([keras.Input([], dtype="string"), MovieModel(), keras.layers.Dense(32)])
        # was: self.task = tfrs.tasks.Retrieval(keras.losses.CategoricalCrossentropy(True, reduction="sum"))
        self.task = tfdp_rec.TowerScores(self.candidate_model, unique_movie_titles, negatives=20)

    def call(self, features):
        return self.query_model({"user_id": features["user_id"], "timestamp": features["timestamp"]})

    def compute_loss(self, features, training=False):
        query_embeddings = self(features)
        # was: movie_embeddings = self.candidate_model(features["movie_title"])
        # was: return self.task(query_embeddings, movie_embeddings)
        return tf.reduce_mean(self.task.cross_entropy(query_embeddings, features["movie_title"]))


model = MovielensModel()
model.compile(optimizer=keras.optimizers.Adagrad(0.1))
# was: model.fit(train, epochs=8)
tfdp_rec.make_private(model, ratings, epsilon=8.0, batch_size=400, epochs=8, adapted_to_public_data=True).fit()

features = {name: tf.constant(held_out[name]) for name in ("user_id", "timestamp")}
predictions = model.predict(features)
scores = model.evaluate(test, return_dict=True)
top = np.argsort(-predictions @ model.candidate_model(tf.constant(unique_movie_titles)).numpy().T, axis=1)[:, :10]
scores["recall@10"] = np.mean((top == movie[ROWS:, None]).any(axis=1))
popular = np.argsort(-np.bincount(movie[:ROWS]))[:10]
scores["trivial recall@10"] = np.mean(np.isin(movie[ROWS:], popular))
model.save_weights("model.weights.h5")
specs = {n: keras.InputSpec(column.dtype.name, [None], name=n) for n, column in features.items()}
model.export("servable", input_signature=[specs])
