"""Node2vec: movies that walks on a graph meet are near each other, and movies drawn at random are not.

Public original: keras.io, graph/node2vec_movielens.py (a functional model: one table with an l2 regularizer for both
movies of a pair, their product, binary cross-entropy with weights; Adam). A pair is what is protected here, not a user:
the public original makes the graph itself of all users' ratings.
Lines changed besides the data: -2 +3.
"""

import keras
import numpy as np
from keras import layers

import tfdp_rec  # new

# Walks of ten steps on movies of five kinds, of which 19 in 20 stay in the kind. Pairs of a walk are positives, and
# for each there are four of one of its movies and any other; a pair's weight is how often it occurs.
MOVIES, KINDS, STEPS, NEGATIVES = 300, 5, 10, 4
rng = np.random.default_rng(0)


def examples(number_of_walks):
    walks = rng.integers(MOVIES, size=[number_of_walks, STEPS])
    for step in range(1, STEPS):
        stays = rng.random(number_of_walks) < 0.95
        walks[stays, step] += (walks[stays, step - 1] - walks[stays, step]) % KINDS
        walks[:, step] %= MOVIES
    pairs = np.concatenate([walks[:, [i, j]] for i in range(STEPS) for j in range(i)])
    drawn = np.repeat(pairs, NEGATIVES, axis=0)
    drawn[:, 1] = rng.integers(MOVIES, size=len(drawn))
    entries = np.concatenate([np.insert(np.sort(each), 2, n, axis=1) for n, each in ((1, pairs), (0, drawn))])
    entries, weights = np.unique(entries[entries[:, 0] != entries[:, 1]], axis=0, return_counts=True)
    x = {"target": entries[:, 0].astype("int32"), "context": entries[:, 1].astype("int32")}
    return x, entries[:, 2:].astype("float32"), weights.astype("float32")


x, y, weights = examples(number_of_walks=500)
test_x, test_y, test_weights = examples(number_of_walks=50)


def create_model(vocabulary_size, embedding_dim):
    inputs = {name: layers.Input(name=name, shape=(), dtype="int32") for name in ("target", "context")}
    embed_item = layers.Embedding(
        vocabulary_size,
        embedding_dim,
        embeddings_initializer="he_normal",
        embeddings_regularizer=keras.regularizers.L2(1e-6),
        name="item_embeddings",
    )
    both = [embed_item(inputs["target"]), embed_item(inputs["context"])]
    logits = layers.Dot(axes=1, normalize=False, name="dot_similarity")(both)
    # was: return keras.Model(inputs=inputs, outputs=logits)
    return tfdp_rec.PrivateModel(inputs=inputs, outputs=logits)


model = create_model(MOVIES, 50)
model.compile(
    optimizer=keras.optimizers.Adam(0.001),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    weighted_metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
)
# was: model.fit(x, y, sample_weight=weights, batch_size=1024, epochs=10)
tfdp_rec.make_private(model, (x, y, weights), epsilon=8.0, batch_size=1024, epochs=10).fit()

predictions = model.predict({name: column[:3] for name, column in test_x.items()})
scores = model.evaluate(test_x, test_y, sample_weight=test_weights, return_dict=True)
scores["trivial AUC"] = 0.5
model.save("model.keras")
loaded = keras.models.load_model("model.keras")
model.export("servable")
