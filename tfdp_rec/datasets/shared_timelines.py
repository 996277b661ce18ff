"""Next-item examples for the workers of a cluster, which run no Python: the timelines in files, the rest in TensorFlow.

The same examples as `NextItemExamples` gives: a movie of the timeline as label, uniform among all but the first, the
`history` before it as context; negatives uniform from the catalogue, without repetition, shared by the batch.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.files import open_atomically
from tfdp_rec.datasets.log import PADDING
from tfdp_rec.datasets.next_item import NextItemExamples

_FILES = {"movies": tf.int32, "starts": tf.int64, "lengths": tf.int64}


class SharedTimelines:
    """The timelines of some examples, in files that every worker can read, and their owner alone."""

    def __init__(self, examples: NextItemExamples, folder: str | pathlib.Path):
        self.folder = pathlib.Path(folder).absolute()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.history, self.negatives = examples.history, examples.negatives
        self.num_movies = examples.num_items
        if examples.every_place:
            raise ValueError("Workers of a cluster draw one label a user: make the examples without every_place=True.")
        if not examples.ordered:
            raise ValueError("Workers of a cluster predict what comes next: read the log with time=.")
        held = {"movies": examples.items, "starts": examples.starts, "lengths": examples.lengths}
        for name, values in held.items():
            with open_atomically(self.folder / name, "wb", private=True) as file:
                np.ascontiguousarray(values, _FILES[name].as_numpy_dtype).tofile(file)

    def batches(self, sampling: Any) -> tf.data.Dataset:
        """An endless dataset of Poisson batches, for `ParameterServerTrainer`'s `dataset_fn`."""
        held = {name: tf.io.decode_raw(tf.io.read_file(str(self.folder / name)), kind) for name, kind in _FILES.items()}

        def fetch(indices: tf.Tensor) -> dict[str, tf.Tensor]:
            lengths = tf.gather(held["lengths"], indices)
            # Any place but the first; a single item is the label, without context, and no item is label 0.
            first = tf.cast(lengths > 1, tf.int64)
            share = tf.random.uniform(tf.shape(indices), dtype=tf.float64)
            positions = first + tf.cast(share * tf.cast(lengths - first, tf.float64), tf.int64)
            return self._examples(held, indices, tf.clip_by_value(positions, 0, tf.maximum(lengths - 1, 0)))

        shared = (lambda: {"negatives": self._draw_negatives()}) if self.negatives else None
        return sampling.graph_batches(fetch, shared=shared, present=lambda i: tf.gather(held["lengths"], i) > 0)

    def _examples(self, held: dict[str, tf.Tensor], indices: tf.Tensor, positions: tf.Tensor) -> dict[str, tf.Tensor]:
        """Labels at these places of the timelines, with what comes before."""
        movies, labels = held["movies"], tf.gather(held["starts"], indices) + positions
        labels = tf.clip_by_value(labels, 0, tf.size(movies, tf.int64) - 1)
        counts = tf.minimum(positions, self.history)[:, None]
        columns = tf.range(self.history, dtype=tf.int64)
        places = tf.minimum(labels[:, None] - counts + columns, tf.size(movies, tf.int64) - 1)
        context = tf.where(columns < counts, tf.gather(movies, places), PADDING)
        has = tf.gather(held["lengths"], indices) > 0
        return {"context": context, "label": tf.where(has, tf.gather(movies, labels), PADDING)}

    def _draw_negatives(self) -> tf.Tensor:
        """The places of the largest of as many uniform numbers as there are movies."""
        drawn = tf.math.top_k(tf.random.uniform([self.num_movies]), self.negatives, sorted=False).indices
        return drawn + 1
