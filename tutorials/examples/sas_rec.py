"""SASRec: what was watched, through a causal transformer, is near what is watched next and far from what is not.

Public original: keras-rs, examples/sas_rec.py (a subclassed model: a reversible table with an l2 regularizer,
positions, causal attention, and a `compute_loss` over given negatives; Adam). The blocks are written out; KerasHub is
not asked for.
Lines changed besides the data: -3 +4. The published loss divides by how many items the whole batch has, which all
examples decide: it is divided by the length. The table's regularizer stays.
"""

import keras
import keras_rs
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdp_rec  # new

# Histories of movies 1 to 40, of one of four kinds each; 0 pads. Negatives are drawn uniformly, for each place.
MOVIES, ROWS, LENGTH = 40, 3_000, 8
rng = np.random.default_rng(0)
kind, seen = rng.integers(4, size=ROWS), rng.integers(3, LENGTH + 2, size=ROWS)
histories = 1 + 4 * rng.integers(MOVIES // 4, size=[ROWS, LENGTH + 1]) + kind[:, None]
histories = np.where(np.arange(LENGTH + 1) < seen[:, None], histories, 0).astype("int32")
x = {"item_ids": histories[:, :-1], "padding_mask": histories[:, :-1] != 0}
y = {
    "positive_sequence": histories[:, 1:],
    "negative_sequence": rng.integers(1, MOVIES + 1, size=[ROWS, LENGTH]).astype("int32"),
}
weights = (histories[:, 1:] != 0).astype("float32")
data = (x, y, weights)
train = tf.data.Dataset.from_tensor_slices(data).batch(128)
test = train.take(4)


class Block(layers.Layer):
    """Causal attention and two dense layers, each added to what it is of."""

    def __init__(self, width, heads, rate, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(heads, width // heads, dropout=rate)
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.up, self.down = layers.Dense(width, activation="relu"), layers.Dense(width)
        self.dropout = layers.Dropout(rate)

    def build(self, shape):
        self.attention.build(shape, shape)
        for layer in [*self.norms, self.up, self.down]:
            layer.build(shape)

    def call(self, x, mask, training=False):
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, attention_mask=mask[:, None, :], use_causal_mask=True, training=training)
        return x + self.dropout(self.down(self.up(self.norms[1](x))), training=training)


# was: class SasRec(keras.Model):
class SasRec(tfdp_rec.PrivateModel):
    """A transformer upon the table that its candidates are in."""

    def __init__(self, movies, width=16, blocks=2, heads=2, rate=0.1, length=LENGTH, **kwargs):
        super().__init__(**kwargs)
        self.sizes = {"movies": movies, "width": width, "blocks": blocks, "heads": heads, "rate": rate}
        self.sizes["length"] = length
        self.items = layers.ReversibleEmbedding(movies + 1, width, True, "uniform", keras.regularizers.L2(1e-3))
        self.places = layers.Embedding(length, width, name="places")
        self.dropout = layers.Dropout(rate)
        self.blocks = [Block(width, heads, rate, name=f"block_{n}") for n in range(blocks)]
        self.norm = layers.LayerNormalization()
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=10, return_scores=False)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    def build(self, input_shape):
        sequence = [None, self.sizes["length"], self.sizes["width"]]
        self.items.build(sequence[:2])
        self.places.build(sequence[1:2])
        for layer in [*self.blocks, self.norm]:
            layer.build(sequence)
        self.retrieval.candidate_embeddings = self.items.embeddings
        self.retrieval.build([None, self.sizes["width"]])
        super().build(input_shape)

    def call(self, inputs, training=False):
        ids, mask = inputs["item_ids"], inputs["padding_mask"]
        h = self.dropout(self.items(ids) + self.places(ops.arange(ops.shape(ids)[1])), training=training)
        for block in self.blocks:
            h = block(h, mask, training=training)
        h = self.norm(h)
        if training:
            return {"sequence": h}
        last = ops.maximum(ops.sum(ops.cast(mask, "int32"), axis=1) - 1, 0)
        return {"sequence": h, "predictions": self.retrieval(ops.take_along_axis(h, last[:, None, None], axis=1)[:, 0])}

    def compute_loss(self, x, y, y_pred, sample_weight, training=False):
        h = y_pred["sequence"]
        positive = ops.sum(self.items(y["positive_sequence"]) * h, axis=-1)
        negative = ops.sum(self.items(y["negative_sequence"]) * h, axis=-1)
        logits = ops.concatenate([positive, negative], axis=1)
        labels = ops.concatenate([ops.ones_like(positive), ops.zeros_like(negative)], axis=1)
        weights = ops.concatenate([sample_weight, sample_weight], axis=1)
        loss = self.loss_fn(ops.expand_dims(labels, -1), ops.expand_dims(logits, -1), sample_weight=weights)
        # was: return ops.divide_no_nan(ops.sum(loss), ops.sum(weights))
        return ops.mean(loss)

    def get_config(self):
        return self.sizes


model = SasRec(MOVIES)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001, beta_2=0.98))
# was: model.fit(train, epochs=5)
tfdp_rec.make_private(model, data, epsilon=8.0, batch_size=128, epochs=5).fit()

predictions = model.predict({name: column[:3] for name, column in x.items()})["predictions"]
scores = model.evaluate(test, return_dict=True)
model.save("model.keras")
loaded = keras.models.load_model("model.keras", custom_objects={"SasRec": SasRec})
ids, mask = keras.InputSpec(shape=(None, LENGTH), dtype="int32"), keras.InputSpec(shape=(None, LENGTH), dtype="bool")
model.export("servable", input_signature=[{"item_ids": ids, "padding_mask": mask}])
