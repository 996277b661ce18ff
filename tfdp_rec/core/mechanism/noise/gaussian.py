"""Gaussians for training: keyed by the operating system, never repeatable, fast.

Each call draws a fresh Threefry key and counter block from a generator that os.urandom seeded, and computes

  pair i = BoxMuller(Threefry(counter = (i, block), key)),   i = 0, 1, ...

in one fused loop that XLA compiles; nothing but the result goes to memory. XLA compiles a program for every
length, so lengths are rounded up to a few (eight for each power of two, multiples of 16,384 below) and the
surplus is dropped: at most an eighth of the work for long calls.

What it costs is in docs/privacy-noise.md.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import HOST, place_on_host
from tfdp_rec.core.ground.shared_graphs import SharedGraph
from tfdp_rec.core.mechanism.noise.base import NoiseSource, Request
from tfdp_rec.core.mechanism.noise.box_muller import gaussian_pairs
from tfdp_rec.core.mechanism.noise.meeting import add_on_grid, addends
from tfdp_rec.core.mechanism.noise.threefry import threefry

_WORDS = 3  # of a key and of a counter block
_SMALLEST_BUCKET = 2**14  # pairs
_BUCKETS_PER_OCTAVE = 8
_LINE = 16  # float32 numbers in 64 bytes


class EntropyNoise(NoiseSource):
    """Unit Gaussians that no seed call repeats.

    - Seeded by os.urandom when it is made, and anew in a forked process that asks it for noise.
    - A copy (copy, deepcopy, pickle) is a new source with its own seed.
    - Its state is a variable that nothing tracks: no checkpoint, weights file or SavedModel holds it.

    Args:
        jit_compile: Whether XLA compiles the sampler. False gives numbers of the same distribution about twenty times
            slower, for platforms whose TensorFlow has no XLA.

    Example:
        >>> import tensorflow as tf
        >>> noise = EntropyNoise()
        >>> noise.normal(0, tf.constant([4, 7], tf.int64), tf.constant(0, tf.int64), width=3).shape.as_list()
        [2, 3]
    """

    secret = True

    def __init__(self, jit_compile: bool = True) -> None:
        self.jit_compile = jit_compile
        self._sample = _COMPILED if jit_compile else _sample
        self._noisy = _COMPILED_NOISY if jit_compile else _noisy
        self._noisy_rows = _COMPILED_ROWS if jit_compile else _ROWS
        self._generator, self._process = _new_generator(), os.getpid()

    @tf.autograph.experimental.do_not_convert
    def draw(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        del step  # every call draws anew; unit Gaussians are one row of numbers, whatever their shapes
        if not requests:
            return []
        sizes, total = _sizes(requests)
        pairs = self._sample(_bucket((total + 1) // 2), self._key())
        values = tf.reshape(tf.bitcast(pairs, tf.float64), [-1])[:total]
        parts = tf.split(values, sizes, num=len(requests))
        return [request.answer(part) for request, part in zip(requests, parts, strict=True)]

    @tf.autograph.experimental.do_not_convert
    def noisy(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        if any(r.grid is None or (r.has_row_scales and r.bound is not None) for r in requests):
            return super().noisy(requests, step)
        # Scaled, added up and rounded inside the sampler's loop: nothing but the answer goes to memory. Where all rows
        # have one scale, a request is a row of numbers, too; else the loop goes row by row, one width at a time.
        together: dict[Any, list[int]] = {}
        for place, request in enumerate(requests):
            own = (request.width, id(None)) if request.has_row_scales else (None, id(request.scale))
            alike = (*own, id(request.grid), id(request.bound), len(request.onto))
            together.setdefault(alike, []).append(place)
        found: dict[int, tf.Tensor] = {}
        for places in together.values():
            those = [requests[place] for place in places]
            found |= dict(zip(places, self._rows(those) if those[0].has_row_scales else self._sums(those), strict=True))
        return [found[place] for place in range(len(requests))]

    def _sums(self, requests: Sequence[Request]) -> list[tf.Tensor]:
        """Sums of one scale, grid and bound, in one draw."""
        sizes, total = _sizes(requests)
        # In rows of a cache line, if widths allow, whose parts TensorFlow does not copy.
        unit = math.gcd(_LINE, *(request.width for request in requests))
        with tf.device(HOST):
            pairs = _bucket((total + 1) // 2)
            left = 2 * tf.cast(pairs, tf.int64)[None] - total
            runs = tf.concat([sizes, left], axis=0) // unit
        rest = tf.fill(left, 0.0)
        flat = ([tf.reshape(x, [-1]) for x in each] for each in zip(*(r.onto for r in requests)))
        onto = [tf.concat([*each, rest], axis=0) for each in flat]
        scale, grid, bound = (getattr(requests[0], name) for name in ("scale", "grid", "bound"))
        numbers = (1.0 if scale is None else scale, grid, *([] if bound is None else [bound]))
        drawn = self._noisy(pairs, _join_words(self._key(), *numbers), onto)
        *parts, _ = tf.split(tf.reshape(tf.bitcast(drawn, tf.float32), [-1, unit]), runs, num=len(requests) + 1)
        return [tf.reshape(part, [-1, request.width]) for part, request in zip(parts, requests, strict=True)]

    def _rows(self, requests: Sequence[Request]) -> list[tf.Tensor]:
        """Sums of rows of one width, each row with its own scale, in one draw."""
        with tf.device(HOST):  # where it is known what rows owe
            scales = [tf.reshape(request.scale, [-1]) for request in requests]
            scale = tf.concat(scales, axis=0)
        onto = list(zip(*(request.onto for request in requests), strict=True))
        words = _join_words(self._key(), requests[0].grid)
        values = self._noisy_rows(requests[0].width, scale, words, onto)
        return tf.split(values, [tf.size(scale) for scale in scales]) if len(scales) > 1 else [values]

    @place_on_host
    def _key(self) -> tf.Tensor:
        # As `uniform_full_int`, in half as many operations: each table draws here.
        generator = self._current_generator()
        state = tf.bitcast(generator.skip(tf.constant(_WORDS, tf.uint64)), tf.uint64)
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[_WORDS], key=state[2:], counter=state[:2], alg=generator.algorithm, dtype=tf.uint64
        )

    @tf.autograph.experimental.do_not_convert
    def bits(self, variable: int, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        del variable, step  # every call draws anew
        return self._current_generator().uniform_full_int(tf.shape(rows), dtype=tf.uint64)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.jit_compile,)

    def _current_generator(self) -> tf.random.Generator:
        """The generator, made anew in a forked process."""
        if self._process != os.getpid():
            self._generator, self._process = _new_generator(), os.getpid()
        return self._generator


def _sizes(requests: Sequence[Request]) -> tuple[tf.Tensor, tf.Tensor]:
    """The number of Gaussians for each request, and their sum."""
    rows = [tf.size(request.rows, tf.int64) for request in requests]
    with tf.device(HOST):
        sizes = tf.stack([n * (request.draws * request.width) for n, request in zip(rows, requests, strict=True)])
        return sizes, tf.reduce_sum(sizes)


def _new_generator() -> tf.random.Generator:
    """A Philox generator whose counter and key are the operating system's entropy."""
    # TensorFlow's own from_non_deterministic_state has a seed of 32 bits. The generator is made with the source, not at
    # its first use: a tf.function in whose first call a variable is born is traced twice.
    with tf.init_scope(), tf.device(HOST):
        return tf.random.Generator.from_state(np.frombuffer(os.urandom(24), dtype=np.int64), alg="philox")


