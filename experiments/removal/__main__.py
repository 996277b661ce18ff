"""Removal, ‖clipped sum(D) − clipped sum(D − x)‖ / C as computed, by batch size: `python -m experiments.removal`.

Models with kinks, curvature and cancelling positions, on batches of three kinds: ordinary ones, equal examples, and
terms that drift above a power of two. The printed table stands in docs/privacy-floating-point.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfdp_rec.clipping import ClippedSum, Clipping
from tfdp_rec.clipping.engine import Graph

SIZES = (2, 3, 17, 4096, 16_384, 65_536)
TYPES = {
    "float32": ("float32", "float32"),
    "mixed_bfloat16": ("mixed_bfloat16", "mixed_bfloat16"),
    "float64 beside float32": ("float32", "float64"),
    "float64 beside mixed_bfloat16": ("mixed_bfloat16", "float64"),
}
BATCHES = ("ordinary", "equal", "drifting")


class Two(keras.Model):
    """A table and a ReLU of one type, the last layer of another; gradients are as large as `target`."""

    def __init__(self, first: str, last: str):
        super().__init__()
        self.table, self.hidden = layers.Embedding(7, 1, dtype=first), layers.Dense(8, activation="relu", dtype=first)
        self.out = layers.Dense(1, use_bias=False, dtype=last)

    def per_example_loss(self, data: dict[str, tf.Tensor]) -> tf.Tensor:
        """The weighted outputs of both."""
        row, out = self.table(data["ids"])[:, 0, 0], self.out(self.hidden(data["x"]))[:, 0]
        return tf.cast(data["a"], tf.float64) * tf.cast(row, tf.float64) + tf.cast(data["b"], tf.float64) * tf.cast(
            out, tf.float64
        )


def batch_of(kind: str, size: int, seed: int) -> dict[str, np.ndarray]:
    """A batch, whose first example is the one to be taken out."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=[size, 4])
    ids, a, b = rng.integers(0, 7, [size, 1]), rng.normal(size=size), rng.normal(size=size)
    if kind == "equal":
        ids[:], x[1:], a[1:], b[1:] = 0, x[0], rng.uniform(0.1, 0.9), 0.1
    if kind == "drifting":
        half = size // 2
        step = half * 0.5 * 2.0**-23
        ids[:], b[:], a[0] = 0, 1e-9, -0.25
        a[1 : half + 1], a[half + 1 :: 2], a[half + 2 :: 2] = 0.5, 0.6 * step, -0.4 * step
    return {"ids": ids, **{name: v.astype("float32") for name, v in (("x", x), ("a", a), ("b", b))}}


def removals(first: str, last: str) -> Callable[[dict[str, np.ndarray]], float]:
    """A batch -> how far its first example moves the sum of one model, in clips."""
    model = Two(first, last)
    model.per_example_loss(batch_of("ordinary", 2, 0))
    clipping = Clipping(model, model.per_example_loss, tf.constant(1.0))
    graph = Graph(lambda batch: (clipping.sum(batch), None))

    def summed(batch: dict[str, np.ndarray]) -> list[np.ndarray]:
        found: ClippedSum = graph(tf.nest.map_structure(tf.constant, batch))[0]
        gradients = [tf.convert_to_tensor(found.gradients[v.path]) for v in model.trainable_variables]
        return [np.asarray(gradient, np.float64) for gradient in gradients]

    def removal(batch: dict[str, np.ndarray]) -> float:
        pairs: Any = zip(summed(batch), summed({name: v[1:] for name, v in batch.items()}))
        return float(np.sqrt(sum(np.sum(np.square(a - b)) for a, b in pairs)))

    return removal


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--tries", type=int, default=4, help="batches of each kind and size")
    tries = parser.parse_args().tries
    print("| types | " + " | ".join(f"B = {size:,}" for size in SIZES) + " |\n|" + " --- |" * (len(SIZES) + 1))
    for name, (first, last) in TYPES.items():
        removal = removals(first, last)
        highest = [
            max(removal(batch_of(kind, size, seed)) for kind in BATCHES for seed in range(tries)) for size in SIZES
        ]
        print(f"| {name} | " + " | ".join(f"{found:.4f}" for found in highest) + " |", flush=True)


if __name__ == "__main__":
    main()
