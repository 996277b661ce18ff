"""What every noise source answers.

Gaussians for some rows of some variables at one step, each row at the scale asked for:

    draw([Request(variable, rows, width, scale), …], step) -> float64 [rows, draws, width] for each request

or the sum of them and of what they hide, on a public grid (`meeting.py`):

    noisy([Request(variable, rows, width, scale, onto, grid), …], step) -> float32 [rows, width]

and, for mechanisms that choose rows, 64 fair coin tosses for each number:

    bits(variable, numbers, step) -> uint64 [numbers]

A mechanism asks for all that a step needs in one call, so that a source can draw it in one. Plain arrays that are
released once, outside a training (counts, a vocabulary), get theirs from `tfdp_rec.noise.release`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdp_rec.core.mechanism.noise.meeting import add_on_grid, addends, fine


@dataclasses.dataclass(frozen=True)
class Request:
    """Gaussians for some rows of one variable.

    Args:
        variable: Number of the variable within its optimizer.
        rows: Row numbers, int64 `[n]`, distinct; n may be unknown and may be 0.
        width: Number of values of a row.
        scale: Standard deviation of each draw of each row, `[n, draws]`; a scalar for one draw of this of every row;
            None for one draw of 1.
        onto: float32 tensors `[n, width]` that one draw is added to, for `noisy`.
        grid: Step of the grid that the sum is rounded to, float64, for `noisy`; None for a sum in float64, to be
            rounded to a grid later.
        bound: What the second of `onto`, a move, may not take the first, weights, past (`meeting.within`).
    """

    variable: int
    rows: tf.Tensor
    width: int
    scale: tf.Tensor | None = None
    onto: tuple[tf.Tensor, ...] = ()
    grid: tf.Tensor | None = None
    bound: tf.Tensor | None = None

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has a scale of its own."""
        return self.scale is not None and self.scale.shape.rank != 0

    @property
    def draws(self) -> int:
        """Gaussians a value."""
        return int(self.scale.shape[1]) if self.has_row_scales else 1  # type: ignore[union-attr]

    @property
    def addends(self) -> Sequence[tf.Tensor]:
        """What the draw is added to, within the bound."""
        return addends(self.onto, self.bound)

    def answer(self, unit: tf.Tensor) -> tf.Tensor:
        """Unit Gaussians, so many as were asked for, in any shape, as the answer to the request."""
        shaped = tf.reshape(fine(unit), [-1, self.draws, self.width])
        if self.scale is None:
            return shaped
        scale = tf.cast(self.scale, tf.float64)
        return shaped * (scale[:, :, None] if self.has_row_scales else scale)


class NoiseSource(abc.ABC):
    """Where a mechanism's Gaussians come from. A source of one's own has `draw`, and `bits` if rows are to be chosen.

    A source is a plain Python object: neither Keras nor TensorFlow tracks it, so none of its state reaches a saved
    file. Whoever held that state could subtract the noise.
    """

    secret = False
    """Whether the noise cannot be computed again; without that, ε is infinite. Every class says it for itself."""

    @abc.abstractmethod
    def draw(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        """Independent Gaussians for each request.

        May be called eagerly, inside a tf.function and inside its loops.

        Args:
            requests: One request for each variable.
            step: Step whose noise is drawn, an int64 scalar.

        Returns:
            float64 tensors `[n, draws, width]`, in the order of the requests.
        """

    def noisy(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        """What the requests' Gaussians hide, with them, on the requests' grids.

        Args:
            requests: One request for each variable, of one draw.
            step: Step whose noise is drawn, an int64 scalar.

        Returns:
            Tensors `[n, width]`, in the order of the requests: float32 on a grid, float64 without one.
        """
        pairs = zip(requests, self.draw(requests, step), strict=True)
        return [add_on_grid(noise[:, 0], request.addends, request.grid) for request, noise in pairs]

    def bits(self, variable: int, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """64 independent fair coin tosses for each row, for choices finer than a Gaussian.

        Args:
            variable: Number that no variable of the optimizer has (selection uses negative ones).
            rows: Numbers of the words, int64 `[n]`; n may be unknown and may be 0.
            step: Step whose tosses are drawn, an int64 scalar.

        Returns:
            uint64 tensor of shape [n].

        Raises:
            NotImplementedError: this source has Gaussians only.
        """
        raise NotImplementedError(f"{type(self).__name__} has no bits(), which selecting rows needs.")

    def normal(self, variable: int, rows: tf.Tensor, step: tf.Tensor, width: int) -> tf.Tensor:
        """`draw` for one variable at scale 1: unit Gaussians [n, width]."""
        return tf.squeeze(self.draw([Request(variable, rows, width)], step)[0], axis=1)
