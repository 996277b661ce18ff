"""Random words from the operating system's generator, as TensorFlow operations: on whichever machine they run.

A graph that runs on another machine cannot call Python there, and TensorFlow's own non-deterministic seed has 32 bits.
What a graph can do is read a file, and `/dev/urandom` is one: `TextLineDataset` reads it up to so many line ends. Each
word is the keyed hash (SipHash) of 8 such lines, some 2,000 random bytes; that they hold fewer than 8 has a chance
below 1e-16.
"""

from __future__ import annotations

import tensorflow as tf

_SOURCE = "/dev/urandom"
_LINES_A_WORD = 8
_BUFFER_BYTES = 1 << 14  # read at a time; TensorFlow's own choice would be 256 kB
_HASH_KEY = [0x746664705F726563, 0x656E74726F7079]  # any; the secret is in what is hashed


def system_words(count: int) -> tf.Tensor:
    """`count` uint32 words that cannot be repeated, drawn anew at every execution."""
    lines = count * _LINES_A_WORD
    source = tf.data.TextLineDataset(_SOURCE, buffer_size=_BUFFER_BYTES)
    read = source.batch(lines, drop_remainder=True).take(1).get_single_element()
    text = tf.strings.reduce_join(tf.reshape(read, [count, _LINES_A_WORD]), axis=1)
    return tf.cast(tf.strings.to_hash_bucket_strong(text, 2**32, key=_HASH_KEY), tf.uint32)


def system_numbers(count: int) -> tf.Tensor:
    """As `system_words`, two of them a number: int64 [count]."""
    return tf.bitcast(tf.reshape(system_words(2 * count), [count, 2]), tf.int64)
