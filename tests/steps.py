"""Programs drawn at random (`programs.py`) as losses of a whole private step, on batches that may not be what they say.

What a reading takes for granted of a batch is no claim about an operation, and no brute force over tensors meets it:
that each tensor has one row an example. So here the clipped sum itself is looked at, of batches one tensor of which has
another number of rows: it is refused, or one example moves it by no more than the clip says.
"""

import keras
import numpy as np
import tensorflow as tf
from programs import FAILURES, FAMILIES, ROW, WEIGHTS, Program, batch

import tfdp_rec
from tfdp_rec.clipping import clipped_sum

SIZE = 64
NAMES = ("x", "s", "ids", "wild", "bytes")
ROWS = {"as it should be": None, "one row": 1, "two rows": 2, "one row less": SIZE - 1, "no axis": ()}


class Weighed(tfdp_rec.PrivateTraining, keras.Model):
    """A dense layer of one weight, whose output is turned by the sign of what a program made, or was given.

    Args:
        program: the `Program`.
    """

    def __init__(self, program):
        super().__init__()
        self.program = program
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="dense")
        self.dense.build([None, 1])
        self.built = True

    def per_example_loss(self, data, training=True):
        given = [tf.constant(ROW), tf.constant(WEIGHTS), *(data[name] for name in NAMES)]
        made = self.program.made(given, (), tf.shape(data["one"])[0])
        numbers = [t for t in [*given[2:], *made] if t.dtype == tf.float64 and t.shape.rank is not None]
        numbers = numbers[-2]  # the last but one: what comes last is refused most often
        numbers = tf.reduce_sum(numbers, list(range(1, numbers.shape.rank)))
        return self.dense(data["one"])[:, 0] * tf.cast(tf.sign(tf.sin(37.0 * numbers)), tf.float32)


def given(rng, name, rows):
    """A batch, and the same with its first example exchanged; the tensor of that name has so many rows."""
    first, second = ([np.ones([SIZE, 1], "float32"), *batch(SIZE, rng)] for _ in range(2))
    both = []
    for arrays in (first, second):
        leaves = dict(zip(("one", *NAMES), arrays))
        if rows is not None:
            leaves[name] = leaves[name][0, 0] if rows == () else leaves[name][:rows]
        both.append(leaves)
    before, other = both
    after = {k: other[k] if np.ndim(v) == 0 else np.concatenate([other[k][:1], v[1:]]) for k, v in before.items()}
    return before, after


def moved(seed, family, odd):
    """By how many clips one example moves the clipped sum of a program; None where it is refused."""
    rng = np.random.default_rng(seed)
    model = Weighed(Program(seed, FAMILIES[family], 3))
    before, after = given(rng, NAMES[rng.integers(2)], ROWS[odd])
    try:
        sums = [clipped_sum(model, leaves, 1.0).gradients for leaves in (before, after)]
    except (*FAILURES, tfdp_rec.NotPrivate):
        return None
    return float(tf.norm(sums[0]["dense/kernel"] - sums[1]["dense/kernel"])) / 2.0  # exchanged: taken out and put in
