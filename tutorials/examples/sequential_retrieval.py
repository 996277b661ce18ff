"""Sequential retrieval (GRU4Rec): ten movies in order, through a GRU, are near the next one.

Public original: keras-rs, examples/sequential_retrieval.py (a subclassed model; its `compute_loss` scores every
example against the labels of its batch; AdamW).
Lines changed besides the data: -8 +5. In-batch negatives make one example's gradient depend on all others, and are
refused. In their place `CandidateScores` draws negatives from the catalogue, and it is the candidate tower besides.
"""

import keras
import keras_rs
import numpy as np
from keras import ops

import tfdp_rec  # new

# Histories of movies 1 to 40, of one of four kinds each, and the movie that was watched next.
MOVIES, ROWS, LENGTH, WIDTH = 40, 4_000, 10, 16
rng = np.random.default_rng(0)
kind = rng.integers(4, size=ROWS)
histories = (1 + 4 * rng.integers(MOVIES // 4, size=[ROWS, LENGTH + 1]) + kind[:, None]).astype("int32")
x, y = histories[:, :-1], histories[:, -1]
test_x, test_y = x[:500], y[:500]


# was: class SequentialRetrievalModel(keras.Model):
class SequentialRetrievalModel(tfdp_rec.PrivateModel):
    """A table and a GRU for what was watched, a table for what may be."""

    def __init__(self, movies_count, width, **kwargs):
        super().__init__(**kwargs)
        self.movies_count, self.width = movies_count, width
        self.query_model = keras.Sequential([keras.layers.Embedding(movies_count + 1, width), keras.layers.GRU(width)])
        # was: self.candidate_model = keras.layers.Embedding(movies_count + 1, width)
        self.candidate_model = tfdp_rec.CandidateScores(movies_count + 1, width, negatives=20)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=10, return_scores=False)
        self.loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)

    def build(self, input_shape):
        self.query_model.build(input_shape)
        self.candidate_model.build(input_shape)
        self.retrieval.candidate_embeddings = self.candidate_model.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs, training=False):
        query = self.query_model(inputs)
        return {"query": query} if training else {"query": query, "predictions": self.retrieval(query)}

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        query = y_pred["query"]
        # was: candidates = self.candidate_model(y)
        # was: num_queries, num_candidates = ops.shape(query)[0], ops.shape(candidates)[0]
        # was: labels = ops.eye(num_queries, num_candidates)
        # was: scores = ops.matmul(query, ops.transpose(candidates))
        # was: return self.loss_fn(labels, scores, sample_weight)
        return ops.mean(self.candidate_model.cross_entropy(query, y))

    def get_config(self):
        return {"movies_count": self.movies_count, "width": self.width}


model = SequentialRetrievalModel(MOVIES, WIDTH)
model.compile(optimizer=keras.optimizers.AdamW(learning_rate=0.005))
# was: model.fit(x, y, batch_size=200, epochs=10)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=200, epochs=10).fit()

predictions = model.predict(test_x)["predictions"]
scores = model.evaluate(test_x, test_y, return_dict=True)
scores["recall@10"] = np.mean([truth in best for truth, best in zip(test_y, predictions)])
model.save("model.keras")
loaded = keras.models.load_model("model.keras", custom_objects={"SequentialRetrievalModel": SequentialRetrievalModel})
model.export("servable", input_signature=[keras.InputSpec(shape=(None, LENGTH), dtype="int32")])
