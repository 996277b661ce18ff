"""Rows of several tables as one range of numbers, 0 .. V-1: the space in which rows are selected.

  table 0: 0 .. V_0 - 1,    table 1: V_0 .. V_0 + V_1 - 1,    and so on.

A space may hold all rows of its tables or only some chosen ones of each; rows outside it have the number -1. So a
mechanism that selects among all rows selects among chosen ones when given another space, and knows no difference.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf


class BucketSpace:
    """Numbers for the rows of some tables, or for the chosen ones among them."""

    def __init__(self, sizes: Mapping[str, int], chosen: Mapping[str, np.ndarray] | None = None):
        self.sizes = dict(sizes)
        self._chosen = None if chosen is None else _checked(self.sizes, chosen)
        counts = [
            len(self._chosen[path]) if self._chosen is not None else size for path, size in sizes.items()
        ]
        self._offsets = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        self.size: int = self._offsets[-1]

    def numbers(self, path: str, ids: tf.Tensor) -> tf.Tensor:
        """The numbers of some rows of a table, int64, -1 for rows outside the space."""
        ids, offset = tf.cast(ids, tf.int64), self._offset(path)
        if self._chosen is None:
            return tf.where((ids >= 0) & (ids < self.sizes[path]), offset + ids, -tf.ones_like(ids))
        rows = self._chosen[path]
        place = tf.searchsorted(rows, ids)
        inside = (tf.gather(tf.concat([rows, [-1]], axis=0), place) == ids) & (ids >= 0)
        return tf.where(inside, offset + tf.cast(place, tf.int64), -tf.ones_like(ids))

    def rows(self, buckets: tf.Tensor) -> dict[str, tf.Tensor]:
        """Table path -> its rows, ascending, among some distinct numbers of the space."""
        buckets = tf.sort(buckets)
        owner = tf.searchsorted(tf.constant(self._offsets[1:], tf.int64), buckets, side="right")
        parts = tf.dynamic_partition(buckets, owner, len(self.sizes))
        return {path: self._row(path, part) for path, part in zip(self.sizes, parts)}

    def all_rows(self, path: str) -> tf.Tensor:
        """All rows of a table that are in the space, ascending, int64."""
        return tf.range(self.sizes[path], dtype=tf.int64) if self._chosen is None else self._chosen[path]

    def _row(self, path: str, buckets: tf.Tensor) -> tf.Tensor:
        local = buckets - self._offset(path)
        return local if self._chosen is None else tf.gather(self._chosen[path], local)

    def _offset(self, path: str) -> int:
        return self._offsets[list(self.sizes).index(path)]


def _checked(sizes: Mapping[str, int], chosen: Mapping[str, np.ndarray]) -> dict[str, tf.Tensor]:
    """The chosen rows of each table, sorted."""
    if set(sizes) != set(chosen):
        raise ValueError(
            f"rows are chosen for the tables {sorted(chosen)}, but the model has {sorted(sizes)}."
        )
    result = {}
    for path, size in sizes.items():
        rows = np.unique(np.asarray(chosen[path], dtype=np.int64))
        if len(rows) != len(chosen[path]):
            raise ValueError(f"the rows chosen for '{path}' hold a row twice.")
        if len(rows) and (rows[0] < 0 or rows[-1] >= size):
            raise ValueError(f"the rows chosen for '{path}' must lie between 0 and {size - 1}.")
        with tf.init_scope():
            result[path] = tf.constant(rows)
    return result
