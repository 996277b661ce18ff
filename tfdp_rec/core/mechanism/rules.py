"""The step of a row from its gradient with noise: SGD; and Adagrad and Adam, which are not linear.

With ĝ the clipped mean gradient, n its noise, u = ĝ + n, η the learning rate, λ the weight decay, μ the momentum:

    SGD         θ' = (1 − ηλ) θ − η u
    momentum    v' = μ v − η u,    θ' = θ + v'                   (Nesterov: θ' = θ + μ v' − η u)
    Adagrad     a' = a + mean(u²),                        θ' = θ − η u / (√a' + ε)            a: one number a row
                (by coordinate: a' = a + u², as many numbers as the row has)
    Adam        k' = k + 1,   m' = β₁ m + (1 − β₁) u,   v' = β₂ v + (1 − β₂) u²,
                θ' = θ − η m'/(1 − β₁^k') / (√(v'/(1 − β₂^k')) + ε)                           m, v, k: 2 width + 1

A step of SGD is linear in u, so that the steps a row did not make add up: see `lazy/pending.py`. Adagrad and Adam are
not: noise that comes late cannot be added up, so that lazy mechanisms take neither.

Guarantee: what a mechanism guarantees holds unchanged. A rule sees a row's noisy gradient and what it made of earlier
ones, and nothing else; a row without an update keeps weight and state bit for bit (k counts a row's own updates).

Reference:
    Duchi et al., "Adaptive subgradient methods for online learning and stochastic optimization", 2011.
    Kingma and Ba, "Adam: a method for stochastic optimization", 2015.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.refused import refuse_no_number

Scalar = Any  # a scalar tensor or a float
Rows = tuple[tf.Tensor, ...]
"""Weights of some rows `[n, width]`, what the rule keeps of them `[n, state_width]`, if anything, and buffers."""


@dataclasses.dataclass(frozen=True)
class Recursion:
    """One step of SGD on rows of weights and velocities; momentum with decay is refused."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        refuse_no_number("momentum", self.momentum)
        refuse_no_number("weight_decay", self.weight_decay)
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

    @property
    def is_plain(self) -> bool:
        """Whether a step adds to a weight and does nothing else."""
        return not self.momentum and not self.weight_decay

    def state_width(self, width: int) -> int:
        """Number of values that a row of that width has beside its weights."""
        return width if self.has_velocity else 0

    def keep(self, learning_rate: Scalar) -> Scalar:
        """1 − ηλ: what a step leaves of a weight."""
        return 1.0 - learning_rate * self.weight_decay

    @property
    def reach(self) -> float:
        """How far a move takes a weight in the end, in units of the move."""
        return 1.0 / (1.0 - self.momentum)

    def rest(self, rows: Rows, learning_rate: Scalar) -> tf.Tensor:
        """Where weights end without a further move."""
        if not self.has_velocity:
            return self.keep(learning_rate) * rows[0] if self.weight_decay else rows[0]
        carried = self.momentum**2 if self.nesterov else self.momentum
        return rows[0] + carried * self.reach * rows[1]

    def step(self, rows: Rows, move: tf.Tensor, learning_rate: Scalar) -> Rows:
        """Weight, and velocity if there is one, after a step that moves by `move` = −η u."""
        weight = rows[0]
        if not self.has_velocity:
            return ((self.keep(learning_rate) * weight if self.weight_decay else weight) + move,)
        velocity = self.momentum * rows[1] + move
        return weight + (self.momentum * velocity + move if self.nesterov else velocity), velocity


class TableRule(abc.ABC):
    """A step of rows from their noisy gradients and their own state, `[n, state_width]`, zero at first."""

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]  # all of them are dataclasses

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TableRule:
        """Makes the same again."""
        return cls(**config)

    @abc.abstractmethod
    def state_width(self, width: int) -> int:
        """Number of state values of a row of that width."""

    @abc.abstractmethod
    def direction(self, gradient: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The direction that η multiplies, and the new state, from u `[n, width]` and the old state."""

    def step(self, rows: Rows, move: tf.Tensor, learning_rate: Scalar) -> Rows:
        """Weight and state after a step; `move` is −u, since η comes last."""
        direction, state = self.direction(-move, rows[1])
        return rows[0] - learning_rate * direction, state


@keras.saving.register_keras_serializable(package="tfdp_rec")
@dataclasses.dataclass(frozen=True)
class Adagrad(TableRule):
    """Divides a row's step by the root of what its squared gradients add up to.

    Args:
        rowwise: Whether a row has one sum, as large tables are trained elsewhere; False for one sum a coordinate.
        initial: Start of the sum, in squares of u = (clipped sum + noise) / B.
        epsilon: Number added to the root.

    Raises:
        ValueError: `initial` is negative or `epsilon` is not positive.

    Example:
        >>> Adagrad().state_width(128), Adagrad(rowwise=False).state_width(128)
        (1, 128)
    """

    rowwise: bool = True
    initial: float = 0.0
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        if self.initial < 0:
            raise ValueError(f"initial must not be negative, got {self.initial}.")
        _refuse_epsilon(self.epsilon)

    def state_width(self, width: int) -> int:
        return 1 if self.rowwise else width

    def direction(self, gradient: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        squares = tf.square(gradient)
        state += tf.reduce_mean(squares, axis=1, keepdims=True) if self.rowwise else squares
        return gradient / (tf.sqrt(self.initial + state) + self.epsilon), state


@keras.saving.register_keras_serializable(package="tfdp_rec")
@dataclasses.dataclass(frozen=True)
class Adam(TableRule):
    """Running means of a row's gradients and of their squares, both freed of their start at 0.

    Args:
        beta_1: Decay β₁ of the mean.
        beta_2: Decay β₂ of the mean square.
        epsilon: Number added to the root.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> Adam().state_width(128)
        257
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        for name, value in (("beta_1", self.beta_1), ("beta_2", self.beta_2)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value}.")
        _refuse_epsilon(self.epsilon)

    def state_width(self, width: int) -> int:
        return 2 * width + 1

    def direction(self, gradient: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        width = gradient.shape[1]
        mean, square, count = tf.split(state, [width, width, 1], axis=1)
        mean = self.beta_1 * mean + (1 - self.beta_1) * gradient
        square = self.beta_2 * square + (1 - self.beta_2) * tf.square(gradient)
        count += 1
        direction = mean / (1 - self.beta_1**count)
        direction /= tf.sqrt(square / (1 - self.beta_2**count)) + self.epsilon
        return direction, tf.concat([mean, square, count], axis=1)


def _refuse_epsilon(value: float) -> None:
    if value <= 0:
        raise ValueError(f"epsilon must be positive, got {value}: a row's first gradients may be 0.")
