"""Released sums over users, as a value to which later releases are added.

X_t are the sums over the users of day t, with their own noise, which the day's own budget has paid for. Over all days

    S_t = γ S_{t-1} + X_t,     N_t = γ N_{t-1} + n_t,     v_t = γ² v_{t-1} + σ_t²,

S the sums, N their number of users, v the variance of the noise of an entry; γ ≤ 1 is a public constant, and γ = 1
forgets nothing. This is arithmetic on releases: it costs nothing, and reads no user.

**Items that a day did not have are 0 there, without noise.** So an item that joined later has less noise, and v is kept
for each item. Pairs are kept for the items in the latest head; an item that leaves the head and comes back begins anew.
Its row then has the noise of each day since, that of a pair began with the later of its two items, and so

    v(i, j) = min(v_i, v_j).

**Weights.** If days differed in n_t and σ_t alone, weights n_t / σ_t² on X_t would give the least noise. So equal
weights, the plain sum, are best where days have equal noise and about as many users. Where users change, the best γ is
below 1, the lower the faster they change.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.claim.entries import new_id


@dataclasses.dataclass(frozen=True, eq=False)
class Release:
    """Noisy counts, and noisy pairs of some of the items, of one fit or of the sum of several. It is immutable.

    Attributes:
        users: N, the number of users in the sums.
        counts: Noisy count of each item of the catalogue.
        counts_noise: Standard deviation of the noise of each count.
        head: Places of the items that have a row of pairs.
        pairs: Noisy pairs of the head, symmetric, the diagonal 0.
        pairs_noise: Standard deviation of the noise of each row; that of an entry is the lesser of its two rows'.
        fits: Number of fits in the sums.
        ordered: Whether pairs are those near each other in ordered histories; else of any two items of a user.
        votes: Noisy sum of the votes on order (`tfdp_rec.spectral.order`) of the first fit.
        votes_noise: Standard deviation of its noise; 0 if there was no vote.
        private: Whether all noise came from the operating system's entropy.
        multipliers: Noise multiplier of the one Gaussian that each fit cost.
        names: A name of each fit, which no other has.
        of_run: Whether a fit was part of a run, whose ledger alone knows what else it has cost.

    Example:
        >>> one = Release().add_counts(np.array([5.0, 3.0]), sigma=1.0, users=9)
        >>> two = one.faded(0.5).add_counts(np.array([1.0, 1.0, 4.0]), 1.0, users=9)
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
    ordered: bool = False
    votes: float = 0.0
    votes_noise: float = 0.0
    private: bool = True
    multipliers: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))
    names: NDArray[np.str_] = dataclasses.field(default_factory=lambda: np.zeros(0, "<U16"))
    of_run: bool = False

    def faded(self, keep: float) -> Release:
        """The same release with less weight.

        Args:
            keep: γ, the factor of all sums.

        Raises:
            ValueError: γ is not above 0 and at most 1.
        """
        if not 0 < keep <= 1:
            raise ValueError(f"The weight of earlier sums must be above 0 and at most 1, got {keep!r}.")
        if keep == 1:
            return self
        sums = ("users", "counts", "counts_noise", "pairs", "pairs_noise")
        return dataclasses.replace(self, **{name: keep * getattr(self, name) for name in sums})

    def add_counts(
        self, counts: NDArray[np.float64], sigma: float, users: int, private: bool = True, cost: float = math.nan
    ) -> Release:
        """The release with noisy `counts` of a further fit added, whose catalogue has new items at its end.

        `cost` is the noise multiplier of the Gaussian that the whole fit costs.
        """
        new = len(counts) - len(self.counts)
        if new < 0:
            raise ValueError(f"Earlier sums have {len(self.counts)} items, and these {len(counts)}: items only join.")
        return dataclasses.replace(
            self,
            users=self.users + users,
            counts=np.pad(self.counts, (0, new)) + counts,
            counts_noise=np.hypot(np.pad(self.counts_noise, (0, new)), sigma),
            fits=self.fits + 1,
            private=self.private and private,
            multipliers=np.append(self.multipliers, cost),
            names=np.append(self.names, new_id()),
        )

    def noise_with(self, sigma: float) -> float:
        """Largest standard deviation of the noise of pairs, after those of a further fit of noise `sigma` are added."""
        return float(np.hypot(self.pairs_noise.max(initial=0.0), sigma))

    def add_pairs(
        self, head: NDArray[np.int64], noisy: NDArray[np.float32], sigma: float, ordered: bool = False
    ) -> Release:
        """The release with the `noisy` pairs of a further fit's head added; rows of items outside it are dropped."""
        if len(self.head) and ordered != self.ordered:
            raise ValueError("Pairs of ordered histories and pairs of any two items are not added up.")
        row = np.full(len(self.counts), -1)
        row[self.head] = np.arange(len(self.head))
        stay = np.flatnonzero(row[head] >= 0)
        before = row[head[stay]]
        total, noise = noisy.copy(), np.full(len(head), sigma)
        total[np.ix_(stay, stay)] += self.pairs[np.ix_(before, before)]
        noise[stay] = np.hypot(self.pairs_noise[before], sigma)
        return dataclasses.replace(self, head=head, pairs=total, pairs_noise=noise, ordered=ordered)

    # Files.

    def arrays(self) -> dict[str, Any]:
        """Arrays by name, for `np.savez`."""
        return {f"released_{field.name}": getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_arrays(cls, file: Mapping[str, Any]) -> Release:
        """The inverse of `arrays`."""
        found = {field.name: file[f"released_{field.name}"] for field in dataclasses.fields(cls)}
        return cls(**{name: value if value.ndim else value.item() for name, value in found.items()})
