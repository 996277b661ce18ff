"""Noise drawn on a server: that of the whole table's rows, under a key of the server's own."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_rec.distribute.parameter_server import ServedNoise, ServerEntropy, source_on_server
from tfdp_rec.noise import EntropyNoise, KeyedNoise, Request, SecureNoise
from tfdp_rec.refused import NotPrivate

ROWS, STEP = tf.constant([0, 5], tf.int64), tf.constant(3, tf.int64)


def test_a_shard_gets_the_noise_of_its_rows_in_the_whole_table():
    whole, scale = KeyedNoise(7), tf.constant([[0.5, 2.0], [1.0, 3.0]])
    served = ServedNoise(whole, [(4, 0), (2, 100)])  # the server's variable 1 is rows 100 and on of the model's 2
    found = served.draw([Request(1, ROWS, 3, scale), Request(0, ROWS, 2)], STEP)
    expected = whole.draw([Request(2, ROWS + 100, 3, scale), Request(4, ROWS, 2)], STEP)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_server_has_a_key_of_its_own():
    sources = [ServerEntropy(jit_compile=False) for _ in range(3)]
    draws = [source.normal(0, ROWS, STEP, 4).numpy() for source in sources for _ in range(2)]
    assert len({draw.tobytes() for draw in draws}) == 6


def test_what_cannot_draw_there_is_refused():
    keyed = KeyedNoise(1)
    assert source_on_server(keyed)() is keyed and isinstance(source_on_server(EntropyNoise(False))(), ServerEntropy)
    with pytest.raises(NotPrivate, match="SecureNoise cannot draw on a parameter server"):
        source_on_server(SecureNoise())
