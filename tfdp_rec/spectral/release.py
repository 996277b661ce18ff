"""What was released of users, as a value that later releases are added to.

Of day t, X_t: the sums of its users, with their own noise, which its own budget has paid for. Of all days

    S_t = γ S_{t-1} + X_t,     N_t = γ N_{t-1} + n_t,     v_t = γ² v_{t-1} + σ_t²,

S the sums, N how many users they speak of, v the variance of the noise of an entry; γ ≤ 1 is a public constant, and
with γ = 1 nothing is forgotten. This is arithmetic on what was released: it costs nothing, and no user is looked at.

**What a day did not know is zero there, noise included.** So an item that joined later has less noise, and v is kept
for each item. Of pairs, rows are kept of the items in the latest head; an item that leaves it and comes back begins
anew. Its row then has the noise of each day since, that of a pair began with the later of its two items, and so

    v(i, j) = min(v_i, v_j).

**Weights.** Were every day alike but for n_t and σ_t, the least noise would be that of weights n_t / σ_t² on X_t. So
equal weights, the plain sum, are the best there are where days have equal noise and about as many users; where users
change, the best γ is the one that weighs what is new against that noise: below 1, more so the quicker they change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, eq=False)
class Release:
    """Noisy counts, and noisy pairs of some of the items, of one fit or of several added up. Nothing in it is changed.

    Attributes:
        users: N, of how many users the sums speak.
        counts: of each item of the catalogue.
        counts_noise: standard deviation of the noise of each.
        head: places of the items whose pairs were counted.
        pairs: of these, symmetric, the diagonal empty.
        pairs_noise: standard deviation of the noise of each row; that of an entry is the lesser of its two.
        fits: how many were added up.
        private: no test supplied the noise of any.

    Example:
        >>> one = Release().counted(np.array([5.0, 3.0]), sigma=1.0, users=9)
        >>> two = one.faded(0.5).counted(np.array([1.0, 1.0, 4.0]), 1.0, users=9)
        >>> two.counts.tolist(), two.users, (two.counts_noise**2).round(3).tolist()
        ([3.5, 2.5, 4.0], 13.5, [1.25, 1.25, 1.0])
    """

    users: float = 0.0
    counts: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))
    counts_noise: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))
    head: NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    pairs: NDArray[np.float32] = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.float32))
    pairs_noise: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))
    fits: int = 0
    private: bool = True

    def faded(self, keep: float) -> Release:
        """The same, weighing less.

        Args:
            keep: γ.

        Raises:
            ValueError: it is not above 0 and at most 1.
        """
        if not 0 < keep <= 1:
            raise ValueError(f"What is kept of earlier sums must be above 0 and at most 1, got {keep!r}.")
        return self if keep == 1 else dataclasses.replace(
            self, users=keep * self.users, counts=keep * self.counts, counts_noise=keep * self.counts_noise,
            pairs=np.float32(keep) * self.pairs, pairs_noise=keep * self.pairs_noise,
        )  # fmt: skip

    def counted(self, counts: NDArray[np.float64], sigma: float, users: int, private: bool = True) -> Release:
        """With the counts of a further fit.

        Args:
            counts: of the whole catalogue; items that are new stand at its end.
            sigma: of their noise.
            users: who were counted.
            private: no test supplied the noise.

        Raises:
            ValueError: the catalogue has lost items.
        """
        new = len(counts) - len(self.counts)
        if new < 0:
            raise ValueError(f"Earlier sums have {len(self.counts)} items, and these {len(counts)}: items only join.")
        return dataclasses.replace(
            self, users=self.users + users, counts=np.pad(self.counts, (0, new)) + counts,
            counts_noise=np.hypot(np.pad(self.counts_noise, (0, new)), sigma), fits=self.fits + 1,
            private=self.private and private,
        )  # fmt: skip

    def noise_with(self, sigma: float) -> float:
        """Of pairs, at most, once a further fit has added its own.

        Args:
            sigma: of that.
        """
        return float(np.hypot(self.pairs_noise.max(initial=0.0), sigma))

    def paired(self, head: NDArray[np.int64], noisy: NDArray[np.float32], sigma: float) -> Release:
        """With the pairs of a further fit; the rows of other items are dropped.

        Args:
            head: places of the items whose pairs these are.
            noisy: the pairs.
            sigma: of their noise.
        """
        row = np.full(len(self.counts), -1)
        row[self.head] = np.arange(len(self.head))
        stay = np.flatnonzero(row[head] >= 0)
        before = row[head[stay]]
        total, noise = noisy.copy(), np.full(len(head), sigma)
        total[np.ix_(stay, stay)] += self.pairs[np.ix_(before, before)]
        noise[stay] = np.hypot(self.pairs_noise[before], sigma)
        return dataclasses.replace(self, head=head, pairs=total, pairs_noise=noise)

    # Files.

    def arrays(self) -> dict[str, Any]:
        """What to write with `np.savez`."""
        return {f"released_{field.name}": getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_arrays(cls, file: Mapping[str, Any]) -> Release:
        """The inverse, of what `np.load` gives.

        Raises:
            KeyError: something is not there.
        """
        found = {field.name: file[f"released_{field.name}"] for field in dataclasses.fields(cls)}
        return cls(**{name: value if value.ndim else value.item() for name, value in found.items()})
