"""The update that every mechanism makes, once: SGD with momentum or decoupled weight decay.

With u = ĝ + n the noisy gradient, η the learning rate, λ the weight decay, μ the momentum, a row moves by m = −η u:

    plain, decay    θ' = (1 − ηλ) θ + m
    momentum        v' = μ v + m,    θ' = θ + v'                   (Nesterov: θ' = θ + μ v' + m)

Each step is linear in what it adds, so that the steps a row did not make add up: see `lazy/pending.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

Scalar = Any  # a scalar tensor or a float


@dataclasses.dataclass(frozen=True)
class Recursion:
    """One step of SGD on rows of weights and velocities; momentum with decay is refused."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}.")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum above 0.")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}.")
        if self.momentum and self.weight_decay:
            raise ValueError(
                "momentum and weight_decay together have no exact lazy form; leave one at 0, or give the dense "
                "variables a dense_optimizer that has both."
            )

    @property
    def has_velocity(self) -> bool:
        """Whether a row has a velocity beside its weight."""
        return self.momentum > 0

    def state_width(self, width: int) -> int:
        """How many numbers a row of that width keeps beside its weights."""
        return width if self.has_velocity else 0

    def keep(self, learning_rate: Scalar) -> Scalar:
        """1 − ηλ: what a step leaves of a weight."""
        return 1.0 - learning_rate * self.weight_decay

    def step(
        self, weight: tf.Tensor, velocity: tf.Tensor | None, move: tf.Tensor, learning_rate: Scalar
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """The weight and velocity after a step that moves by `move` = −η(ĝ + n)."""
        if velocity is None:
            return (self.keep(learning_rate) * weight if self.weight_decay else weight) + move, None
        velocity = self.momentum * velocity + move
        if self.nesterov:
            return weight + self.momentum * velocity + move, velocity
        return weight + velocity, velocity
