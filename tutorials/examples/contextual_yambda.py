"""Contextual retrieval: the same listener is near other tracks when searching than when a radio plays.

Public original: keras-rs on keras.io, examples/keras_rs/contextual_retrieval_yambda.py (a subclassed model: tables of
users, contexts and items, a dense layer, a `compute_loss` over the batch with a tracker of its own; Adagrad).
Lines changed besides the data: -9 +6. In-batch negatives make one example's gradient depend on all others, and are
refused. In their place `CandidateScores` draws negatives from the catalogue, and it is the candidate tower besides.
The published `metrics` hide Keras' own tracker of the loss, which a private step writes to; they are shown beside it.
Here on TensorFlow, not on JAX.
"""

import keras
import keras_rs
import numpy as np

import tfdp_rec  # new

# Listeners of two kinds; each kind searches for one of four kinds of tracks, and is played another by the radio.
USERS, ITEMS, ROWS, TEST = 300, 60, 8_000, 1_000
rng = np.random.default_rng(0)
user, organic = rng.integers(USERS, size=ROWS + TEST), rng.integers(2, size=ROWS + TEST)
item = 4 * rng.integers(ITEMS // 4, size=ROWS + TEST) + 2 * (user % 2) + organic
x = {"uid": user.astype("int32"), "is_organic": organic.astype("int32")}
y = {"item_id": item.astype("int32")}
test_x, test_y = ({name: column[ROWS:] for name, column in part.items()} for part in (x, y))
x, y = ({name: column[:ROWS] for name, column in part.items()} for part in (x, y))


# was: class ContextualRetrievalModel(keras.Model):
class ContextualRetrievalModel(tfdp_rec.PrivateModel):
    """A query from the rows of a user and of a context, and a table of what may be played."""

    def __init__(self, max_uid, item_vocab_size, embed_dim=32, **kwargs):
        super().__init__(**kwargs)
        self.user_embedding = keras.layers.Embedding(max_uid + 1, embed_dim)
        self.context_embedding = keras.layers.Embedding(2, embed_dim)
        self.query_dense = keras.layers.Dense(embed_dim, activation="relu")
        # was: self.item_embedding = keras.layers.Embedding(item_vocab_size, embed_dim)
        self.item_embedding = tfdp_rec.CandidateScores(item_vocab_size, embed_dim, negatives=20)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=10, return_scores=False)
        self.loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def build(self, input_shape):
        self.item_embedding.build((None,))
        self.retrieval.candidate_embeddings = self.item_embedding.embeddings
        self.retrieval.build((None, self.query_dense.units))
        super().build(input_shape)

    def call(self, inputs):
        user, context = self.user_embedding(inputs["uid"]), self.context_embedding(inputs["is_organic"])
        return {"query_embeddings": self.query_dense(keras.ops.concatenate([user, context], axis=1))}

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        query_embeddings = y_pred["query_embeddings"]
        # was: candidate_embeddings = self.item_embedding(y["item_id"])
        # was: scores = keras.ops.matmul(query_embeddings, keras.ops.transpose(candidate_embeddings))
        # was: batch_size = keras.ops.shape(query_embeddings)[0]
        # was: labels = keras.ops.eye(batch_size)
        # was: loss = self.loss_fn(labels, scores, sample_weight)
        loss = keras.ops.mean(self.item_embedding.cross_entropy(query_embeddings, y["item_id"]))
        self.loss_tracker.update_state(loss)
        return loss

    @property
    def metrics(self):
        # was: return [self.loss_tracker]
        return super().metrics


model = ContextualRetrievalModel(max_uid=USERS - 1, item_vocab_size=ITEMS, embed_dim=64)
model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.1))
# was: model.fit(x, y, batch_size=400, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=400, epochs=5).fit()

predictions = keras.ops.convert_to_numpy(model.retrieval(model.predict(test_x)["query_embeddings"]))
scores = model.evaluate(test_x, test_y, return_dict=True)
scores["recall@10"] = np.mean((predictions == test_y["item_id"][:, None]).any(axis=1))
popular = np.argsort(-np.bincount(y["item_id"]))[:10]
scores["trivial recall@10"] = np.mean(np.isin(test_y["item_id"], popular))
model.save_weights("model.weights.h5")
model.export("servable", input_signature=[{name: keras.InputSpec("int32", [None], name=name) for name in x}])
