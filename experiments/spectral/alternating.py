"""Alternating minimisation with noisy sums (DPALS): users solved exactly, on their own data; items from sums over them.

For items j of the head, vectors v_j of width w, users with histories h (w_h = 1/√|h|, over the head):

    user      u = argmin Σ_{j in h} (1 − u·v_j)² + a Σ_j (u·v_j)² + r |u|²,  then u / |u|      tells nothing
    sums      G = Σ u uᵀ,   b_j = Σ_{h ∋ j} w_h u,   and A_j = Σ_{h ∋ j} w_h u uᵀ or its guess c_j G / n
    item      v_j = (A_j + a s G + r I)⁻¹ b_j

Each of the three sums has sensitivity 1, for |u| = 1 and Σ_{j in h} w_h² = 1; counts take a ninth of σ⁻², every round's
sums an equal part of the rest, so that the whole is one Gaussian of the budget's σ. All rounds' noise is NumPy's:
for study, not for release.

Reference:
    Chien et al., "Private alternating least squares", ICML 2021; Krichene et al., "Private learning with public
    features", ICML 2023.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Alternating:
    """Settings of one training.

    Attributes:
        width: w.
        rounds: how often items are solved for.
        head: most popular items by the noisy counts; others have their count alone.
        weight: a, of what users have not.
        ridge: r, in units of what it stands beside.
        own: whether each item has its own A_j; else all have the mean's.
    """

    width: int = 8
    rounds: int = 2
    head: int = 300
    weight: float = 1.0
    ridge: float = 0.03
    own: bool = False

    @property
    def sums(self) -> int:
        """How many sums of sensitivity 1 a training takes."""
        return self.rounds * (3 if self.own else 2)

    def fit(self, has: sparse.csr_matrix, counts: Array, sigma: float, rng: np.random.Generator) -> Array:
        """Item vectors: all that users' scores are made of.

        Args:
            has: users × head, 0/1.
            counts: of the head, noisy.
            sigma: of each sum, in units of its sensitivity.
            rng: of the start and the noise.
        """
        items = rng.normal(size=(has.shape[1], self.width)) / self.width**0.5
        weights = 1 / np.sqrt(np.maximum(np.asarray(has.sum(axis=1)).ravel(), 1))
        for _ in range(self.rounds):
            users = self.users(has, items)
            items = self._items(sparse.diags(weights) @ has, users, counts, sigma, rng)
        return items

    def users(self, has: sparse.csr_matrix, items: Array) -> Array:
        """Vectors of length 1 of some users, each from its own items."""
        every = self.weight * items.T @ items
        mean = np.trace(items.T @ items) / self.width / len(items)
        found = np.zeros([has.shape[0], self.width])
        sums = has @ items
        for user in range(has.shape[0]):
            mine = items[has.indices[has.indptr[user] : has.indptr[user + 1]]]
            if len(mine):
                solved = np.linalg.solve(mine.T @ mine + every + self.ridge * len(mine) * mean * np.eye(self.width),
                                         sums[user])  # fmt: skip
                found[user] = solved / max(np.linalg.norm(solved), 1e-12)
        return found

    def _items(
        self, weighed: sparse.csr_matrix, users: Array, counts: Array, sigma: float, rng: np.random.Generator
    ) -> Array:
        d = self.width

        def noise(*shape: int) -> Array:
            return sigma * rng.normal(size=shape)

        gram = _whole(users.T @ users + _symmetric(noise(d, d)))
        sums = weighed.T @ users + noise(weighed.shape[1], d)
        share = np.maximum(counts, sigma) / max(np.trace(gram), 1.0)  # |u| = 1: the trace is how many users there are
        scale = np.median(weighed.sum() / max(weighed.nnz, 1))
        if self.own:
            outer = (users[:, :, None] * users[:, None, :]).reshape(len(users), -1)
            own = (weighed.T @ outer).reshape(-1, d, d) + np.stack([_symmetric(noise(d, d)) for _ in range(len(sums))])
            own = np.stack([_whole(each) for each in own])
        else:
            own = scale * share[:, None, None] * gram
        ridge = self.ridge * np.trace(own, axis1=1, axis2=2)[:, None, None] / d + sigma
        left = own + self.weight * scale * share.mean() * gram + ridge * np.eye(d)
        return np.linalg.solve(left, sums[:, :, None])[:, :, 0]


def _symmetric(noise: Array) -> Array:
    upper = np.triu(noise)
    return upper + np.triu(noise, 1).T


def _whole(matrix: Array) -> Array:
    """The nearest matrix without negative eigenvalues."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.maximum(values, 0)) @ vectors.T
