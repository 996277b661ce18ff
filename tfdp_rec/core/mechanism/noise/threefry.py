"""Threefry2x64, the counter-based generator: 128 random bits as a function of a counter and a key.

A block of two 64-bit words goes through twenty rounds of

  a' = a + b,   b' = rotated(b, r) xor a',

with rotations r that differ from round to round. Before the first round and after every fourth, two of the three key
words are added, and the number of these additions so far: the third word is the exclusive or of the others.

Blocks do not depend on one another, so any number of them are computed side by side. It passes the known batteries of
statistical tests. It is the cipher Threefish with fewer rounds and smaller blocks, and for this no claim of secrecy is
made (see SecureNoise for one). Its words are as long as the float64 numbers that are made of them, so that one loop
over vector registers has as many of both: with words of 32 bits a Gaussian takes a fifth longer.

Reference:
    J. Salmon, M. Moraes, R. Dror and D. Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import tensorflow as tf

ROUNDS = 20
_ROTATIONS = (16, 42, 12, 31, 16, 32, 24, 21)
_PARITY = 0x1BD11BDAA9FC1A22

Words = tuple[tf.Tensor, tf.Tensor]


def threefry(counter: Words, key: Words) -> Words:
    """Two uint64 words of random bits for every counter under a key."""
    xor = tf.bitwise.bitwise_xor
    keys = [*key, xor(xor(key[0], key[1]), tf.constant(_PARITY, tf.uint64))]
    first, second = (word + added for word, added in zip(counter, key, strict=True))
    for number in range(ROUNDS):
        first += second
        second = xor(_rotate(second, _ROTATIONS[number % len(_ROTATIONS)]), first)
        additions, at_this_round = divmod(number + 1, 4)
        if at_this_round == 0:
            first += keys[additions % 3]
            second += keys[(additions + 1) % 3] + tf.constant(additions, tf.uint64)
    return first, second


def _rotate(word: tf.Tensor, by: int) -> tf.Tensor:
    left = tf.bitwise.left_shift(word, tf.constant(by, tf.uint64))
    return tf.bitwise.bitwise_or(left, tf.bitwise.right_shift(word, tf.constant(64 - by, tf.uint64)))
