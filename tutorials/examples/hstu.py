"""HSTU: what was watched and when, in order, through one transducer, says which movie of all is next.

Public original: keras-rs on keras.io, examples/keras_rs/hstu.py (subclassed layers with weights of their own: tables of
positions and times, a transducer with two norms and dropout within; a dense head, cross-entropy, Adam).
Lines changed besides the data: -3 +4: a mask of dropout that a layer draws within has to keep the batch as first axis,
not batch times length. All histories here are of one length, and the options that are not used are left out; `build`
makes what is in a layer, as Keras 3 asks for.
"""

import keras
import numpy as np
from keras import layers, ops

import tfdp_rec  # new

# Histories of movies 1 to 30; four times in five, the next movie is the one that follows the last on a list.
MOVIES, ROWS, TEST, LENGTH, WIDTH = 30, 8_000, 1_000, 8, 32
rng = np.random.default_rng(0)
following, histories = rng.permutation(MOVIES), rng.integers(MOVIES, size=[ROWS + TEST, LENGTH + 1])
for place in range(LENGTH):
    follows = rng.random(ROWS + TEST) < 0.8
    histories[follows, place + 1] = following[histories[follows, place]]
histories = histories.astype("int32") + 1
x = {
    "seq_embeddings": histories[:, :-1],
    "seq_lengths": np.full(ROWS + TEST, LENGTH, "int32"),
    "seq_timestamps": np.cumsum(rng.integers(1, 100_000, size=[ROWS + TEST, LENGTH]), axis=1).astype("int32"),
    "num_targets": np.ones(ROWS + TEST, "int32"),
}
test_x, test_y = {name: column[ROWS:] for name, column in x.items()}, histories[ROWS:, -1]
x, y = {name: column[:ROWS] for name, column in x.items()}, histories[:ROWS, -1]


class HSTUPositionalEncoder(layers.Layer):
    """Adds rows of the place and of the time before the last event."""

    def __init__(self, num_position_buckets, num_time_buckets, embedding_dim, **kwargs):
        super().__init__(**kwargs)
        self.num_position_buckets, self.num_time_buckets = num_position_buckets, num_time_buckets
        self.embedding_dim = embedding_dim

    def build(self, input_shape):
        for name, rows in (("position", self.num_position_buckets), ("timestamp", self.num_time_buckets + 1)):
            bound = (1 / rows) ** 0.5
            weight = self.add_weight(
                shape=(rows, self.embedding_dim),
                initializer=keras.initializers.RandomUniform(-bound, bound),
                name=f"{name}_embeddings_weight",
            )
            setattr(self, f"{name}_embeddings_weight", weight)

    def call(self, seq_embeddings, seq_lengths, timestamps, num_targets):
        length = seq_embeddings.shape[1]
        high = ops.expand_dims(seq_lengths - num_targets, 1)
        places = high - ops.minimum(ops.expand_dims(ops.arange(length, dtype="int32"), 0), high)
        places = ops.clip(places, 0, self.num_position_buckets - 1)
        last = ops.expand_dims(ops.clip(seq_lengths - 1, 0, length - 1), axis=-1)
        passed = ops.cast(ops.take_along_axis(timestamps, last, axis=1) - timestamps, "float32")
        times = ops.cast(ops.clip(ops.sqrt(ops.maximum(passed, 1e-6) / 60), 0, self.num_time_buckets), "int32")
        position_embeddings = ops.take(self.position_embeddings_weight, places, axis=0)
        time_embeddings = ops.take(self.timestamp_embeddings_weight, times, axis=0)
        return seq_embeddings * self.embedding_dim**0.5 + position_embeddings + time_embeddings


