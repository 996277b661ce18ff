"""Rows chosen once, before training: the private top k of each table, or rows that are public knowledge.

Every example adds its contribution map, clipped to L2 norm C1 (`draws.contribution_counts`), to a histogram over
all rows of all tables. The histogram gets N(0, (s0 C1)^2) on *every* row, and the k largest of each table are kept:

  one Gaussian event with noise multiplier s0, not sampled, paid once.

The noisy histograms of disjoint sets of examples (days, say) cost one such event in all, since an example is in one
of them only; sums of them are post-processing. `noisy_frequencies` of each day, added up, is therefore how a choice
may follow a stream.

Reference:
    B. Ghazi et al., Sparsity-Preserving Differentially Private Training of Large Embedding Models, NeurIPS 2023
    (DP-FEST).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.noise import EntropyNoise, NoiseSource
from tfdp_rec.optimizers.sparse import draws

Frequencies = dict[str, np.ndarray]
_ROWS_AT_A_TIME = 1 << 20


@keras.saving.register_keras_serializable(package="tfdp_rec")
class Preselection:
    """Rows that training is confined to.

    Args:
        rows: Table path (`variable.path`) -> the chosen rows, distinct.
        noise_multiplier: s0 of the private choice that gave them; None if they are public knowledge.

    Raises:
        ValueError: for a noise multiplier that is not positive.

    Example:
        >>> Preselection({"items/embeddings": [3, 1, 4]}, noise_multiplier=20.0).dp_event()
        GaussianDpEvent(noise_multiplier=20.0)
    """

    def __init__(self, rows: Mapping[str, Any], *, noise_multiplier: float | None = None):
        if noise_multiplier is not None and not 0.0 < noise_multiplier < np.inf:
            raise ValueError(f"noise_multiplier must be positive, or None for public rows; got {noise_multiplier!r}.")
        self.rows = {path: np.asarray(chosen, dtype=np.int64).reshape(-1) for path, chosen in rows.items()}
        self.noise_multiplier = noise_multiplier

    @classmethod
    def from_frequencies(
        cls,
        frequencies: Mapping[str, np.ndarray],
        num_rows: int | Mapping[str, int],
        *,
        noise_multiplier: float | None,
    ) -> Preselection:
        """The most frequent rows of each table.

        Args:
            frequencies: Table path -> a number for each of its rows: public ones, or `noisy_frequencies`.
            num_rows: Number of rows to keep of each table, or table path -> number; a smaller table is kept whole.
            noise_multiplier: Noise multiplier s0 of the frequencies; None if they are public.
        """
        rows = {}
        for path, counts in frequencies.items():
            kept = min(num_rows if isinstance(num_rows, int) else num_rows[path], len(counts))
            if kept < 0:
                raise ValueError(f"num_rows must not be negative, got {kept} for '{path}'.")
            rows[path] = np.sort(np.argpartition(-counts, kept - 1)[:kept]) if kept else np.zeros(0, np.int64)
        return cls(rows, noise_multiplier=noise_multiplier)

    def dp_event(self) -> dp_accounting.DpEvent:
        """Event of the choice, which is paid for once, for `Accountant.spend`."""
        if self.noise_multiplier is None:
            return dp_accounting.NoOpDpEvent()
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    @property
    def label(self) -> str:
        """Label of the choice in accounts; two different choices have two labels."""
        digest = hashlib.sha256()
        for path in sorted(self.rows):
            digest.update(path.encode() + b"\0" + np.sort(self.rows[path]).tobytes())
        return f"pre-selection of {sum(map(len, self.rows.values()))} rows ({digest.hexdigest()[:8]})"

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        rows = {path: chosen.tolist() for path, chosen in self.rows.items()}
        return {"rows": rows, "noise_multiplier": self.noise_multiplier}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Preselection:
        """Rebuilds a choice from `get_config`."""
        return cls(**config)


def noisy_frequencies(
    batches: Iterable[Mapping[str, np.ndarray]],
    sizes: Mapping[str, int],
    *,
    noise_multiplier: float,
    contribution_clip: float = 1.0,
    noise: NoiseSource | None = None,
) -> Frequencies:
    """How often examples read each row, clipped by example, with Gaussian noise on every row.

    Args:
        batches: Table path -> ids [examples, reads] or [examples]; negative ids are padding. An example must be in
            one batch only.
        sizes: Table path -> number of its rows.
        noise_multiplier: Noise multiplier s0 of the frequencies.
        contribution_clip: Bound C1 on the L2 norm of what an example adds.
        noise: A noise source, for tests.

    Returns:
        Table path -> float32 [rows].

    Raises:
        ValueError: a noise multiplier or clip that is not positive; an id beyond its table.

    Example:
        >>> counts = noisy_frequencies([{"a": np.array([2, 2, 0])}], {"a": 4}, noise_multiplier=1e-6)
        >>> counts["a"].round(3).tolist()
        [1.0, 0.0, 2.0, 0.0]
    """
    for name, value in {"noise_multiplier": noise_multiplier, "contribution_clip": contribution_clip}.items():
        if not 0.0 < value < np.inf:
            raise ValueError(f"{name} must be positive, got {value!r}.")
    counts = _clipped_histogram(batches, sizes, contribution_clip)
    source = noise or EntropyNoise()
    for number, histogram in enumerate(counts.values()):
        for start in range(0, len(histogram), _ROWS_AT_A_TIME):
            part = histogram[start : start + _ROWS_AT_A_TIME]
            rows = tf.range(start, start + len(part), dtype=tf.int64)
            unit = source.normal(number, rows, tf.constant(0, tf.int64), 1).numpy()[:, 0]
            part += noise_multiplier * contribution_clip * unit
    return {path: histogram.astype(np.float32) for path, histogram in counts.items()}


def _clipped_histogram(
    batches: Iterable[Mapping[str, np.ndarray]], sizes: Mapping[str, int], contribution_clip: float
) -> Frequencies:
    """The sum of the examples' clipped contribution maps, without noise: not to be released."""
    space = draws.BucketSpace(sizes)
    total = np.zeros(space.size)
    for batch in batches:
        examples, buckets = [], []
        for path, ids in batch.items():
            ids = np.asarray(ids, np.int64).reshape(len(ids), -1)
            if ids.size and ids.max() >= sizes[path]:
                raise ValueError(f"'{path}' has {sizes[path]} rows, but an example reads row {ids.max()}.")
            examples.append(np.repeat(np.arange(len(ids)), ids.shape[1]))
            buckets.append(space.numbers(path, tf.constant(ids.reshape(-1))).numpy())
        pairs = tf.constant(np.concatenate(examples)), tf.constant(np.concatenate(buckets))
        votes = draws.contribution_counts(*pairs, space.size, contribution_clip)
        total[votes.touched.numpy()] += votes.counts.numpy()
    ends = np.cumsum(list(sizes.values()))
    return dict(zip(sizes, np.split(total, ends[:-1])))
