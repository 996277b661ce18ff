"""The recommender: news encoder, user encoder, basis vectors.

    r_i = Theta_N(news_i)        r_0 = Theta_N(padding tokens)     the anonymous news
    u   = Theta_U(r_1 .. r_H)
    direct scores        s_c = u . r_c                             Centralized, DP-FedRec
    decomposed scores    s_c = (Σ_i α_i b_i) . r_c           PrivateRec

News are given once, as the features of a catalogue whose row 0 is the anonymous news; histories and
candidates are rows of it. In a history, 0 means that the position is empty.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from tfdp_rec.models.arguments import SavedByArguments
from tfdp_rec.models.news.layers import AdditiveAttention, PrivateAttention, SelfAttentionPooling, or_all


@keras.saving.register_keras_serializable(package="tfdp_rec")
class NewsRecommender(SavedByArguments, keras.Model):
    """Scores candidate news for users from what they clicked.

    Args:
        news_encoder: `NRMSEncoder`, `NAMLEncoder`, `PLMEncoder`, or a layer with the same call and a `dim`.
        user_encoder: Pools [B, H, dim] with a mask into [B, dim]; see `user_encoder`.
        num_basis: Number of basis vectors B.
        clip_norm: Clip θ of the attention.
        temperature: Temperature of the attention's softmax.
        decomposed: Whether `call` scores by the attention over basis vectors (PrivateRec) or by u itself.

    Reference:
        Liu et al., "PrivateRec", 2022.

    Example:
        >>> import numpy as np
        >>> from tfdp_rec.models.news import NRMSEncoder, user_encoder
        >>> model = NewsRecommender(NRMSEncoder(50, 16, 8), user_encoder("nrms", 8), num_basis=3)
        >>> model({"news": {"title": np.ones((9, 6), "int32")}, "history": np.ones((2, 4), "int32"),
        ...        "candidates": np.ones((2, 5), "int32")}).shape
        TensorShape([2, 5])
    """

    def __init__(
        self,
        news_encoder: keras.layers.Layer,
        user_encoder: keras.layers.Layer,
        num_basis: int = 5,
        clip_norm: float = 1.0,
        temperature: float = 1.0,
        decomposed: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.news_encoder, self.user_encoder = news_encoder, user_encoder
        self.num_basis, self.clip_norm, self.temperature = num_basis, clip_norm, temperature
        self.decomposed = decomposed
        self.private_attention = PrivateAttention(num_basis, clip_norm, temperature, name="private_attention")

    def build(self, input_shape: Any) -> None:
        dim = self.news_encoder.dim
        if not self.news_encoder.built:
            news = {name: input_shape["news"][name] for name in self.news_encoder.reads}
            self.news_encoder.build(news)
        if not self.user_encoder.built:
            self.user_encoder.build((*input_shape["history"], dim))
        if not self.private_attention.built:
            self.private_attention.build((input_shape["history"][0], dim))

    def call(self, inputs: dict[str, Any], training: bool = False) -> Any:
        """Scores [B, C] without any noise.

        Args:
            inputs: News (features of a catalogue, or of the rows that occur), history [B, H] and candidates
                [B, C] as rows of it.
            training: Whether dropout is on.
        """
        news = self.news_vectors(inputs["news"], training)
        weights, users = self.encode_history(news, inputs["history"], training=training)
        shown = self.private_attention.reconstruct(weights) if self.decomposed else users
        return self.scores(shown, ops.take(news, inputs["candidates"], axis=0))

    def news_vectors(self, features: dict[str, Any], training: bool = False) -> Any:
        """Vectors [N, dim] of N news."""
        return self.news_encoder({name: features[name] for name in self.news_encoder.reads}, training=training)

    def catalogue_vectors(self, features: dict[str, NDArray[np.int32]], at_once: int = 512) -> NDArray[np.float32]:
        """Vectors [N, dim] of a whole catalogue, so many news at once: for serving and evaluation.

        Args:
            features: Features of the catalogue.
            at_once: Number of news whose words are in memory together.
        """
        count = len(features[self.news_encoder.reads[0]])
        parts = [
            np.array(self.news_vectors({name: value[first : first + at_once] for name, value in features.items()}))
            for first in range(0, count, at_once)
        ]
        return np.concatenate(parts)

    def encode_history(self, news: Any, history: Any, padded: Any = None, training: bool = False) -> tuple[Any, Any]:
        """Attention weights [B, num_basis] and user embeddings [B, dim].

        Args:
            news: Vectors of the catalogue, row 0 the anonymous news.
            history: Rows [B, H]; 0 where there is no click.
            padded: Positions that the client's mechanism replaced by the anonymous news.
            training: Whether dropout is on.
        """
        present = ops.not_equal(history, 0)
        rows = history if padded is None else ops.where(padded, ops.zeros_like(history), history)
        users = self.user_encoder(ops.take(news, rows, axis=0), mask=or_all(present), training=training)
        return self.private_attention(users), users

    def scores(self, users: Any, candidates: Any) -> Any:
        """Dot products [B, C] of user embeddings [B, dim] with candidate vectors [B, C, dim]."""
        return ops.einsum("bd,bcd->bc", users, candidates)


def user_encoder(
    kind: str, dim: int, num_heads: int = 4, attention_units: int = 64, dropout: float = 0.0
) -> keras.layers.Layer:
    """The user encoder that belongs to a news encoder.

    Args:
        kind: "nrms" or "plm" for self-attention and pooling, "naml" for pooling alone.
        dim: Width of a news vector.
        num_heads: Attention heads.
        attention_units: Width of the pooling's hidden layer.
        dropout: Share dropped in training.

    Raises:
        ValueError: If the kind is unknown.

    Example:
        >>> user_encoder("naml", 8).name
        'user_encoder'
    """
    if kind == "naml":
        return AdditiveAttention(attention_units, name="user_encoder")
    if kind in ("nrms", "plm"):
        return SelfAttentionPooling(
            num_heads, max(1, dim // num_heads), attention_units, dim, dropout, name="user_encoder"
        )
    raise ValueError(f"kind must be 'nrms', 'naml' or 'plm', got {kind!r}.")
