"""Philox4x32, the counter-based generator: 128 random bits as a function of a counter and a key.

A block of four 32-bit words (c0, c1, c2, c3) goes through ten rounds of

  c0' = hi(M1 c2) xor c1 xor k0,   c1' = lo(M1 c2),
  c2' = hi(M0 c0) xor c3 xor k1,   c3' = lo(M0 c0),

with the key (k0, k1) raised by a fixed pair (Weyl constants) from round to round; hi and lo are the halves
of a 64-bit product. Blocks do not depend on one another, so any number of them are computed side by side.
It passes the known batteries of statistical tests; it is not a cipher (see SecureNoise for one).

Reference:
    J. Salmon, M. Moraes, R. Dror and D. Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import tensorflow as tf

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]


def philox(counter: Words, key: tuple[tf.Tensor, tf.Tensor]) -> Words:
    """Four uint32 words of random bits for every counter (four words) under a key (two words)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    xor = tf.bitwise.bitwise_xor
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = xor(xor(high1, c1), k0), low1, xor(xor(high0, c3), k1), low0
        k0 += tf.constant(_KEY_STEPS[0], tf.uint32)
        k1 += tf.constant(_KEY_STEPS[1], tf.uint32)
    return c0, c1, c2, c3


def _product(word: tf.Tensor, multiplier: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The high and the low half of a 64-bit product."""
    product = tf.cast(word, tf.uint64) * tf.constant(multiplier, tf.uint64)
    high = tf.bitwise.right_shift(product, tf.constant(32, tf.uint64))
    return tf.cast(high, tf.uint32), tf.cast(product, tf.uint32)
