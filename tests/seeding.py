"""Seeds for tests, which keep what was compiled."""

import random
from unittest import mock

import keras
import tensorflow as tf
from tensorflow.python.eager import context

tf.config.experimental.enable_tensor_float_32_execution(False)  # a GPU's products are compared with the processor's


def seed(number):
    """As `keras.utils.set_random_seed`, which also forgets all compiled functions of the process.

    Models that tests share would then be compiled anew in each test, half a second to a second each.
    """
    with mock.patch.object(tf.random, "set_seed", _seed_tensorflow):
        keras.utils.set_random_seed(number)


def _seed_tensorflow(number):
    context.context()._seed, context.context()._rng = number, random.Random(number)
