"""Where data and noise meet: a sum in float64, rounded once to a grid that is public.

    y = g ⌊(x + s z) / g⌉,    z ~ N(0, 1),    g = 2^(⌊log₂ s⌋ − 20)

In float32 data and noise give the data away: where the two nearly cancel, what is left is on a finer grid than the
noise, and its low bits are those of the data. Of 64 noisy weights some eight told with certainty whether an example was
there. Here z is a float64 made of 128 random bits: a step of g holds some 2³² values of s z, wherever x is, so that y
is a rounding of the Gaussian mechanism's output, which is post-processing. The grid adds 10⁻¹³ to the noise's variance.
Above 16 s, y is rounded once more, to float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import place_on_host

_BITS = 20  # from a standard deviation down to a step of its grid


@place_on_host
def grid_of(stddev: tf.Tensor) -> tf.Tensor:
    """The step of the grid for noise of a standard deviation, float64; 0, which stands for no grid, without noise."""
    size = tf.abs(tf.cast(stddev, tf.float64))
    place = tf.constant(52, tf.int64)  # of the exponent in a float64, whose power of two is exact so
    exponent = tf.bitwise.right_shift(tf.bitcast(size, tf.int64), place) - _BITS
    return tf.where(exponent > 0, tf.bitcast(tf.bitwise.left_shift(exponent, place), tf.float64), 0.0)


def on_grid(values: tf.Tensor, grid: tf.Tensor | None) -> tf.Tensor:
    """float64 values, rounded to the grid, as float32; as they are without one."""
    return values if grid is None else tf.cast(nearest(values, grid), tf.float32)


def nearest(values: tf.Tensor, grid: tf.Tensor | None) -> tf.Tensor:
    """The places of the grid that are nearest to float64 values, float64; the values themselves without one."""
    if grid is None:
        return values
    step = tf.where(grid > 0, grid, 1.0)
    # The step is a power of two, so that a product with its inverse is the quotient, for a tenth of the time.
    return tf.where(grid > 0, tf.round(values * (1.0 / step)) * step, values)


def add_on_grid(noise: tf.Tensor, onto: Sequence[tf.Tensor], grid: tf.Tensor | None) -> tf.Tensor:
    """The sum of noise and of what it is added to, on the grid; float64 without one."""
    return on_grid(tf.add_n([fine(noise), *(tf.cast(x, tf.float64) for x in onto)]), grid)


def within(rest: tf.Tensor, move: tf.Tensor, bound: tf.Tensor, reach: float = 1.0) -> tf.Tensor:
    """A move that takes no weight past ±bound, or further past it, from `rest` by `reach` times the move.

    A function of a number for each number, that changes no more than the move does: a sum's sensitivity stays.
    """
    least, most = tf.minimum(-bound - rest, 0.0), tf.maximum(bound - rest, 0.0)
    return tf.clip_by_value(move, *((least, most) if reach == 1 else (least / reach, most / reach)))


def addends(onto: Sequence[tf.Tensor], bound: tf.Tensor | None) -> Sequence[tf.Tensor]:
    """What is added to noise: weights and a move of them that keeps within a bound, if there is one."""
    return onto if bound is None else (onto[0], within(onto[0], onto[1], bound))


def fine(noise: tf.Tensor) -> tf.Tensor:
    """Noise in float64, or a `TypeError`: float32 has too few values for its sum with data to hide them."""
    if noise.dtype != tf.float64:
        raise TypeError(f"A noise source must give float64, got {noise.dtype.name}: its last bits would be the data's.")
    return noise
