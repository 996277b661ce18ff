"""Canaries: secrets planted in the training data at exact counts.

A canary is an example drawn uniformly from the public catalogue, feature by feature: for a sequence model
a random context and a random label. Nothing generalises to it, so whatever the model knows of it came from
its copies in the training data. References are drawn the same way and never trained on.

- A canary with repeat count k is planted as k training units: k made-up users that each hold it once.
- So user-level privacy protects *one copy*. A canary with k copies is covered by group privacy only
  (k ε for pure DP), which is why exposure may rise with k under a mechanism that keeps its promise.
- No canary equals another canary or a reference.

Reference:
    Carlini et al., The Secret Sharer, USENIX Security 2019; the counts are those of Berlowitz et al.,
    EANA, RecSys 2022, sections 4.1.3 and 4.2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

REPEATS = (1, 2, 3, 4, 5, 10, 20, 50, 100)
NUM_REFERENCES = 16_384

Features = dict[str, NDArray[Any]]
Fetch = Callable[[NDArray[np.int64]], Features]


@dataclass(frozen=True)
class Uniform:
    """One feature of the catalogue: ids drawn uniformly from [low, high), in the shape of one example.

    Attributes:
        high: Number one past the greatest id.
        shape: Shape of the feature in one example, () for a label.
        low: The least id; 1 where 0 means padding.
        dtype: Integer type of the ids.

    Example:
        >>> Uniform(27_279, shape=(20,), low=1).draw(np.random.default_rng(0), 3).shape
        (3, 20)
    """

    high: int
    shape: tuple[int, ...] = ()
    low: int = 0
    dtype: str = "int64"

    def __post_init__(self) -> None:
        if self.high <= self.low:
            raise ValueError(f"A catalogue needs high > low, got low={self.low}, high={self.high}.")

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[Any]:
        """`count` examples of this feature, [count, *shape]."""
        return rng.integers(self.low, self.high, size=(count, *self.shape)).astype(self.dtype)


@dataclass(frozen=True)
class Canaries:
    """Planted sequences, how often each is planted, and the references.

    Attributes:
        features: Features of the canaries, [canaries, ...] each.
        repeats: Number of copies of each in the training data, [canaries].
        references: Features of sequences that are never trained on, [references, ...] each.

    Example:
        >>> catalogue = {"context": Uniform(1000, shape=(5,)), "label": Uniform(1000)}
        >>> canaries = Canaries.draw(catalogue, repeats=(1, 10), per_repeat=3, num_references=64, seed=0)
        >>> canaries.num_units, canaries.features["context"].shape
        (33, (6, 5))
        >>> users = {"context": np.zeros((64, 5), int), "label": np.zeros(64, int)}
        >>> fetch, num_units = canaries.insert(lambda i: {k: v[i] for k, v in users.items()}, num_units=64)
        >>> num_units, fetch(np.array([3, 64, 96]))["label"].shape
        (97, (3,))
    """

    features: Features
    repeats: NDArray[np.int64]
    references: Features

    @classmethod
    def draw(
        cls,
        catalogue: Mapping[str, Uniform],
        *,
        repeats: Sequence[int] = REPEATS,
        per_repeat: int = 50,
        num_references: int = NUM_REFERENCES,
        seed: int | None = None,
    ) -> Canaries:
        """Draw canaries and references uniformly from the catalogue.

        Args:
            catalogue: Distribution of the ids of each feature.
            repeats: The repeat counts; `per_repeat` canaries are planted with each.
            per_repeat: Number of canaries for each repeat count.
            num_references: Number of sequences that are never planted.
            seed: Seed that makes the draw repeatable, as a resumed run needs; without it the system's entropy decides.

        Raises:
            ValueError: a count is below 1, or the catalogue is too small for distinct sequences.
        """
        if per_repeat < 1 or num_references < 1 or not repeats or min(repeats) < 1:
            raise ValueError(
                "per_repeat, num_references and every repeat count must be at least 1, "
                f"got {per_repeat}, {num_references}, {list(repeats)}."
            )
        counts = np.repeat(np.asarray(repeats, dtype=np.int64), per_repeat)
        sequences = _draw_distinct(catalogue, counts.size + num_references, np.random.default_rng(seed))
        planted = {name: values[: counts.size] for name, values in sequences.items()}
        return cls(planted, counts, {name: values[counts.size :] for name, values in sequences.items()})

    @property
    def num_units(self) -> int:
        """Training units that hold canaries: the sum of all repeat counts."""
        return int(self.repeats.sum())

    def insert(self, fetch: Fetch, num_units: int) -> tuple[Fetch, int]:
        """Append the canary units to a random-access source of training units.

        Features that canaries do not have are zero for them, or "": no row of a unit stands in for a canary's.

        Args:
            fetch: Function from indices to the features of the original units, one row an index.
            num_units: Number of original units; index `num_units` becomes the first canary unit.

        Returns:
            A fetch over all units, and how many there are: what a sampling scheme is built with.
        """
        owners = np.repeat(np.arange(self.repeats.size), self.repeats)

        def fetch_all(indices: NDArray[np.int64]) -> Features:
            indices = np.asarray(indices)
            planted = indices >= num_units
            if np.any((indices < 0) | (indices >= num_units + owners.size)):
                raise IndexError(f"Unit indices must lie in [0, {num_units + owners.size}).")
            canaries = owners[indices[planted] - num_units]
            own = {name: values[canaries] for name, values in self.features.items()}
            originals = fetch(indices[~planted])
            return {name: _merge(planted, own.get(name), originals[name]) for name in {**originals, **own}}

        return fetch_all, num_units + owners.size

    def by_repeats(self, losses: ArrayLike) -> dict[int, NDArray[np.float64]]:
        """Group per-canary losses by repeat count, as the exposure functions take them.

        Args:
            losses: Losses in the order of `features`, [canaries].

        Raises:
            ValueError: not one loss for each canary.
        """
        values = np.asarray(losses, dtype=np.float64)
        if values.shape != self.repeats.shape:
            raise ValueError(f"Expected {self.repeats.size} canary losses, got shape {values.shape}.")
        return {int(count): values[self.repeats == count] for count in np.unique(self.repeats)}


def _merge(planted: NDArray[np.bool_], canaries: NDArray[Any] | None, originals: Any) -> NDArray[Any]:
    """A feature of originals and canaries, each in its place; zero, or "", for canaries without it."""
    originals = np.asarray(originals)
    if len(originals) != np.count_nonzero(~planted):
        raise ValueError(f"fetch gave {len(originals)} rows for {np.count_nonzero(~planted)} units.")
    if canaries is not None and canaries.shape[1:] != originals.shape[1:]:
        raise ValueError(f"Canaries have shape {canaries.shape[1:]} where the data has {originals.shape[1:]}.")
    is_text, dtype = originals.dtype.kind in "US", originals.dtype
    if is_text and canaries is not None:
        dtype = np.result_type(dtype, canaries.dtype)  # which cuts none of them
    merged = np.full((len(planted), *originals.shape[1:]), "" if is_text or dtype.kind == "O" else 0, dtype)
    merged[~planted] = originals
    if canaries is not None:
        merged[planted] = canaries.astype(dtype)
    return merged


def _draw_distinct(catalogue: Mapping[str, Uniform], count: int, rng: np.random.Generator) -> Features:
    sequences = {name: feature.draw(rng, count) for name, feature in catalogue.items()}
    for _ in range(100):
        rows = np.concatenate([values.reshape(count, -1) for values in sequences.values()], axis=1)
        _, first = np.unique(rows, axis=0, return_index=True)
        repeated = np.setdiff1d(np.arange(count), first)
        if repeated.size == 0:
            return sequences
        for name, feature in catalogue.items():
            sequences[name][repeated] = feature.draw(rng, repeated.size)
    raise ValueError(f"The catalogue is too small for {count:,} distinct sequences.")
