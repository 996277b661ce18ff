"""Rows chosen once, before training: the private top k of each table, or rows that are public knowledge.

Every example adds its contribution map, 1 on the distinct rows that it reads, clipped to L2 norm C1, to a histogram
over all rows of all tables. It gets N(0, (s0 C1)^2) on *every* row, and the k largest of each table are kept:

  one Gaussian event with noise multiplier s0, not sampled, paid once.

Counts and noise are whole numbers of steps of 2^-20 C1 (`sums.fixed_point`), so that an example moves the histogram by
C1 at most, and the lowest bits of a frequency do not tell which count the noise was added to.

The noisy histograms of disjoint sets of examples (days, say) cost one such event in all, since an example is in one
of them only; sums of them are post-processing. `noisy_frequencies` of each day, added up, is therefore how a choice
may follow a stream.

Reference:
    B. Ghazi et al., Sparsity-Preserving Differentially Private Training of Large Embedding Models, NeurIPS 2023
    (DP-FEST).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.claim.entries import Use, id_of_use
from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent, NoOpDpEvent
from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy
from tfdp_rec.sparse import draws
from tfdp_rec.sums.fixed_point import ONE, check_noise, grid_weights, release_sums

Frequencies = dict[str, np.ndarray]
_ROWS_AT_A_TIME = 1 << 20
_LARGEST_CLIP = 1024  # in units of the clip an entry of 1 is then still a thousand steps of the grid


@keras.saving.register_keras_serializable(package="tfdp_rec")
class Preselection:
    """Rows that training is confined to.

    Args:
        rows: Table path (`variable.path`) -> the chosen rows, distinct.
        noise_multiplier: s0 of the private choice that gave them; None if they are public knowledge.
        id: Id of the private look at the data that gave them, which is paid for once; a new one by default.

    Raises:
        ValueError: for a noise multiplier that is not positive.

    Example:
        >>> Preselection({"items/embeddings": [3, 1, 4]}, noise_multiplier=20.0).dp_event()
        GaussianDpEvent(noise_multiplier=20.0)
    """

    def __init__(self, rows: Mapping[str, Any], *, noise_multiplier: float | None = None, id: str | None = None):
        if noise_multiplier is not None and not 0.0 < noise_multiplier < np.inf:
            raise ValueError(f"noise_multiplier must be positive, or None for public rows; got {noise_multiplier!r}.")
        self.rows = {path: np.asarray(chosen, dtype=np.int64).reshape(-1) for path, chosen in rows.items()}
        self._noise_multiplier = noise_multiplier
        self.id = id or secrets.token_hex(8)  # not a hash of the rows: a second look may choose the same

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

    def dp_event(self) -> DpEvent:
        """Event of the choice, which is paid for once, for `Accountant.spend`."""
        if self.noise_multiplier is None:
            return NoOpDpEvent()
        return GaussianDpEvent(self.noise_multiplier)

    @property
    def noise_multiplier(self) -> float | None:
        """s0 of the choice; fixed, since the choice is priced by it."""
        return self._noise_multiplier

    @property
    def label(self) -> str:
        """Label of the choice in accounts, with its id; saved and loaded it keeps both."""
        return f"pre-selection of {sum(map(len, self.rows.values()))} rows ({self.id})"

    @property
    def use(self) -> Use:
        """The choice as one use of the data, for `PrivatePlan(spent=)`."""
        return Use(self.dp_event(), self.label, id_of_use(self.dp_event(), self.label))

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        rows = {path: chosen.tolist() for path, chosen in self.rows.items()}
        return {"rows": rows, "noise_multiplier": self.noise_multiplier, "id": self.id}

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
    words: WordSource = os_entropy,
) -> Frequencies:
    """How often examples read each row, clipped by example, with Gaussian noise on every row.

    Args:
        batches: Table path -> ids [examples, reads] or [examples]; negative ids are padding. An example must be in
            one batch only.
        sizes: Table path -> number of its rows.
        noise_multiplier: Noise multiplier s0 of the frequencies.
        contribution_clip: Bound C1 on the L2 norm of what an example adds.
        words: Source of random bits, for tests; the operating system's by default. With any other the frequencies have
            no guarantee, whatever the event of a choice says.

    Returns:
        Table path -> float32 [rows], multiples of 2^-20 C1 up to the rounding to float32.

    Raises:
        ValueError: noise_multiplier is not positive and below 2^20, or contribution_clip not positive and at most 1024;
            an id is beyond its table.

    Example:
        >>> counts = noisy_frequencies([{"a": np.array([2, 2, 0])}], {"a": 4}, noise_multiplier=1e-6)
        >>> counts["a"].round(3).tolist()
        [1.0, 0.0, 2.0, 0.0]
    """
    noise = check_noise(noise_multiplier)
    if not 0.0 < contribution_clip <= _LARGEST_CLIP:
        raise ValueError(f"contribution_clip must be positive and at most {_LARGEST_CLIP}, got {contribution_clip!r}.")
    found = {}
    for path, total in _sum_contributions(batches, sizes, contribution_clip).items():
        found[path] = np.zeros(len(total), np.float32)  # rounding a release is post-processing
        for start in range(0, len(total), _ROWS_AT_A_TIME):
            part = slice(start, start + _ROWS_AT_A_TIME)
            found[path][part] = contribution_clip * release_sums(total[part], noise, words)
    return found


def _sum_contributions(
    batches: Iterable[Mapping[str, np.ndarray]], sizes: Mapping[str, int], contribution_clip: float
) -> dict[str, np.ndarray]:
    """The sum of the examples' clipped contribution maps, in grid steps. It has no noise and must not be released."""
    space = draws.BucketSpace(sizes)
    total = np.zeros(space.size, np.int64)
    largest = int(ONE / max(1.0, contribution_clip))  # an entry of 1
    for batch in batches:
        examples, buckets = [], []
        for path, ids in batch.items():
            ids = np.asarray(ids, np.int64).reshape(len(ids), -1)
            if ids.size and ids.max() >= sizes[path]:
                raise ValueError(f"'{path}' has {sizes[path]} rows, but an example reads row {ids.max()}.")
            examples.append(np.repeat(np.arange(len(ids)), ids.shape[1]))
            buckets.append(space.numbers(path, tf.constant(ids.reshape(-1))).numpy())
        pairs = np.stack([np.concatenate(examples), np.concatenate(buckets)])
        example, bucket = np.unique(pairs[:, pairs[1] >= 0], axis=1)  # an id that repeats counts once
        weights = np.minimum(grid_weights(np.bincount(example)), largest)
        np.add.at(total, bucket, weights[example])
    ends = np.cumsum(list(sizes.values()))
    return dict(zip(sizes, np.split(total, ends[:-1])))
