"""What every noise source answers.

The unit Gaussians of some rows of one variable at one step:

  normal(variable, rows, step, width) -> float32 [len(rows), width]

and, for mechanisms that choose rows, 64 fair coin tosses for each of them:

  bits(variable, rows, step) -> uint64 [len(rows)]
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Request:
    """Gaussians for some rows of a variable: `scale` `[n, draws]` multiplies the unit ones, each draw of each row."""

    variable: int
    rows: tf.Tensor
    scale: tf.Tensor
    width: int


class NoiseSource(abc.ABC):
    """Where a mechanism's unit Gaussians come from.

    A source is a plain Python object: neither Keras nor TensorFlow tracks it, so none of its state reaches a
    saved file. Whoever held that state could subtract the noise.
    """

    @abc.abstractmethod
    def normal(self, variable: int, rows: tf.Tensor, step: tf.Tensor, width: int) -> tf.Tensor:
        """Independent unit Gaussians for some rows of one variable at one step.

        May be called eagerly, inside a tf.function and inside its loops.

        Args:
            variable: The variable's number within its optimizer.
            rows: int64 row numbers, shape [n]; n may be unknown and may be 0.
            step: int64 scalar, the step whose noise is drawn.
            width: How many values a row has, a Python integer.

        Returns:
            float32 tensor of shape [n, width].
        """

    def several(self, requests: Sequence[tuple[int, tf.Tensor, int]], step: tf.Tensor) -> list[tf.Tensor]:
        """What `normal` gives for each of several (variable, rows, width), where possible in one draw.

        Args:
            requests: variable, rows and width of each; the rows they name are distinct.
            step: int64 scalar, the step whose noise is drawn.
        """
        return [self.normal(variable, rows, step, width) for variable, rows, width in requests]

    def scaled(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        """Gaussians multiplied by the scales asked for, where possible in one draw.

        Args:
            requests: the rows they name are distinct.
            step: int64 scalar, the step whose noise is drawn.

        Returns:
            float32 tensors of shape [n, draws, width].
        """
        found = []
        for request in requests:
            draws = request.scale.shape[1]
            unit = self.normal(request.variable, request.rows, step, draws * request.width)
            found.append(tf.reshape(unit, [-1, draws, request.width]) * request.scale[:, :, None])
        return found

    def bits(self, variable: int, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """64 independent fair coin tosses for each row, for choices finer than a float32 Gaussian.

        Args:
            variable: A number that no variable of the optimizer has (selection uses negative ones).
            rows: int64 numbers, shape [n]; n may be unknown and may be 0.
            step: int64 scalar, the step whose tosses are drawn.

        Returns:
            uint64 tensor of shape [n].

        Raises:
            NotImplementedError: This source has Gaussians only.
        """
        raise NotImplementedError(f"{type(self).__name__} has no bits(), which selecting rows needs")
