"""128 random bits to a pair of independent Gaussians (Box and Muller), accurate into both tails.

With U uniform on (0, 1) and A uniform on the circle,

  z = √(-2 ln U) (cos A, sin A) is N(0, I) in the plane.

Radius. U has 64 bits. Its distance w = min(U, 1 - U) to the nearer end keeps them in a float (floats are
dense near 0; near 1 they would lose the bits that make small radii). With y = U in the lower half and
y = 1 - w in the upper, y = 2^e (1 + f), 1/√(2) ≤ 1 + f < √(2),

  ln U = e ln 2 + ln(1 + f),   ln(1 + f) = f (1 - f/2 + f^2/3 - ...),   f = -w exactly where e = 0.

(A series in f / (2 + f) needs a third of the terms and a division, which costs more than they do.) The radius
ends at 9.5, which is √(2 * 65 ln 2).

Angle. One eighth of a turn to either side of the first axis is x in (-π/4, π/4), where Taylor's series are short; one
bit exchanges the two coordinates and one bit turns the pair round, which spreads the quarter over the circle.

Only additions, multiplications and one square root for each pair: a compiler fuses all of it into one loop
over vector registers.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfdp_rec.core.mechanism.noise.threefry import Words

RADIUS_BITS = 64


class _Format:
    """A floating-point format, and series as long as its last bit needs."""

    def __init__(self, dtype: tf.DType, integer: tf.DType, mantissa_bits: int, log: int, sine: int, cosine: int):
        self.dtype, self.integer, self.mantissa_bits = dtype, integer, mantissa_bits
        # ln(1 + f) / f in powers of f; sin(x) / x and cos(x) in powers of x^2.
        self.log = [(-1) ** k / (k + 1) for k in range(log)]
        self.sine = [(-1) ** k / math.factorial(2 * k + 1) for k in range(sine)]
        self.cosine = [(-1) ** k / math.factorial(2 * k) for k in range(cosine)]


_FORMATS = {
    tf.float32: _Format(tf.float32, tf.int32, 23, log=18, sine=5, cosine=6),
    tf.float64: _Format(tf.float64, tf.int64, 52, log=40, sine=9, cosine=10),
}


def gaussian_pairs(words: Words, dtype: tf.DType = tf.float32) -> tuple[tf.Tensor, tf.Tensor]:
    """Two independent Gaussians from four uint32 words: radius (high, low) and angle (high, low)."""
    form = _FORMATS[dtype]
    radius = tf.sqrt(-2.0 * _log_uniform(words[0], words[1], form))
    cosine, sine, swap, turn = _direction(words[2], words[3], form)
    radius = tf.where(turn, -radius, radius)
    return radius * tf.where(swap, sine, cosine), radius * tf.where(swap, cosine, sine)


def _log_uniform(high: tf.Tensor, low: tf.Tensor, form: _Format) -> tf.Tensor:
    """ln U; the first bit of high tells the half, the others and low the distance to the half's end."""
    upper_half = high >= _word(2**31)
    high = tf.where(upper_half, _word(2**32 - 1) - high, high)
    distance = tf.cast(high, form.dtype) * 2.0**-32 + (tf.cast(low, form.dtype) + 0.5) * 2.0**-64
    exponent, f = _exponent_and_fraction(tf.where(upper_half, 1.0 - distance, distance), form)
    f = tf.where(tf.equal(exponent, 0.0), -distance, f)  # only the upper half has values above 1/√(2)
    return exponent * math.log(2.0) + f * _polynomial(f, form.log)


def _exponent_and_fraction(x: tf.Tensor, form: _Format) -> tuple[tf.Tensor, tf.Tensor]:
    """e and f with x = 2^e (1 + f), 1/√(2) ≤ 1 + f < √(2), for x > 0, by integer arithmetic."""
    bits = tf.bitcast(x, form.integer)
    mantissa_bits = tf.constant(form.mantissa_bits, form.integer)
    root_half = tf.bitcast(tf.constant(math.sqrt(0.5), form.dtype), form.integer)
    exponent = tf.bitwise.right_shift(bits - root_half, mantissa_bits)
    mantissa = bits - tf.bitwise.left_shift(exponent, mantissa_bits)
    return tf.cast(exponent, form.dtype), tf.bitcast(mantissa, form.dtype) - 1.0


def _direction(high: tf.Tensor, low: tf.Tensor, form: _Format) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Cosine and sine of an angle within an eighth of a turn, and two bits: exchange them, turn round."""
    swap = high >= _word(2**31)
    turn = tf.bitwise.bitwise_and(high, _word(2**30)) > _word(0)
    position = tf.bitcast(tf.bitwise.bitwise_and(high, _word(2**30 - 1)), tf.int32) - tf.constant(2**29)
    fraction = (tf.cast(low, form.dtype) + 0.5) * 2.0**-32
    x = (tf.cast(position, form.dtype) + fraction) * (math.pi / 4 * 2.0**-29)
    return _polynomial(x * x, form.cosine), x * _polynomial(x * x, form.sine), swap, turn


def _polynomial(x: tf.Tensor, coefficients: list[float]) -> tf.Tensor:
    """c0 + c1 x + c2 x^2 + ... by Horner's rule."""
    value = coefficients[-1] * x + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        value = value * x + coefficient
    return value


def _word(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint32)
