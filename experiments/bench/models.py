"""The models of the benchmarks, each as layers that become a plain Keras model or a private one.

`embedding_layer` and `scores_layer` say how tables are read: as Keras reads them, by a copy of the whole table, or by a
gather from the variable itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tfdp_rec.clipping import CandidateScores
from tfdp_rec.core.ground.keras_internals import embeddings_of, resource
from tfdp_rec.training.model import PrivateTraining

LEARNING_RATE = 0.05
TOKEN_WIDTH, TOKENS = 128, 32  # of the transformer
MICROBATCH = 32  # of the strategies that form every example's gradient, or these would not fit


class GatheredEmbedding(keras.layers.Embedding):
    """Keras' Embedding, read by a gather from the variable: what sparse SGD reads its tables with."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.gather(resource(embeddings_of(self)), inputs)


class GatheredScores(CandidateScores):
    """Scores without anything private about them; CandidateScores gathers from the variable."""


class WholeReadScores(CandidateScores):
    """The same from a read of the whole table, as layers of Keras do."""

    def products(self, query: tf.Tensor, positives: Any, negatives: Any, table: Any, offsets: Any) -> Any:
        return super().products(query, positives, negatives, tf.convert_to_tensor(self.embeddings), offsets)


class TwoTowerLayers:
    """EANA's two-tower recommender as a Keras model; `embedding_layer` and `scores_layer` say how tables are read."""

    embedding_layer: type[keras.layers.Embedding] = keras.layers.Embedding
    scores_layer: type[CandidateScores] = CandidateScores
    shared_inputs = ("negatives",)

    def __init__(self, rows: int, width: int = 128, hidden: int = 128):
        super().__init__()
        self.context = self.embedding_layer(rows, width, name="context")
        self.hidden = keras.layers.Dense(hidden, activation="tanh", name="hidden")
        self.out = keras.layers.Dense(width, name="out")
        self.scores = self.scores_layer(rows, width, name="label")
        self.context.build()
        self.hidden.build((None, width))
        self.out.build((None, hidden))
        self.built = True

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool | None = None) -> tf.Tensor:
        bag = tf.reduce_mean(self.context(inputs["context"]), axis=1)
        return self.scores(self.out(self.hidden(bag)), inputs["label"], inputs["negatives"])


class OneTableLayers:
    """One table and one dense layer: as little beside the table as can be."""

    embedding_layer: type[keras.layers.Embedding] = keras.layers.Embedding

    def __init__(self, rows: int, width: int = 128):
        super().__init__()
        self.table = self.embedding_layer(rows, width, embeddings_initializer="zeros", name="table")
        self.logit = keras.layers.Dense(1, activation="sigmoid", name="logit")
        self.table.build()
        self.logit.build((None, width))
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> tf.Tensor:
        ids = inputs["ids"][:, 0] if isinstance(inputs, Mapping) else inputs
        return self.logit(self.table(ids))


class Transformer:
    """Two encoder layers over token ids; the token table gives the logits too."""

    embedding_layer: type[layers.Embedding] = layers.ReversibleEmbedding

    def __init__(self, rows: int):
        super().__init__()
        self.table = self.embedding_layer(rows, TOKEN_WIDTH, name="tokens")
        self.positions = layers.Embedding(TOKENS, TOKEN_WIDTH, name="positions")
        self.blocks = [_block(i) for i in range(2)]
        self.parts = [layer for block in self.blocks for layer in block]

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        places = tf.zeros_like(tokens) + tf.range(TOKENS, dtype=tokens.dtype)
        h = self.table(tokens) + self.positions(places)
        for attention, first, up, down, second in self.blocks:
            h = first(h + attention(h, h, use_causal_mask=True))
            h = second(h + down(up(h)))
        return self.table(h, reverse=True)


def _block(number: int) -> list[layers.Layer]:
    return [
        layers.MultiHeadAttention(4, TOKEN_WIDTH // 4, name=f"attention_{number}"),
        layers.LayerNormalization(name=f"first_{number}"),
        layers.Dense(4 * TOKEN_WIDTH, activation="relu", name=f"up_{number}"),
        layers.Dense(TOKEN_WIDTH, name=f"down_{number}"),
        layers.LayerNormalization(name=f"second_{number}"),
    ]


def private(kind: type, **arguments: Any) -> Any:
    """Layers as a model that trains privately."""
    return type("Private", (kind, PrivateTraining, keras.Model), {})(**arguments)


def plain(kind: type, sparse: bool, **arguments: Any) -> Any:
    """Layers as a compiled Keras model.

    Args:
        kind: of layers.
        sparse: whether tables are read by a gather from the variable.
        **arguments: of the layers.
    """
    reads: dict[str, Any] = {"embedding_layer": GatheredEmbedding} if sparse else {}
    if hasattr(kind, "scores_layer"):
        reads["scores_layer"] = GatheredScores if sparse else WholeReadScores
    return type("Plain", (kind, keras.Model), reads)(**arguments)
