"""Removal, ‖clipped sum(D) − clipped sum(D − x)‖ / C as computed, by batch size: `python -m experiments.removal`.

Models with kinks, curvature and cancelling positions, on batches of three kinds: ordinary ones, equal examples, and
terms that drift above a power of two. `--wide` prints another table: layers that add up many terms, whose kernels
depend on the number of rows, on examples that are rounding error alone. D − x has an empty row for x, or one row less.
Both tables stand in docs/privacy-floating-point.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfdp_rec.clipping import ClippedSum, Clipping, on_devices
from tfdp_rec.core.sensitivity.arithmetic import ask_for_float32_products
from tfdp_rec.core.sensitivity.engine import Graph

SIZES = (2, 3, 17, 4096, 16_384, 65_536)
TYPES = {
    "float32": ("float32", "float32"),
    "mixed_bfloat16": ("mixed_bfloat16", "mixed_bfloat16"),
    "float64 beside float32": ("float32", "float64"),
    "float64 beside mixed_bfloat16": ("mixed_bfloat16", "float64"),
}
BATCHES = ("ordinary", "equal", "drifting")
WIDE_SIZES = tuple(range(17, 290, 16))  # one row less is one vector of 16 rows less
WIDTHS = {
    False: ((512, 128), (768, 128), (800, 128), (1008, 128), (1280, 128), (1792, 128), (8192, 128)),
    True: ((512, 1024), (768, 1024), (800, 1024), (1024, 1024), (2048, 1024), (8192, 1024)),
}
"""Terms and the other width, for a backward and for a forward sum."""


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


class Wide(keras.Model):
    """Sums of many terms, whose result is rounding error: a gradient's (`terms` outputs), or that a ReLU is at."""

    def __init__(self, terms: int, width: int, kink: bool, dtype: str):
        super().__init__()
        inputs, outputs = (terms, width) if kink else (width, terms)
        self.kink = kink
        self.table = layers.Embedding(2, inputs, embeddings_initializer=keras.initializers.RandomNormal(0, 1, 1))
        self.hidden = layers.Dense(outputs, use_bias=False, dtype=dtype, activation="relu" if kink else None)
        self.hidden.trainable = kink
        self.hidden.build([None, inputs])
        kernel = np.random.default_rng(2).normal(size=[inputs, outputs])
        if kink:  # the first row of the table is orthogonal to all columns
            row = np.asarray(self.table(np.zeros(1, int)), np.float64)[0]
            kernel -= np.outer(row, row @ kernel) / (row @ row)
            self.table.trainable = False
        self.hidden.kernel.assign(kernel)
        self.weighed = np.random.default_rng(3).normal(size=outputs)
        if not kink:  # what the outputs are multiplied by is orthogonal to all rows
            exact = np.asarray(self.hidden.kernel, np.float64)
            self.weighed -= np.linalg.lstsq(exact, exact @ self.weighed, rcond=None)[0]

    def per_example_loss(self, data: dict[str, tf.Tensor]) -> tf.Tensor:
        """The outputs, multiplied and added up."""
        return tf.reduce_sum(tf.cast(self.hidden(self.table(data["ids"])), tf.float32) * data["a"], axis=1)

    def batch(self, size: int) -> dict[str, np.ndarray]:
        """Equal examples."""
        return {"ids": np.zeros(size, int), "a": np.tile((1e9 * self.weighed).astype("float32"), [size, 1])}


def sums_of(
    model: Any, batch: dict[str, np.ndarray], devices: Sequence[str] = ()
) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    """A batch -> the clipped sum of a model, C = 1, also as `devices` share it; `batch` is one to build it with."""
    model.per_example_loss(batch)
    clipping = Clipping(model, model.per_example_loss, tf.constant(1.0))
    graph = Graph(lambda batch: (on_devices(clipping, batch, devices) if devices else clipping.sum(batch), None))

    def summed(batch: dict[str, np.ndarray]) -> list[np.ndarray]:
        found: ClippedSum = graph(tf.nest.map_structure(tf.constant, batch))[0]
        return [_to_array(found.gradients[v.path], v.shape) for v in model.trainable_variables]

    return summed


def _to_array(gradient: Any, shape: tuple[int, ...]) -> np.ndarray:
    whole = np.zeros(shape)
    if isinstance(gradient, tf.IndexedSlices):
        whole[gradient.indices.numpy()] = gradient.values  # ids are distinct
        return whole
    return whole + gradient


def distance(several: list[np.ndarray], others: list[np.ndarray]) -> float:
    """Between two sums, over all variables."""
    return float(np.sqrt(sum(np.sum(np.square(a - b)) for a, b in zip(several, others))))


def removals(first: str, last: str, devices: Sequence[str] = ()) -> Callable[[dict[str, np.ndarray]], float]:
    """A batch -> how far its first example moves the sum of one model, in clips."""
    summed = sums_of(Two(first, last), batch_of("ordinary", 2, 0), devices)
    return lambda batch: distance(summed(batch), summed({name: v[1:] for name, v in batch.items()}))


def without_first(batch: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The batch with an empty row for its first example: one whose gradient is zero, or no number."""
    found = []
    for empty in (0.0, np.nan):
        a = batch["a"].copy()
        a[0] = empty
        found.append({**batch, "a": a})
    return found


def wide_removals(
    terms: int, width: int, kink: bool, dtype: str, sizes: Iterable[int] = WIDE_SIZES
) -> tuple[float, float, int]:
    """The largest removals found, in clips, with an empty row and with one row less, and the latter's batch size."""
    model = Wide(terms, width, kink, dtype)
    summed = sums_of(model, model.batch(2))
    empty, less = 0.0, (0.0, 0)
    for size in sizes:
        batch = model.batch(size)
        found = summed(batch)
        empty = max([empty, *(distance(found, summed(other)) for other in without_first(batch))])
        less = max(less, (distance(found, summed({name: v[1:] for name, v in batch.items()})), size))
    return empty, *less


def print_wide() -> None:
    """Prints the table of wide layers."""
    print("| sum | terms | other width | type | an empty row | one row less |\n|" + " --- |" * 6)
    for kink in (False, True):
        for terms, width in WIDTHS[kink]:
            for dtype in ("float32", "mixed_bfloat16"):
                empty, less, size = wide_removals(terms, width, kink, dtype)
                at = f" at {size}" if less > 1 else ""
                name = "forward, a ReLU" if kink else "backward"
                print(f"| {name} | {terms:,} | {width:,} | {dtype} | {empty:.4f} | {less:.4f}{at} |", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--tries", type=int, default=4, help="batches of each kind and size")
    parser.add_argument("--wide", action="store_true", help="the table of layers that add up many terms")
    parser.add_argument("--devices", nargs="*", default=[], help="names of devices that share each sum: CPU:0 CPU:0")
    arguments = parser.parse_args()
    ask_for_float32_products()
    if arguments.wide:
        print_wide()
        return
    tries = arguments.tries
    print("| types | " + " | ".join(f"B = {size:,}" for size in SIZES) + " |\n|" + " --- |" * (len(SIZES) + 1))
    for name, (first, last) in TYPES.items():
        removal = removals(first, last, arguments.devices)
        highest = [
            max(removal(batch_of(kind, size, seed)) for kind in BATCHES for seed in range(tries)) for size in SIZES
        ]
        print(f"| {name} | " + " | ".join(f"{found:.4f}" for found in highest) + " |", flush=True)


if __name__ == "__main__":
    main()
