"""Gaussians for tests: a pure function of (seed, variable, row, step, column).

An eager and a lazy run that ask for the same row's noise of the same step get the same numbers, in whatever
order and company they ask, and can be compared number for number. The key of a row is

  h = mix(mix(mix(mix(0 + g seed) + g variable) + g step) + g row),

mix being the SplitMix64 finaliser, a bijection of 64-bit integers, and g its odd golden-ratio stride (without
it, the hashes of neighbouring numbers correlate visibly). Column c has mix(h + g c), whose upper 40 bits are
the radius and lower 24 the angle of a Gaussian

  √(-2 ln U) cos(2 π V),

in float64. The other Gaussian of the pair is not used: a column must not need its neighbour.

Reference:
    G. Steele, D. Lea and C. Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp_rec.core.mechanism.noise.base import NoiseSource, Request

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27)
_LAST_SHIFT = 31
_ANGLE_BITS = 24
_RADIUS_BITS = 64 - _ANGLE_BITS


class KeyedNoise(NoiseSource):
    """Unit Gaussians that can be repeated, for tests only: the seed suffices to subtract the noise.

    Args:
        seed: Any integer; it is taken modulo 2^64.

    Raises:
        TypeError: If the seed is not an integer.

    Example:
        >>> import tensorflow as tf
        >>> noise, step = KeyedNoise(7), tf.constant(3, tf.int64)
        >>> both = noise.normal(0, tf.constant([4, 9], tf.int64), step, width=2)
        >>> one = noise.normal(0, tf.constant([9], tf.int64), step, width=2)
        >>> bool(tf.reduce_all(both[1] == one[0]))
        True
    """

    def __init__(self, seed: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise TypeError(f"seed must be an integer, got {seed!r}.")
        self.seed = int(seed)

    @tf.autograph.experimental.do_not_convert
    def draw(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        return [request.answer(self._unit(request, step)) for request in requests]

    def _unit(self, request: Request, step: tf.Tensor) -> tf.Tensor:
        """A second draw of a row goes on where the columns of the first end."""
        row_keys = self.bits(request.variable, request.rows, step)
        columns = tf.range(1, request.draws * request.width + 1, dtype=tf.int64)
        bits = _hash(row_keys[:, None], columns[None, :])
        radius_bits = tf.cast(tf.bitwise.right_shift(bits, _long(_ANGLE_BITS)), tf.float64)
        angle_bits = tf.cast(tf.bitwise.bitwise_and(bits, _long(2**_ANGLE_BITS - 1)), tf.float64)
        radius = tf.sqrt(-2.0 * tf.math.log((radius_bits + 0.5) * 2.0**-_RADIUS_BITS))
        angle = (angle_bits + 0.5) * (2.0 * math.pi * 2.0**-_ANGLE_BITS)
        return radius * tf.cos(angle)

    @tf.autograph.experimental.do_not_convert
    def bits(self, variable: int, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        key = _hash(_long(0), _long(self.seed % 2**64))
        key = _hash(key, _long(int(variable) % 2**64))
        return _hash(_hash(key, step), rows)

    def __repr__(self) -> str:
        return f"KeyedNoise({self.seed})"


def _hash(key: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """The SplitMix64 finaliser of key + g number, as uint64 (arithmetic modulo 2^64)."""
    value = key + _long(_GOLDEN) * tf.cast(number, tf.uint64)
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=True):
        value = _fold(value, shift) * _long(multiplier)
    return _fold(value, _LAST_SHIFT)


def _fold(value: tf.Tensor, shift: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(value, tf.bitwise.right_shift(value, _long(shift)))


def _long(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