def _sample(pairs: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Pairs of unit Gaussians as complex numbers, a pure function of three words."""
    return tf.complex(*_pairs(pairs, key))


def _pairs(pairs: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return _PAIRS_OF(tf.bitcast(tf.range(pairs, dtype=tf.int64), tf.uint64), key)


def _pairs_of(index: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    block, *rest = tf.unstack(key, num=_WORDS)
    return gaussian_pairs(threefry((index, block), tuple(rest)))


@place_on_host
def _join_words(key: tf.Tensor, *numbers: Any) -> tf.Tensor:
    """A key and public numbers, which go to a GPU in one copy."""
    bits = tf.bitcast(tf.stack([tf.cast(each, tf.float64) for each in numbers]), tf.uint64)
    return tf.concat([key, bits], axis=0)


def _take_numbers(words: tf.Tensor) -> list[tf.Tensor]:
    return tf.unstack(tf.bitcast(words[_WORDS:], tf.float64), num=words.shape[0] - _WORDS)


def _noisy(pairs: tf.Tensor, words: tf.Tensor, onto: list[tf.Tensor]) -> tf.Tensor:
    """Pairs of sums, with noise of one scale, from a key, the scale, the grid and a bound, if there is one."""
    scale, grid, *bounds = _take_numbers(words)
    bound = tf.cast(bounds[0], tf.float32) if bounds else None
    halves = [tf.reshape(x, [pairs, 2]) for x in onto]
    sides = (addends([x[:, side] for x in halves], bound) for side in range(2))
    unit = _pairs(pairs, words[:_WORDS])
    return tf.complex(*(add_on_grid(scale * z, x, grid) for z, x in zip(unit, sides, strict=True)))


def _noisy_rows(pairs: int, scale: tf.Tensor, words: tf.Tensor, onto: list[tf.Tensor]) -> tf.Tensor:
    """So many pairs of sums a row, with noise of the row's scale, from a key and the grid."""
    rows, each, (grid,) = tf.size(scale), tf.cast(scale, tf.float64)[:, None], _take_numbers(words)
    halves = [tf.reshape(x, [rows, pairs, 2]) for x in onto]
    unit = [tf.reshape(z, [rows, pairs]) for z in _pairs(rows * pairs, words[:_WORDS])]
    return tf.complex(*(add_on_grid(each * z, [x[:, :, side] for x in halves], grid) for side, z in enumerate(unit)))


def _rows_by(sample: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Rows of some width, one for each scale, onto parts put together, by a sampler of pairs for so many rows."""

    def rows(
        width: int, scale: tf.Tensor, words: tf.Tensor, onto: Sequence[Sequence[tf.Tensor]]
    ) -> tf.Tensor:
        pairs = (width + 1) // 2
        with tf.device(HOST):
            total = tf.size(scale, tf.int64)
            left = -(-tf.cast(_bucket(tf.maximum(total, 1) * pairs), tf.int64) // pairs) - total
            scale, shape = tf.pad(scale, [[0, left]]), tf.stack([left, width])
            used = tf.stack([total, width])
        rest = tf.fill(shape, 0.0)
        padded = [tf.concat([*parts, rest], axis=0) for parts in onto]
        if width % 2:
            padded = [tf.pad(x, [[0, 0], [0, 1]]) for x in padded]
        drawn = sample(pairs, scale, words, padded)
        return tf.slice(tf.reshape(tf.bitcast(drawn, tf.float32), [-1, 2 * pairs]), tf.zeros([2], tf.int64), used)

    # A function of its own: each table draws here, and tracing all of this takes a while.
    return SharedGraph(rows, reduce_retracing=True)


def _bucket(pairs: tf.Tensor) -> tf.Tensor:
    """The smallest admitted length that holds so many pairs, int32."""
    octave = tf.math.log(tf.cast(tf.maximum(pairs, 1), tf.float64)) / np.log(2.0)
    unit = tf.cast(tf.pow(tf.constant(2.0, tf.float64), tf.floor(octave)), tf.int64) // _BUCKETS_PER_OCTAVE
    unit = tf.maximum(unit, _SMALLEST_BUCKET)
    return tf.cast(tf.maximum((pairs + unit - 1) // unit, 1) * unit, tf.int32)


# Shared, so that it is traced once, and XLA compiles a length once.
_WORD_SPECS = [tf.TensorSpec([None], tf.uint64), tf.TensorSpec([_WORDS], tf.uint64)]
_PAIRS_OF = SharedGraph(_pairs_of, input_signature=_WORD_SPECS)
_COMPILED = SharedGraph(_sample, jit_compile=True)
_COMPILED_NOISY = SharedGraph(_noisy, jit_compile=True)
_COMPILED_ROWS = _rows_by(SharedGraph(_noisy_rows, jit_compile=True))
_ROWS = _rows_by(_noisy_rows)
