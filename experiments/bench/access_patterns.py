"""Which rows of a table are read: synthetic access patterns for measuring speed.

With V rows and u uniform on [0, 1), a popularity rank in 0 … V − 1 is drawn by inverting a distribution function:

    uniform      ⌊V u⌋
    Zipf(a)      ⌊x⌋ − 1 with x = (1 + u ((V + 1)^{1−a} − 1))^{1/(1−a)},  or (V + 1)^u for a = 1: density ∝ x^{−a}
    skew(h)      90% of the reads uniform on the first h V ranks, the others on the rest

and a rank becomes a row by r ↦ (k r + 1) mod V with k prime to V, so that popular rows do not lie side by side.

Everything is a few TensorFlow operations on all tables at once and a pure function of (seed, batch number), so batches
cost next to nothing, need no memory, and two contenders given the same seed read the same rows.

Reference:
    Lim et al., "LazyDP", ASPLOS 2024, §7.3 (90% of reads on 36%, 10% and 0.6% of the rows).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

HOT_READS = 0.9
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclasses.dataclass(frozen=True)
class AccessPattern:
    """A distribution over popularity ranks.

    Attributes:
        hot_rows: for a skew, the share of rows that get `HOT_READS` of the reads; 1 for none.
        exponent: of a Zipf distribution; 0 for uniform.

    Example:
        >>> AccessPattern.named("zipf-1.05")
        AccessPattern(hot_rows=1.0, exponent=1.05)
    """

    hot_rows: float = 1.0
    exponent: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.hot_rows <= 1:
            raise ValueError(f"hot_rows must be in (0, 1], got {self.hot_rows}.")
        if self.exponent < 0 or not math.isfinite(self.exponent):
            raise ValueError(f"exponent must be at least 0 and finite, got {self.exponent}.")
        if self.hot_rows < 1 and self.exponent:
            raise ValueError("Give hot_rows or exponent, not both.")

    @classmethod
    def named(cls, name: str) -> AccessPattern:
        """`uniform`, `skew-low`, `skew-medium`, `skew-high`, or `zipf-A` for exponent A.

        Raises:
            ValueError: for any other name.
        """
        if name in PATTERNS:
            return PATTERNS[name]
        if name.startswith("zipf-"):
            try:
                return cls(exponent=float(name.removeprefix("zipf-")))
            except ValueError as problem:
                raise ValueError(f"'{name}': {problem}.") from problem
        raise ValueError(f"pattern must be one of {', '.join(PATTERNS)} or zipf-A, got {name!r}.")

    def ranks(self, uniform: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Ranks from uniform numbers, float64 in and int64 out; `rows` broadcasts against `uniform`."""
        size = tf.cast(rows, tf.float64)
        if self.hot_rows < 1:
            hot = tf.maximum(tf.floor(size * self.hot_rows), 1.0)
            chosen = tf.where(
                uniform < HOT_READS,
                uniform / HOT_READS * hot,
                hot + (uniform - HOT_READS) / (1 - HOT_READS) * (size - hot),
            )
        elif self.exponent == 1:
            chosen = tf.pow(size + 1, uniform) - 1
        elif self.exponent:
            power = 1 - self.exponent
            chosen = tf.pow(1 + uniform * (tf.pow(size + 1, power) - 1), 1 / power) - 1
        else:
            chosen = uniform * size
        return tf.cast(tf.clip_by_value(tf.floor(chosen), 0.0, size - 1), tf.int64)


PATTERNS = {
    "uniform": AccessPattern(),
    "skew-low": AccessPattern(hot_rows=0.36),
    "skew-medium": AccessPattern(hot_rows=0.1),
    "skew-high": AccessPattern(hot_rows=0.006),
}


def scattering_factor(rows: int) -> int:
    """A number prime to `rows` near the golden section of it.

    Example:
        >>> scattering_factor(10), scattering_factor(1)
        (7, 1)
    """
    factor = max(1, round(rows * _GOLDEN))
    while math.gcd(factor, rows) != 1:
        factor += 1
    return factor


def table_ids(
    pattern: AccessPattern, table_sizes: Sequence[int], batch_size: int, pooling: int, seed: tf.Tensor
) -> tf.Tensor:
    """Row ids of one batch, `[batch_size, tables, pooling]` int32, a pure function of `seed` `[2]`.

    Raises:
        ValueError: for table sizes that are not positive or do not fit an int32.
    """
    if not table_sizes or min(table_sizes) < 1 or max(table_sizes) >= 2**31:
        raise ValueError(f"table_sizes must be within 1 and 2**31 - 1, got {list(table_sizes)}.")
    shape = [batch_size, len(table_sizes), pooling]
    rows = tf.constant(np.asarray(table_sizes)[None, :, None], tf.int64)
    uniform = tf.random.stateless_uniform(shape, seed, dtype=tf.float64)
    factors = tf.constant(np.asarray([scattering_factor(n) for n in table_sizes])[None, :, None], tf.int64)
    return tf.cast((pattern.ranks(uniform, rows) * factors + 1) % rows, tf.int32)


def click_batches(
    pattern: AccessPattern,
    table_sizes: Sequence[int],
    batch_size: int,
    pooling: int = 1,
    dense_features: int = 13,
    seed: int = 0,
) -> tf.data.Dataset:
    """An endless `tf.data` source of batches for `tfdp_rec.models.DLRM`: `({"dense", "ids"}, label)`.

    Args:
        pattern: which rows are read.
        table_sizes: rows of each table.
        batch_size: examples in a batch.
        pooling: ids in each bag; with 1, `ids` has no axis for them.
        dense_features: how many.
        seed: the same batches for the same seed.

    Example:
        >>> inputs, label = next(iter(click_batches(AccessPattern(), [10, 1000], batch_size=4)))
        >>> inputs["ids"].shape, label.shape
        (TensorShape([4, 2]), TensorShape([4, 1]))
    """

    def batch(number: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        keys = [tf.stack([tf.constant(3 * seed + i, tf.int64), number]) for i in range(3)]
        ids = table_ids(pattern, table_sizes, batch_size, pooling, keys[0])
        dense = tf.random.stateless_uniform([batch_size, dense_features], keys[1])
        label = tf.cast(tf.random.stateless_uniform([batch_size, 1], keys[2]) < 0.25, tf.float32)
        return {"dense": dense, "ids": ids[:, :, 0] if pooling == 1 else ids}, label

    return tf.data.Dataset.counter().map(batch)