class STULayer(layers.Layer):
    """Pointwise attention, gated, and added to what it is of."""

    def __init__(self, embedding_dim, num_heads, hidden_dim, attention_dim, output_dropout_ratio=0.3, **kwargs):
        super().__init__(**kwargs)
        self.embedding_dim, self.num_heads = embedding_dim, num_heads
        self.hidden_dim, self.attention_dim = hidden_dim, attention_dim
        self.input_norm = layers.LayerNormalization(epsilon=1e-6)
        self.output_norm = layers.LayerNormalization(epsilon=1e-6)
        self.dropout = layers.Dropout(output_dropout_ratio)

    def build(self, input_shape):
        hidden, attention = self.hidden_dim * self.num_heads, self.attention_dim * self.num_heads
        self.uvqk_weight = self.add_weight((self.embedding_dim, 2 * hidden + 2 * attention), name="uvqk_weight")
        self.uvqk_bias = self.add_weight((2 * hidden + 2 * attention,), "zeros", name="uvqk_bias")
        shape = (2 * hidden + self.embedding_dim, self.embedding_dim)
        self.output_weight = self.add_weight(shape, name="output_weight")
        self.input_norm.build((None, None, self.embedding_dim))
        self.output_norm.build((None, hidden))

    def call(self, x, seq_lengths, training=False):
        length, heads = x.shape[1], self.num_heads
        hidden, attention = self.hidden_dim * heads, self.attention_dim * heads
        flat = ops.reshape(self.input_norm(x), (-1, self.embedding_dim))
        uvqk = ops.matmul(flat, self.uvqk_weight) + self.uvqk_bias
        u, v, q, k = ops.split(uvqk, [hidden, 2 * hidden, 2 * hidden + attention], axis=1)
        u = ops.silu(u)
        v, q, k = (
            ops.transpose(ops.reshape(each, (-1, length, heads, width)), (0, 2, 1, 3))
            for each, width in ((v, self.hidden_dim), (q, self.attention_dim), (k, self.attention_dim))
        )
        scores = ops.silu(ops.einsum("bhnd,bhmd->bhnm", q, k) * self.attention_dim**-0.5)
        ids = ops.expand_dims(ops.arange(length, dtype="int32"), 0)
        causal = ops.expand_dims(ops.transpose(ids) >= ids, 0)
        mask = ops.logical_and(causal, ops.expand_dims(ids < ops.expand_dims(seq_lengths, -1), 1))
        scores = scores * ops.cast(ops.expand_dims(mask, 1), scores.dtype)
        attended = ops.transpose(ops.einsum("bhnm,bhmd->bhnd", scores, v), (0, 2, 1, 3))
        x_flat = ops.reshape(x, (-1, self.embedding_dim))
        y = u * self.output_norm(ops.reshape(attended, (-1, hidden)))
        y = ops.concatenate([u, x_flat, y], axis=1)
        # was: y = self.dropout(y, training=training)
        y = ops.reshape(self.dropout(ops.reshape(y, (-1, length, y.shape[1])), training=training), (-1, y.shape[1]))
        output = ops.matmul(y, self.output_weight) + x_flat
        return ops.reshape(output, (-1, length, self.embedding_dim))


# was: class HSTUTransducer(keras.Model):
class HSTUTransducer(tfdp_rec.PrivateModel):
    """Rows of movies, the encoder, the transducer, and a score for each movie after the last event."""

    def __init__(self, stu_layer, positional_encoder, vocab_size, embedding_dim, input_dropout_ratio=0.0, **kwargs):
        super().__init__(**kwargs)
        self.embedding_layer = layers.Embedding(vocab_size, embedding_dim, name="item_embedding_layer")
        self.stu_layer, self.positional_encoder = stu_layer, positional_encoder
        self.input_dropout = layers.Dropout(input_dropout_ratio)
        self.output_head = layers.Dense(vocab_size, name="output_head")

    def call(self, inputs, training=False):
        rows, lengths = self.embedding_layer(inputs["seq_embeddings"]), inputs["seq_lengths"]
        encoded = self.positional_encoder(rows, lengths, inputs["seq_timestamps"], inputs["num_targets"])
        sequence = self.stu_layer(self.input_dropout(encoded, training=training), lengths, training=training)
        indices = ops.expand_dims(ops.expand_dims(lengths - 1, axis=-1), axis=-1)
        return self.output_head(ops.squeeze(ops.take_along_axis(sequence, indices, axis=1), axis=1))


model = HSTUTransducer(
    STULayer(WIDTH, num_heads=2, hidden_dim=16, attention_dim=16, output_dropout_ratio=0.3),
    HSTUPositionalEncoder(num_position_buckets=32, num_time_buckets=128, embedding_dim=WIDTH),
    vocab_size=MOVIES + 1,
    embedding_dim=WIDTH,
    input_dropout_ratio=0.3,
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=0.001),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
# was: model.fit(x, y, batch_size=400, epochs=8)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=400, epochs=8).fit()

predictions = model.predict({name: column[:3] for name, column in test_x.items()})
scores = model.evaluate(test_x, test_y, return_dict=True)
scores["trivial accuracy"] = np.mean(test_y == np.bincount(y).argmax())
model.save_weights("model.weights.h5")
specs = {name: keras.InputSpec("int32", [None, *column.shape[1:]], name=name) for name, column in x.items()}
model.export("servable", input_signature=[specs])
