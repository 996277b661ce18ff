"""Noise for variables that live on a parameter server, drawn there.

`EntropyNoise` keeps a generator as a variable: here it is one of the server's, whose key comes from the operating
system of that machine and never leaves it. `KeyedNoise` is a function of variable, row and step: here the server's
numbers are translated into those of the whole model, so that a sharded table gets the noise of an undivided one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp_rec.noise import EntropyNoise, KeyedNoise, NoiseSource, Request
from tfdp_rec.noise.system_words import system_numbers
from tfdp_rec.refused import NotPrivate


class ServerEntropy(EntropyNoise):
    """`EntropyNoise` with the generator on the server on whose device it is made."""

    def __init__(self, jit_compile: bool = True) -> None:
        super().__init__(jit_compile)
        state = tf.zeros([3], tf.int64)
        self._generator = tf.random.Generator.from_state(state, alg="philox")
        tf.function(self._seed, autograph=False)()

    def _seed(self) -> None:
        self._generator.state.assign(system_numbers(3))  # a Philox generator: counter, counter, key

    def _current_generator(self) -> tf.random.Generator:
        return self._generator

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("A server's noise belongs to its server and is not copied.")


class ServedNoise(NoiseSource):
    """A noise source for one server, which numbers variables and rows as the whole model does."""

    def __init__(self, source: NoiseSource, places: Sequence[tuple[int, int]]):
        self._source, self._places = source, tuple(places)

    def draw(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        return self._source.draw([self._translated(request) for request in requests], step)

    def _translated(self, request: Request) -> Request:
        number, first = self._places[request.variable]
        return dataclasses.replace(request, variable=number, rows=request.rows + first)


def source_on_server(noise: NoiseSource) -> Callable[[], NoiseSource]:
    """What makes a server's source on its device; a source that needs Python to draw is refused."""
    if type(noise) is EntropyNoise:
        return lambda: ServerEntropy(noise.jit_compile)
    if type(noise) is KeyedNoise:
        return lambda: noise
    raise NotPrivate(
        f"{type(noise).__name__} cannot draw on a parameter server: it would run Python there. Leave out noise= and "
        "secure=True; the servers' noise is keyed by their own operating systems."
    )
