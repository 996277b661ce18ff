"""128 random bits to a pair of independent Gaussians (Box and Muller), accurate into both tails.

With U uniform on (0, 1) and A uniform on the circle,

  z = √(-2 ln U) (cos A, sin A) is N(0, I) in the plane.

Radius. U has 64 bits. Its distance w = min(U, 1 - U) to the nearer end keeps them in a float (floats are
dense near 0; near 1 they would lose the bits that make small radii). With y = U in the lower half and
y = 1 - w in the upper, y = 2^e (1 + f), 2/3 ≤ 1 + f < 4/3,

  ln U = e ln 2 + ln(1 + f),   ln(1 + f) = f (1 - f/2 + f^2/3 - ...),   f = -w exactly where e = 0.

Its series is shortened to the degree that a float64 needs (`_shorten`). The radius ends at 9.5, which is
√(2 * 65 ln 2).

Angle. One eighth of a turn to either side of the first axis is x in (-π/4, π/4), where the series are short; one
bit exchanges the two coordinates and one bit turns the pair round, which spreads the quarter over the circle.

Only additions, multiplications and one square root for each pair: a compiler fuses all of it into one loop
over vector registers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import tensorflow as tf

from tfdp_rec.core.mechanism.noise.threefry import Words

RADIUS_BITS = 64
_MANTISSA_BITS = 52
_LEAST = 2 / 3  # of 1 + f


def gaussian_pairs(words: Words) -> tuple[tf.Tensor, tf.Tensor]:
    """Two independent Gaussians, float64, from two uint64 words: radius and angle."""
    radius = tf.sqrt(-2.0 * _log_uniform(words[0]))
    cosine, sine, swap, turn = _direction(words[1])
    radius = tf.where(turn, -radius, radius)
    return radius * tf.where(swap, sine, cosine), radius * tf.where(swap, cosine, sine)


def _log_uniform(word: tf.Tensor) -> tf.Tensor:
    """ln U; the first bit tells the half, the others the distance to the half's end."""
    upper_half = word >= _word(2**63)
    word = tf.where(upper_half, _word(2**64 - 1) - word, word)
    distance = (tf.cast(word, tf.float64) + 0.5) * 2.0**-64
    exponent, f = _exponent_and_fraction(tf.where(upper_half, 1.0 - distance, distance))
    f = tf.where(tf.equal(exponent, 0.0), -distance, f)  # only the upper half has values above 2/3
    return exponent * math.log(2.0) + f * _polynomial(f, _LOG)


def _exponent_and_fraction(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """e and f with x = 2^e (1 + f), 2/3 ≤ 1 + f < 4/3, for x > 0, by integer arithmetic."""
    bits, place = tf.bitcast(x, tf.int64), tf.constant(_MANTISSA_BITS, tf.int64)
    exponent = tf.bitwise.right_shift(bits - tf.bitcast(tf.constant(_LEAST, tf.float64), tf.int64), place)
    mantissa = bits - tf.bitwise.left_shift(exponent, place)
    return tf.cast(exponent, tf.float64), tf.bitcast(mantissa, tf.float64) - 1.0


def _direction(word: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Cosine and sine of an angle within an eighth of a turn, and two bits: exchange them, turn round."""
    swap = word >= _word(2**63)
    turn = tf.bitwise.bitwise_and(word, _word(2**62)) > _word(0)
    position = tf.bitcast(tf.bitwise.bitwise_and(word, _word(2**62 - 1)), tf.int64) - tf.constant(2**61, tf.int64)
    x = (tf.cast(position, tf.float64) + 0.5) * (math.pi / 4 * 2.0**-61)
    return _polynomial(x * x, _COSINE), x * _polynomial(x * x, _SINE), swap, turn


def _polynomial(x: tf.Tensor, coefficients: Sequence[float]) -> tf.Tensor:
    """c0 + c1 x + c2 x^2 + ..., its even and its odd powers apart: a long chain of products would wait for itself."""
    if len(coefficients) > _CHAIN:
        square = x * x
        return _polynomial(square, coefficients[::2]) + x * _polynomial(square, coefficients[1::2])
    value = coefficients[-1] * x + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        value = value * x + coefficient
    return value


_CHAIN = 6


def _shorten(series: Sequence[Fraction], reach: Fraction, terms: int) -> list[float]:
    """A power series cut to some terms, whose largest error on (-reach, reach) is about the least for so many."""
    # The highest power is exchanged for lower ones by Chebyshev's polynomial of its degree, over and over (Lanczos).
    left = [c * reach**power for power, c in enumerate(series)]
    chebyshev = [[1], [0, 1]]
    while len(chebyshev) < len(left):
        doubled = [0, *(2 * c for c in chebyshev[-1])]
        chebyshev.append([a - b for a, b in zip(doubled, [*chebyshev[-2], 0, 0], strict=True)])
    while len(left) > terms:
        most = chebyshev[len(left) - 1]
        left = [c - left[-1] / most[-1] * t for c, t in zip(left, most, strict=True)][:-1]
    return [float(c / reach**power) for power, c in enumerate(left)]


def _shorten_circular(first: int, terms: int) -> list[float]:
    """cos(x) (`first` = 0) or sin(x) / x (1) in powers of x^2, an eighth of a turn to either side."""
    series = [Fraction((-1) ** (k // 2) * (k % 2 == 0), math.factorial(k + first)) for k in range(30)]
    return _shorten(series, Fraction(math.pi / 4), 2 * terms - 1)[::2]


# ln(1 + f) / f in powers of f. So many terms that what is cut off is about a float64's rounding.
_LOG = _shorten([Fraction((-1) ** k, k + 1) for k in range(48)], Fraction(1, 3), 21)
_SINE, _COSINE = _shorten_circular(1, 7), _shorten_circular(0, 8)


def _word(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
