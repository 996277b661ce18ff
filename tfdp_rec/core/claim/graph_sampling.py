"""True Poisson sampling as TensorFlow operations, for workers on other machines, which run no Python.

Unit i is in the batch if a coin of probability q, thrown for i = 0, 1, …, n − 1, shows heads. Between two heads there
are G tails, P(G ≥ k) = (1 − q)^k, so that with U uniform

    G = floor(ln U / ln(1 − q)),    units: the sums G_1, G_1 + 1 + G_2, G_1 + G_2 + 2 + G_3, …  below n

which costs as many numbers as the batch has units, not as the data has. U has 53 bits: the chance of being drawn is q
to within 2^-52. Its bits are Philox's, under a key from the operating system's entropy for every batch. That no draw
can be guessed from others then rests on Philox, for which no claim of secrecy is made
(docs/scaling-semantics.md); `batches` draws from the system's entropy itself (`secret_draws.py`), which a graph cannot
ask often enough.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfdp_rec.core.claim.names import iteration_name
from tfdp_rec.core.ground.system_words import system_numbers


def poisson_indices(num_units: int, probability: float) -> tf.Tensor:
    """A Poisson sample of range(num_units) in ascending order, perhaps empty, drawn anew at every execution."""
    mean = num_units * probability
    # More heads than this in n throws have a chance below 1e-30 (Bernstein); the loop below then draws more.
    block = min(num_units, math.ceil(mean + 12 * math.sqrt(mean) + 50)) + 1
    scale = 1.0 / math.log1p(-probability) if probability < 1 else 0.0
    key = system_numbers(2)

    def more(drawn: tf.Tensor, counter: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        seed = tf.stack([key[0], tf.bitwise.bitwise_xor(key[1], counter)])
        bits = tf.random.stateless_uniform([block], seed, minval=None, maxval=None, dtype=tf.uint64, alg="philox")
        uniform = (tf.cast(tf.bitwise.right_shift(bits, tf.constant(11, tf.uint64)), tf.float64) + 0.5) * 2.0**-53
        tails = tf.minimum(tf.floor(tf.math.log(uniform) * scale), float(num_units))
        before = tf.concat([tf.constant([-1], tf.int64), drawn], axis=0)[-1]
        return tf.concat([drawn, before + tf.cumsum(tf.cast(tails, tf.int64) + 1)], axis=0), counter + 1

    first = more(tf.zeros([0], tf.int64), tf.constant(0, tf.int64))
    shapes = (tf.TensorShape([None]), tf.TensorShape([]))
    drawn, _ = tf.while_loop(lambda drawn, _: drawn[-1] < num_units, more, first, shapes)
    return tf.boolean_mask(drawn, drawn < num_units)


def make_draws(num_units: int, probability: float) -> tf.data.Dataset:
    """Endless (iteration, number, indices): Poisson samples, with a new name for each iteration."""

    def draw(iteration: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return iteration, number, tf.ensure_shape(poisson_indices(num_units, probability), [None])

    def draws(iteration: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.counter().map(lambda number: draw(iteration, number))

    return tf.data.Dataset.from_tensors(0).map(lambda _: iteration_name(system_numbers(1)[0])).flat_map(draws)
