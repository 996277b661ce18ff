"""The layer that turns a user embedding into a few attention weights over public basis vectors.

    α = softmax(u b^T / (τ √(d))),   clip = α * min(1, θ / ‖α‖_2),   u' = Σ_i α'_i b_i

b (B x d) is public. The layer adds no noise: the client does, outside the graph, with `AttentionMechanism`,
so that no random state can end up in a saved model.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="tfdp_rec")
class PrivateAttention(keras.layers.Layer):
    """Clipped attention weights of a user embedding over B basis vectors."""

    def __init__(
        self,
        num_basis: int,
        clip_norm: float = 1.0,
        temperature: float = 1.0,
        basis_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if num_basis < 2:
            raise ValueError(f"num_basis must be at least 2, got {num_basis}.")
        if not clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, got {clip_norm}.")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}.")
        self.num_basis = num_basis
        self.temperature = temperature
        self.clip_norm = clip_norm
        self.basis_initializer = keras.initializers.get(basis_initializer)

    def build(self, input_shape: Any) -> None:
        """Make the basis vectors, as wide as the user embedding."""
        self.basis = self.add_weight(
            name="basis", shape=(self.num_basis, input_shape[-1]), initializer=self.basis_initializer
        )

    def call(self, users: Any) -> Any:
        """Clipped weights [..., B] of user embeddings [..., d]."""
        scale = self.temperature * math.sqrt(self.basis.shape[-1])
        scores = ops.matmul(users, ops.transpose(self.basis)) / scale
        weights = ops.softmax(scores, axis=-1)
        norms = ops.sqrt(ops.sum(ops.square(weights), axis=-1, keepdims=True))
        return weights * ops.minimum(1.0, self.clip_norm / norms)

    def reconstruct(self, weights: Any) -> Any:
        """The server's user embedding: the weighted sum of the basis vectors."""
        return ops.matmul(weights, self.basis)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """[..., B]."""
        return (*input_shape[:-1], self.num_basis)

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return super().get_config() | {
            "num_basis": self.num_basis,
            "clip_norm": self.clip_norm,
            "temperature": self.temperature,
            "basis_initializer": keras.initializers.serialize(self.basis_initializer),
        }
