"""Text classification: words and their places, one transformer block, a mean over the words.

Public original: keras.io, nlp/text_classification_with_transformer.py (two layers of its own in a functional model,
Adam).
Lines changed besides the data: -2 +3.
"""

import keras
import numpy as np
from keras import layers, ops

import tfdp_rec  # new

# Reviews of twelve words, some of which are kind and some are not.
WORDS, LENGTH, ROWS = 60, 12, 3_000
rng = np.random.default_rng(0)
kindness = rng.normal(size=WORDS)
x = rng.integers(WORDS, size=[ROWS, LENGTH]).astype("int32")
y = (kindness[x].sum(1) > 0).astype("int32")
test_x, test_y = x[:500], y[:500]


@keras.saving.register_keras_serializable("examples")
class TransformerBlock(layers.Layer):
    """Attention and two dense layers, each added to what it is of."""

    def __init__(self, width, heads, hidden, rate=0.1, **kwargs):
        super().__init__(**kwargs)
        self.width, self.heads, self.hidden, self.rate = width, heads, hidden, rate
        self.attention = layers.MultiHeadAttention(num_heads=heads, key_dim=width)
        self.feed = keras.Sequential([layers.Dense(hidden, activation="relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [layers.Dropout(rate) for _ in range(2)]

    def call(self, inputs, training=False):
        attended = self.dropouts[0](self.attention(inputs, inputs), training=training)
        out = self.norms[0](inputs + attended)
        return self.norms[1](out + self.dropouts[1](self.feed(out), training=training))

    def get_config(self):
        own = {"width": self.width, "heads": self.heads, "hidden": self.hidden, "rate": self.rate}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable("examples")
class TokenAndPositionEmbedding(layers.Layer):
    """A word's row and its place's row, added."""

    def __init__(self, length, words, width, **kwargs):
        super().__init__(**kwargs)
        self.length, self.words, self.width = length, words, width
        self.tokens = layers.Embedding(input_dim=words, output_dim=width)
        self.places = layers.Embedding(input_dim=length, output_dim=width)

    def call(self, x):
        return self.tokens(x) + self.places(ops.arange(0, ops.shape(x)[-1]))

    def get_config(self):
        return {**super().get_config(), "length": self.length, "words": self.words, "width": self.width}


inputs = layers.Input(shape=(LENGTH,), dtype="int32")
hidden = TokenAndPositionEmbedding(LENGTH, WORDS, 16)(inputs)
hidden = layers.GlobalAveragePooling1D()(TransformerBlock(16, 2, 16)(hidden))
hidden = layers.Dense(16, activation="relu")(layers.Dropout(0.1)(hidden))
outputs = layers.Dense(2, activation="softmax")(layers.Dropout(0.1)(hidden))
# was: model = keras.Model(inputs=inputs, outputs=outputs)
model = tfdp_rec.PrivateModel(inputs=inputs, outputs=outputs)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
# was: model.fit(x, y, batch_size=200, epochs=5)
tfdp_rec.make_private(model, (x, y), epsilon=8.0, batch_size=200, epochs=5).fit()

predictions = model.predict(x[:3])
scores = model.evaluate(test_x, test_y, return_dict=True)
model.save("model.keras")
loaded = keras.models.load_model("model.keras")
model.export("servable")
