"""Threefry4x32, the counter-based generator: 128 random bits as a function of a counter and a key.

A block of four 32-bit words goes through twenty rounds. A round mixes its words two by two, (0, 1) and (2, 3) in even
rounds, (0, 3) and (2, 1) in odd ones:

  a' = a + b,   b' = rotated(b, r) xor a',

with rotations r that differ from round to round. Before the first round and after every fourth, four of the five key
words are added, and the number of these additions so far: the fifth word is the exclusive or of the others.

Blocks do not depend on one another, so any number of them are computed side by side. It passes the known batteries of
statistical tests. It is the cipher Threefish with fewer rounds and smaller words, and for this no claim of secrecy is
made (see SecureNoise for one). Philox, which multiplies, takes nearly twice as long in vectors of 512 bits, and a
quarter more in others.

Reference:
    J. Salmon, M. Moraes, R. Dror and D. Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import tensorflow as tf

ROUNDS = 20
_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))
_PARITY = 0x1BD11BDA

Words = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]


def threefry(counter: Words, key: Words) -> Words:
    """Four uint32 words of random bits for every counter under a key."""
    xor = tf.bitwise.bitwise_xor
    keys = [*key, xor(xor(xor(key[0], key[1]), xor(key[2], key[3])), tf.constant(_PARITY, tf.uint32))]
    words = [word + added for word, added in zip(counter, keys)]
    for number in range(ROUNDS):
        for a, b, by in zip((0, 2), (1, 3) if number % 2 == 0 else (3, 1), _ROTATIONS[number % len(_ROTATIONS)]):
            words[a] += words[b]
            words[b] = xor(_rotate(words[b], by), words[a])
        additions, at_this_round = divmod(number + 1, 4)
        if at_this_round == 0:
            words = [word + keys[(additions + place) % len(keys)] for place, word in enumerate(words)]
            words[3] += tf.constant(additions, tf.uint32)
    return words[0], words[1], words[2], words[3]


def _rotate(word: tf.Tensor, by: int) -> tf.Tensor:
    left = tf.bitwise.left_shift(word, tf.constant(by, tf.uint32))
    return tf.bitwise.bitwise_or(left, tf.bitwise.right_shift(word, tf.constant(32 - by, tf.uint32)))
