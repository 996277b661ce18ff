"""Gaussians against attacks on floating-point samplers: AES bits, float64, a sum of four.

Two attacks on textbook samplers, two answers.

- A statistical generator can be predicted from enough of its output. Bits here are the key stream of
  AES-256 in counter mode; key and counter come from the operating system: to predict it is to break AES.
- A float sampler reaches few of the values near a given one, and not the same few when the true value moves: an
  observer of a noisy number can test which true value could have made it (Mironov 2012 for Laplace; Jin et al. 2022 for
  Gaussians and DP-SGD). The test inverts the sampler, one guess of its uniforms at a time. Here a value is

    z = (z1 + z2 + z3 + z4) / 2,   one coordinate of each of four Box-Muller pairs in float64,

  which is again N(0, 1); the four other coordinates give a second value. Both are two equations in eight
  uniforms, so that six must be guessed (Holohan and Braghin, n = 2, count 2^(3 * 53) trials for four uniforms
  where the textbook sampler needs one). Then the sum with the data is rounded to a public grid (`meeting.py`).

Reference:
    N. Holohan and S. Braghin, Secure random sampling in differential privacy, ESORICS 2021.
    I. Mironov, On significance of the least significant bits for differential privacy, CCS 2012.
    J. Jin, E. McMurtry, B. Rubinstein and O. Ohrimenko, Are we there yet? Timing and floating-point
    attacks on differential privacy systems, IEEE S&P 2022.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.core.ground.shared_graphs import SharedGraph
from tfdp_rec.core.mechanism.noise.base import NoiseSource, Request
from tfdp_rec.core.mechanism.noise.box_muller import gaussian_pairs

_TERMS = 4  # Gaussians in a sum
_WORDS = 2 * _TERMS  # uint64 words of random bits for a pair of sums
_CHUNK = 2**15  # pairs drawn at a time: 2 MB of random bits
_SMALL_CHUNK = 2**11
_AES_BLOCK = 16  # bytes


class SecureNoise(NoiseSource):
    """Unit Gaussians from AES-256-CTR, each half the sum of four in float64.

    - Keyed by os.urandom when first used, for each thread, and anew in a forked process.
    - A copy (copy, deepcopy, pickle) is a new source with its own key; the key is in no saved file.
    - Leaves the graph for Python (tf.numpy_function): on the CPU of this process, and a function that holds
      it cannot be exported. Noise never is.

    Example:
        >>> import tensorflow as tf
        >>> noise = SecureNoise()
        >>> noise.normal(0, tf.constant([4, 7], tf.int64), tf.constant(0, tf.int64), width=3).shape.as_list()
        [2, 3]
    """

    secret = True

    def __init__(self) -> None:
        optional("cryptography", "secure")  # now, before anything is paid for
        self._streams = threading.local()  # one for each thread: a cipher's context must not be shared

    @tf.autograph.experimental.do_not_convert
    def draw(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        del step  # every call draws anew
        return [request.answer(self._unit(request)) for request in requests]

    def _unit(self, request: Request) -> tf.Tensor:
        """Unit Gaussians, as many as the request needs, in one row."""
        count = tf.size(request.rows, out_type=tf.int64) * (request.draws * request.width)
        pairs = (count + 1) // 2
        chunk = tf.where(pairs > _SMALL_CHUNK, tf.constant(_CHUNK, tf.int64), _SMALL_CHUNK)
        chunks = tf.range(tf.maximum((pairs + chunk - 1) // chunk, 1))
        signature = tf.TensorSpec([None], tf.complex128)
        values = tf.map_fn(lambda _: self._pairs(chunk), chunks, fn_output_signature=signature)
        return tf.reshape(tf.bitcast(values, tf.float64), [-1])[:count]

    @tf.autograph.experimental.do_not_convert
    def bits(self, variable: int, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        del variable, step  # every call draws anew
        return tf.reshape(self._words(tf.size(rows, out_type=tf.int64)), tf.shape(rows))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def _pairs(self, count: tf.Tensor) -> tf.Tensor:
        """So many pairs of values, as complex numbers."""
        words = tf.reshape(self._words(_WORDS * count), [2, _TERMS, count])
        return tf.ensure_shape(_COMPILED(words), [None])

    def _words(self, count: tf.Tensor) -> tf.Tensor:
        """uint64 words of the key stream."""
        return tf.reshape(tf.numpy_function(self._key_stream, [count], tf.uint64), [count])

    def _key_stream(self, count: np.int64) -> np.ndarray:
        words = np.empty(int(count) + _AES_BLOCK // 8, np.uint64)  # the cipher wants room for one block more
        written = self._current_stream().update_into(bytes(8 * int(count)), words.data.cast("B"))
        if written != 8 * count:
            raise RuntimeError(f"the cipher wrote {written} bytes of {8 * count}.")
        return words[: int(count)]

    def _current_stream(self) -> Any:
        """This thread's key stream, made when first needed, and made anew in a forked process."""
        if getattr(self._streams, "process", None) != os.getpid():
            self._streams.stream, self._streams.process = _new_stream(), os.getpid()
        return self._streams.stream


def _new_stream() -> Any:
    """The key stream of AES-256 in counter mode under a fresh key, by encrypting zeros."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(os.urandom(16))).encryptor()


def _half_sums_of_four(words: tf.Tensor) -> tf.Tensor:
    """Pairs of N(0, 1) as complex numbers, each from four pairs: uint64 [2, 4, n] -> complex128 [n]."""
    real: Any = 0.0
    imaginary: Any = 0.0
    for term in range(_TERMS):
        first, second = gaussian_pairs((words[0, term], words[1, term]))
        real, imaginary = real + first, imaginary + second
    return tf.complex(0.5 * real, 0.5 * imaginary)


_COMPILED = SharedGraph(_half_sums_of_four, jit_compile=True)  # shared: XLA compiles a length once
